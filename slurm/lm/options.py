"""Options of the launcher; imports little, so that help and errors come at once."""

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from alma import averages
from alma.errors import Parser, number_list
from alma.help_texts import CONTEXT_WINDOW, REPLAY, REPLAY_SHARE, SEED, SEEDS, SIZE, WAITING_TIME
from alma.help_texts import REPLAY_FROM as REPLAY_FROM_HELP
from alma.learners import DEFAULT_GROWTH, text_learners
from alma.stages import REPLAY_FROM
from slurm.engine import resources

MAIN_FLAGS: tuple[str, ...] = ("--arch", "--optimizer", "--lr", "--lr-scheduler", "--warmup-updates")
MAIN_FLAGS += ("--tokens-per-sample", "--max-tokens", "--batch-size", "--update-freq", "--max-update")
MAIN_FLAGS += ("--max-epoch", "--distributed-world-size")
"""Flags of fairseq-train in hints and in the short description of a training."""
SCHEDULES = ("stage", "continuous", "rsqrt", "autoregressive")
_ROUTERS = ("preserve", "copy", "tree")
_EXAMPLES = """\
examples:
  # two learners on one stream, with the paper's settings
  alma train stream --learner sm --out runs/sm
  alma train stream --learner gmoe --grow-experts 2,2,4 --out runs/gmoe
  # a small model for a CPU; the flags after -- are those of fairseq-train
  alma train stream --learner sm --out runs/tiny -- --arch switch_gmoe_tiny --max-update 400
  # one learning-rate schedule over all stages, and averages of the weights
  alma train stream --learner sm --schedule continuous --average .999 --out runs/average
  # two learners at three learning rates, each of the six runs in a folder of its own
  alma train experiments/tune/lr.yaml --stream stream learner=sm,gmoe lr=5e-4,1e-3,2e-3
  # a row of the paper's Table 2 with three seeds on SLURM: first the plan, then the jobs
  alma train experiments/table2/gmoe_w1_base.yaml --stream stream --seeds 0-2 --cluster slurm --dry-run
  alma train experiments/table2/gmoe_w1_base.yaml --stream stream --seeds 0-2 --cluster slurm
"""


def parser() -> Parser:
    """The command line up to the `--`."""
    made = Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner L --out RUN [options] [-- flags of fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [key=value...] [options] [-- flags of fairseq-train]",
        description="Train a language model on a stream of mega-batches and evaluate it after each stage. "
        "Rerun the command to resume after an interruption, or to train the new stages of a longer stream.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        other="fairseq-train",
        other_flags=MAIN_FLAGS,
    )
    add = made.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream made by `alma data`, or a directory of fairseq-preprocess; or experiments: YAML files "
        "or folders of them, and key=value to change an option or flag that they set; key=A,B or key=[A,B]: "
        "a run for each value. Without brackets, commas are part of the value in grow-experts, and after a "
        "quote or parenthesis",
    )
    group = made.add_argument_group("run", "--stream and --size are for experiments.")
    add = group.add_argument
    add("--stream", metavar="STREAM", help="stream that the experiments train on")
    add("--size", metavar="SIZE", help=SIZE)
    out = "run directory to create or resume (default of an experiment: runs/FOLDER/NAME)"
    add("--out", type=Path, metavar="RUN", help=out)
    add("--name", metavar="TEXT", help="label of the run in reports")
    _add_learner_options(made)
    _add_growth_options(made)
    _add_machine_options(made)
    return made


