"""Options of the launcher; imports little, so that help and errors come at once."""

import argparse
import itertools
from collections.abc import Sequence

from alma.errors import Parser, count, number_list
from alma.help_texts import SEEDS, SIZE
from alma.learners import text_learners
from alma.options import add_options, flag_of, options_of
from slurm.engine import resources
from slurm.lm.plan import Request
from slurm.lm.presets import ANYTIME, PRESETS

_MAIN_FLAGS = (
    "--arch",
    "--optimizer",
    "--lr",
    "--lr-scheduler",
    "--warmup-updates",
    "--tokens-per-sample",
    "--max-tokens",
    "--batch-size",
    "--update-freq",
    "--max-update",
    "--max-epoch",
    "--distributed-world-size",
)
"""Flags of fairseq-train that hints name."""
_EXAMPLES = """\
examples:
  # two learners on one stream, with the paper's settings
  alma train stream --learner sm --out runs/sm
  alma train stream --learner gmoe --grow-experts 2,2,4 --out runs/gmoe
  # a small model for a CPU; the flags after -- are those of fairseq-train
  alma train stream --learner sm --out runs/tiny -- --arch switch_gmoe_tiny --max-update 400
  # a model of Hugging Face; the flags after -- are those of transformers' Trainer
  alma train stream --init models/qwen --learner sm --out runs/qwen replay-share=0,.5 -- \
--max_steps 400
  # the settings that this project recommends: one schedule, averaged weights, old data in every \
stage
  alma train stream --learner sm --preset anytime --out runs/anytime
  # two learners at three learning rates, each of the six runs in a folder of its own
  alma train experiments/tune.yaml runs=lr --stream stream learner=sm,gmoe lr=5e-4,1e-3,2e-3
  # a row of the paper's Table 2 with three seeds on SLURM: first the plan, then the jobs
  alma train experiments/table2.yaml runs=gmoe_w1 --stream stream --seeds 0-2 --cluster slurm \
--dry-run
  alma train experiments/table2.yaml runs=gmoe_w1 --stream stream --seeds 0-2 --cluster slurm
"""


def parser() -> Parser:
    launcher_parser = Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM [key=value...] --learner L --out RUN [options] [-- flags of "
        "fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [key=value...] [options] [-- flags of fairseq-train]",
        description="Train a language model on a stream of mega-batches and evaluate it after each "
        "stage. Rerun the command to resume after an interruption, or to train the new stages of a "
        "longer stream.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        other="fairseq-train",
        other_flags=_MAIN_FLAGS,
    )
    add = launcher_parser.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream made by `alma data`, or a directory of fairseq-preprocess; or experiments: "
        "YAML files, runs=A,B for some of their runs. key=value sets an option or a flag, also of "
        "an experiment; key=A,B or key=[A,B]: a run for each value. Without brackets, commas are "
        "part of the value in grow-experts, and after a quote or parenthesis. An experiment is "
        "code: trainer, evaluate and user-dir run programs. Read one from elsewhere first; "
        "--dry-run shows them and runs none",
    )
    options = options_of(Request)
    specs = text_learners()
    group = launcher_parser.add_argument_group("run", "--stream and --size are for experiments.")
    group.add_argument("--size", metavar="SIZE", help=SIZE)
    add_options(group, [options.pop(name) for name in ("stream", "out", "name")])
    growth = [options.pop(name) for name in list(options) if name.startswith("grow_")]
    counts = ", ".join(f"{spec.members} for {name}" for name, spec in specs.items() if spec.members)
    kinds = "; ".join(f"{name}: {spec.help}" for name, spec in specs.items())
    changes: dict[str, dict] = {"learner": {"choices": specs, "metavar": None, "help": kinds}}
    changes["members"] = {"help": f"{options['members'].metadata['help']} (default: {counts})"}
    group = launcher_parser.add_argument_group(
        "learner", "What is trained in each stage, and on which mega-batches."
    )
    add_options(group, options.values(), Request, changes=changes)
    words = " ".join(f"{flag_of(name)} {value}" for name, value in ANYTIME.items())
    preset = f"options that are not given; anytime: {words}, as far as the learner has them "
    preset += "(default: paper)"
    group.add_argument("--preset", choices=PRESETS, help=preset)
    group.add_argument(
        "--seeds", type=number_list, metavar="LIST", help=f"{SEEDS}, in RUN_s0 and so on"
    )
    growing = ", ".join(name for name, spec in specs.items() if spec.growth)
    group = launcher_parser.add_argument_group(
        "growth", f"How experts are added between stages; for {growing}."
    )
    add_options(group, growth)
    group = launcher_parser.add_argument_group("where to run")
    resources.add_cluster(group, "local", "slurm")
    jobs = "with --cluster local: trainings or evaluations at a time; the GPUs are divided "
    jobs += "(default: 1)"
    group.add_argument("--jobs", type=count, metavar="N", help=jobs)
    group.add_argument("--wait", action="store_true", help=resources.WAIT)
    dry_run = "check everything and print the plan; run and write nothing, and import no --user-dir"
    group.add_argument("--dry-run", action="store_true", help=dry_run)
    megabatches = "with --dry-run: plan for a stream of B mega-batches, which need not exist"
    group.add_argument("--megabatches", type=count, metavar="B", help=megabatches)
    verbose = "print all commands too, and with --dry-run the input of sbatch"
    group.add_argument("--verbose", action="store_true", help=verbose)
    resources.add_flags(launcher_parser)
    return launcher_parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options before the first `--`; the last of repeated options counts."""
    return parser().parse_intermixed_args(
        list(itertools.takewhile(lambda word: word != "--", words))
    )
