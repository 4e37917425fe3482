"""The launcher's command line: options, experiments and flags of fairseq-train become requests."""

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from alma.errors import Parser, UserError, closest, number_list
from slurm.engine import resources
from slurm.engine.children import StageFailed
from slurm.engine.resources import Resources
from slurm.lm.experiments import experiment_files, is_experiment, read_experiment, read_overrides
from slurm.lm.flags import Flags, read_flags, resolve, words_of
from slurm.lm.learners import LEARNERS
from slurm.lm.plan import DEFAULT_GROWTH, Request

_ROUTERS = ("preserve", "copy", "tree")
_OF_THE_MACHINE = {"--cluster", "--dry-run", "--wait", "--jobs", "--verbose"}
_OF_THE_MACHINE |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Resources)}


class _Parser(Parser):
    """Tells flags of fairseq-train from misspelt options."""

    @cached_property
    def _flags(self) -> list[str]:
        """Flags of fairseq-train; importing fairseq for them takes seconds."""
        with contextlib.suppress(UserError, StageFailed):
            return list(resolve([["STREAM", "--task", "alma_lm"]])[0])
        return []

    def suggest(self, name: str) -> str:
        """Hint for an unknown option."""
        own = self._option_string_actions
        if name in own:
            return ""
        meant = closest(name, [*own, *self._flags])
        if meant in own:
            return f"did you mean {meant}?"
        after = "put it after `--`"
        if meant is None:
            return f"if {name} is a flag of fairseq-train, {after}"
        if name == meant:
            return f"{name} is a flag of fairseq-train: {after}"
        return f"did you mean {meant}? Then {after}"


def parser() -> Parser:
    """The command line up to the `--`."""
    made = _Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner L --out RUN [options] -- [flags of fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [key=value...] [--size S] [--stream STREAM] [options] [-- flags]",
        description="Train a language model on a stream of mega-batches, evaluate after each stage. "
        "Rerun the command to resume after an interruption, or to train the new stages of a longer stream.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream of data_prep, or a fairseq-preprocess directory to cut up; or YAML files (or "
        "folders of them) with settings, see slurm/lm/experiments.py, and key=value to override the files: "
        "an option, or a flag of fairseq-train that the file has. --key and flags after `--` override both",
    )
    add("--stream", metavar="STREAM", help="training data of experiments")
    add("--size", metavar="S", help="of experiments: a file in sizes/ beside them, such as small")
    add("--out", type=Path, metavar="RUN", help="run directory to create or to resume")
    add("--name", help="label of the run in reports")
    _add_learner_options(made)
    _add_machine_options(made)
    return made


def _add_learner_options(made: Parser) -> None:
    kinds = "; ".join(f"{name}: {spec.help}" for name, spec in LEARNERS.items())
    members = {name: spec.members for name, spec in LEARNERS.items() if spec.members is not None}
    defaults = ", ".join(f"{count} for {name}" for name, count in members.items())
    growing = ", ".join(name for name, spec in LEARNERS.items() if spec.growth)
    add = made.add_argument_group("learner").add_argument
    add("--learner", choices=LEARNERS, help=kinds)
    add("--members", type=int, metavar="N", help=f"size of an ensemble (default: {defaults})")
    add("--waiting-time", type=int, metavar="W", default=1, help="mega-batches of a stage (default: 1)")
    add("--replay", action="store_true", help="train on all mega-batches so far, not only the new ones")
    add("--from-scratch", action="store_true", help="train a new model in every stage")
    add("--update-multiplier", type=int, metavar="X", default=1, help="multiplies --max-update")
    add("--seed", type=int, default=0, metavar="S", help="of weights and data order (default: 0)")
    add("--seeds", type=number_list, metavar="A-B,C", help="one run for each seed, in RUN_s0 and so on")
    add(
        "--grow-experts",
        type=partial(number_list, repeats=True),
        metavar="N[,N...]",
        help=f"{growing}: experts to add at each growth (default: {DEFAULT_GROWTH})",
    )
    add("--grow-router", choices=_ROUTERS, help=f"{growing}: how to split a router (default: preserve)")
    add("--grow-optimizer", choices=("reset", "copy"), help=f"{growing}: optimizer state (default: reset)")
    add("--context-window", type=int, metavar="N", default=0, help="tokens in evaluation")
    add("--stages", type=int, metavar="N", help="stop after N stages; resume later with a larger N")


def _add_machine_options(made: Parser) -> None:
    add = made.add_argument_group("where to run").add_argument
    add(
        "--cluster",
        choices=("local", "debug", "slurm"),
        default="local",
        help="local: here, stage after stage (default); debug: the same, attached to the terminal, so that "
        "breakpoint() works in fairseq-train (with one GPU and no data workers); slurm: submit all jobs",
    )
    add("--jobs", type=int, metavar="N", help="local: concurrent trainings, GPUs split evenly (default: 1)")
    add("--dry-run", action="store_true", help="check everything and print the plan; run and write nothing")
    add("--verbose", action="store_true", help="print also all settings, commands and inputs of sbatch")
    add("--wait", action="store_true", help="slurm: wait for the end; exit with 1 if a job failed")
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
        if machine := sorted(_OF_THE_MACHINE & {word.partition("=")[0] for word in own_words}):
            raise UserError(f"{file}: {machine[0]} says where to run: give {machine[0]} on the command line")
        try:
            merged = parse([*own_words, *words])
        except UserError as error:
            other = (
                "; key=value sets only flags that the file has; give others after `--`" if overrides else ""
            )
            raise UserError(f"{file}: {error}{other}") from None
        merged.what = [merged.stream]
        for request in _requests(merged, {**own_flags, **flags}):
            if requests.setdefault(request.out, request) != request:
                raise UserError(f"{file}: another experiment goes to {request.out} too: give one at a time")
    return list(requests.values())


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
            raise UserError(f"give --{name}; see `python -m slurm.launch --help`")
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