def _add_learner_options(made: Parser) -> None:
    kinds = "; ".join(f"{name}: {spec.help}" for name, spec in text_learners().items())
    members = {name: spec.members for name, spec in text_learners().items() if spec.members is not None}
    defaults = ", ".join(f"{count} for {name}" for name, count in members.items())
    group = made.add_argument_group("learner", "What is trained in each stage, and on which mega-batches.")
    add = group.add_argument
    add("--learner", choices=text_learners(), help=kinds)
    add("--members", type=_from(1), metavar="N", help=f"models of the ensemble (default: {defaults})")
    add("--waiting-time", type=_from(1), metavar="W", default=1, help=WAITING_TIME)
    add("--replay", action="store_true", help=REPLAY)
    add("--replay-share", type=float, metavar="S", default=0.0, help=REPLAY_SHARE)
    add("--replay-from", choices=REPLAY_FROM, help=f"{REPLAY_FROM_HELP} (default: all)")
    scratch = "train a new model in each stage, instead of the one of the stage before"
    add("--from-scratch", action="store_true", help=scratch)
    schedule = (
        "stage: optimizer and learning rate start anew with every stage, as in the paper; others: they go on "
        "over the stages, with one warm-up. continuous: constant learning rate; rsqrt: 1 / sqrt(updates); "
        "autoregressive: the peak of each stage lies on one linear decay over all stages so far "
        "(default: stage)"
    )
    add("--schedule", choices=SCHEDULES, default=SCHEDULES[0], help=schedule)
    cooldown = (
        "with --schedule continuous or rsqrt: after each stage, S times its updates at a learning rate that "
        "decays to 0; that model is evaluated, the next stage goes on from before (default: 0)"
    )
    add("--cooldown", type=float, metavar="S", default=0.0, help=cooldown)
    average = (
        "evaluate an average of the weights; training goes on from the weights themselves. DECAY: "
        "exponential over updates, such as .999 (0: off); poly:ETA: polynomial, with a memory that grows "
        "with the training, such as poly:8; last:K: mean of the last K checkpoints"
    )
    add("--average", type=_average, metavar="AVERAGE", help=average)
    updates = "train for X times --max-update updates in each stage (default: 1)"
    add("--update-multiplier", type=_from(1), metavar="X", default=1, help=updates)
    add("--seed", type=int, default=0, metavar="S", help=SEED)
    add("--seeds", type=number_list, metavar="LIST", help=f"{SEEDS}, in RUN_s0 and so on")
    add("--context-window", type=_from(0), metavar="N", default=0, help=CONTEXT_WINDOW)
    stop = "train N stages, then stop; rerun with a larger N to go on (default: all stages)"
    add("--stages", type=_from(1), metavar="N", help=stop)


def _from(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give {least} or more")
        return int(text)

    return number


def _average(text: str) -> float | str | None:
    """Value of --average: a decay, None for 0, or `poly:ETA` or `last:K` as it is written."""
    if re.fullmatch(r"last:[1-9]\d*", text):
        return text
    try:
        return averages.read(text) or None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or last:K such as last:8") from None


def _add_growth_options(made: Parser) -> None:
    growing = ", ".join(name for name, spec in text_learners().items() if spec.growth)
    group = made.add_argument_group("growth", f"How experts are added between stages; for {growing}.")
    add = group.add_argument
    add(
        "--grow-experts",
        type=partial(number_list, repeats=True),
        metavar="LIST",
        help=f"experts to add: one number, or one for each growth, such as 2,2,4 (default: {DEFAULT_GROWTH})",
    )
    add(
        "--grow-router",
        choices=_ROUTERS,
        help="preserve: correct the router so that the function stays the same; copy: copy the row of the "
        "router, as in the paper; tree: add a gate for each split (default: preserve)",
    )
    add(
        "--grow-optimizer",
        choices=("reset", "copy"),
        help="optimizer state after growth: reset, or copy from the split expert (default: reset)",
    )


def _add_machine_options(made: Parser) -> None:
    group = made.add_argument_group("where to run")
    add = group.add_argument
    resources.add_cluster(group, "local", "debug", "slurm")
    jobs = "with --cluster local: trainings or evaluations at a time; the GPUs are divided (default: 1)"
    add("--jobs", type=_from(1), metavar="N", help=jobs)
    add("--wait", action="store_true", help=resources.WAIT)
    add("--dry-run", action="store_true", help="check everything and print the plan; run and write nothing")
    rate = (
        "speed of a GPU in this training, in TFLOPs a second: print GPU-hours, by FLOPs (without evaluations)"
    )
    add("--tflops-per-gpu", type=float, metavar="X", help=rate)
    without = "with --dry-run: plan for a stream of B mega-batches, which need not exist"
    add("--megabatches", type=_from(1), metavar="B", help=without)
    verbose = "print all settings and commands too, and with --dry-run the input of sbatch"
    add("--verbose", action="store_true", help=verbose)
    resources.add_flags(made)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options before the first `--`; the last of repeated options counts."""
    return parser().parse_intermixed_args(list(itertools.takewhile(lambda word: word != "--", words)))
