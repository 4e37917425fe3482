"""The launcher's command line: options, experiments and flags of fairseq-train become requests."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from alma.errors import Parser, UserError, closest, number_list
from alma.help_texts import CONTEXT_WINDOW, REPLAY, SEED, SEEDS, SIZE, WAITING_TIME
from slurm.engine import resources
from slurm.engine.resources import Resources
from slurm.lm.experiments import experiment_files, is_experiment, read_experiment, read_overrides
from slurm.lm.flags import SHORT, Flags, read_flags, resolve, words_of
from slurm.lm.learners import LEARNERS
from slurm.lm.plan import DEFAULT_GROWTH, Request

_ROUTERS = ("preserve", "copy", "tree")
_OF_THE_MACHINE = {"--cluster", "--dry-run", "--wait", "--jobs", "--verbose"}
_OF_THE_MACHINE |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Resources)}
_EXAMPLES = """\
examples:
  # two learners on one stream, with the paper's settings
  alma train stream --learner sm --out runs/sm
  alma train stream --learner gmoe --grow-experts 2,2,4 --out runs/gmoe
  # a small model for a CPU; the flags after -- are those of fairseq-train
  alma train stream --learner sm --out runs/tiny -- --arch switch_gmoe_tiny --max-update 400
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
        other_flags=SHORT,
    )
    add = made.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream made by `alma data`, or a directory of fairseq-preprocess; or experiments: YAML files "
        "or folders of them, and key=value to change an option or flag that they set",
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
    kinds = "; ".join(f"{name}: {spec.help}" for name, spec in LEARNERS.items())
    members = {name: spec.members for name, spec in LEARNERS.items() if spec.members is not None}
    defaults = ", ".join(f"{count} for {name}" for name, count in members.items())
    group = made.add_argument_group("learner", "What is trained in each stage, and on which mega-batches.")
    add = group.add_argument
    add("--learner", choices=LEARNERS, help=kinds)
    add("--members", type=int, metavar="N", help=f"models of the ensemble (default: {defaults})")
    add("--waiting-time", type=int, metavar="W", default=1, help=WAITING_TIME)
    add("--replay", action="store_true", help=REPLAY)
    scratch = "train a new model in each stage, instead of the one of the stage before"
    add("--from-scratch", action="store_true", help=scratch)
    updates = "train for X times --max-update updates in each stage (default: 1)"
    add("--update-multiplier", type=int, metavar="X", default=1, help=updates)
    add("--seed", type=int, default=0, metavar="S", help=SEED)
    add("--seeds", type=number_list, metavar="LIST", help=f"{SEEDS}, in RUN_s0 and so on")
    add("--context-window", type=int, metavar="N", default=0, help=CONTEXT_WINDOW)
    stop = "train N stages, then stop; rerun with a larger N to go on (default: all stages)"
    add("--stages", type=int, metavar="N", help=stop)


def _add_growth_options(made: Parser) -> None:
    growing = ", ".join(name for name, spec in LEARNERS.items() if spec.growth)
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
    add("--jobs", type=int, metavar="N", help=jobs)
    add("--wait", action="store_true", help=resources.WAIT)
    add("--dry-run", action="store_true", help="check everything and print the plan; run and write nothing")
    verbose = "print all settings and commands too, and with --dry-run the input of sbatch"
    add("--verbose", action="store_true", help=verbose)
    resources.add_flags(made)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options before the first `--`; the last of repeated options counts."""
    return parser().parse_intermixed_args(list(itertools.takewhile(lambda word: word != "--", words)))


def read_requests(words: Sequence[str]) -> list[Request]:
    """Read a command line: options up to the first `--`, flags of fairseq-train after it."""
    options = parse(words)
    flags = read_flags(list(itertools.dropwhile(lambda word: word != "--", words))[1:])
    options.what, overrides = read_overrides(options.what)
    experiments = [Path(each) for each in options.what if is_experiment(Path(each))]
    if not experiments:
        if overrides:
            key = next(iter(overrides))
            raise UserError(
                f"{key}=: key=value overrides experiments (.yaml), and none is given: use --{key}, or a flag "
                "of fairseq-train after `--`"
            )
        return _requests(options, flags)
    if len(experiments) < len(options.what):
        raise UserError("give a stream, or experiments (.yaml) with their stream as --stream, not both")
    requests: dict[Path, Request] = {}
    for file in experiment_files(experiments):
        own_words, own_flags = read_experiment(file, options.size, overrides)
        names = {word.partition("=")[0] for word in own_words}
        if machine := sorted(_OF_THE_MACHINE & names):
            raise UserError(f"{file}: {machine[0]} says where to run: give {machine[0]} on the command line")
        _check_keys([key for key in overrides if f"--{key}" in names], options, own_flags)
        try:
            merged = parse([*own_words, *words])
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        merged.what = [merged.stream]
        for request in _requests(merged, {**own_flags, **flags}):
            if requests.setdefault(request.out, request) != request:
                raise UserError(f"{file}: another experiment goes to {request.out} too: give one at a time")
    return list(requests.values())


def _check_keys(keys: Iterable[str], options: argparse.Namespace, flags: Flags) -> None:
    """Raise UserError for a key of key=value that is no option; `flags`: of the experiment."""
    known = [name.replace("_", "-") for name in vars(options)]
    for key in keys:
        if key not in known:
            meant = closest(key, [*known, *(name[2:] for name in flags)])
            hint = f"did you mean {meant}?" if meant else "give other flags of fairseq-train after `--`"
            raise UserError(f"{key}=: neither an option nor a flag that the experiment sets; {hint}")


def _requests(options: argparse.Namespace, flags: Flags) -> list[Request]:
    """One request, or with --seeds one for each seed.

    Raises UserError for a missing option, or one that only experiments have.
    """
    given = vars(options)
    if len(given["what"]) > 1:
        raise UserError(f"{given['what'][1]}: give one stream; join the shards of one corpus by ':'")
    (stream,) = given["what"]
    if stream != given["stream"] and (given["stream"], given["size"]) != (None, None):
        raise UserError(f"--size and --stream are for experiments (.yaml), and {stream} is none")
    for name in ("learner", "out", *(["stream"] if stream is None else [])):
        if given[name] is None:
            raise UserError(f"give --{name}; see `{parser().prog} --help`")
    named = {field.name: given[field.name] for field in dataclasses.fields(Request) if field.name in given}
    flags = {name: words for name, words in flags.items() if words != [f"{name}=false"]}
    request = Request(**{**named, "stream": stream, "flags": flags})
    if options.seeds is None:
        return [request]
    out = request.out
    return [
        dataclasses.replace(request, seed=seed, out=out.with_name(f"{out.name}_s{seed}"))
        for seed in options.seeds
    ]


def resolved(requests: Sequence[Request]) -> list[Request]:
    """The requests with their settings. Raises UserError if fairseq-train would refuse their flags."""
    lines = [[each.stream, "--task", "alma_lm", *words_of(each.flags)] for each in requests]
    found = []
    for request, settings in zip(requests, resolve(lines), strict=True):
        if "--distributed-world-size" not in request.flags:  # the default is this machine's number of GPUs
            settings = {**settings, "--distributed-world-size": None}
        found.append(dataclasses.replace(request, settings=settings))
    return found
