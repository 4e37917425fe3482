"""The launcher's command line: options, experiments and flags of fairseq-train become requests."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, closest, number_list
from slurm.engine import resources
from slurm.engine.resources import Resources
from slurm.lm.experiments import experiment_files, is_experiment, read_experiment, read_overrides
from slurm.lm.flags import COMMON, Flags, read_flags, resolve, words_of
from slurm.lm.plan import LEARNERS, MEMBERS, ROUTERS, Request

_OF_THE_MACHINE = {"--cluster", "--dry-run", "--wait", "--jobs", "--verbose"}
_OF_THE_MACHINE |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Resources)}


class _Parser(Parser):
    """Tells flags of fairseq-train from misspelt options."""

    def suggest(self, name: str) -> str:
        """A hint for an option that there is not."""
        own = self._option_string_actions
        if name in own:
            return ""
        meant = closest(name, [*own, *COMMON])
        if meant in own:
            return f"did you mean {meant}?"
        after = "put it after `--`"
        if meant is None:
            return f"if {name} is a flag of fairseq-train, {after}"
        if name == meant:
            return f"{name} is a flag of fairseq-train: {after}"
        return f"did you mean {meant}? Then {after}"


def parser() -> Parser:
    """The command line, as far as the `--`."""
    arguments = _Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner L --out RUN [options] -- [flags of fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [key=value...] [--size S] [--stream STREAM] [options] [-- flags]",
        description="Train a language model on a stream of mega-batches, stage by stage, and evaluate it "
        "after each. After an interruption the same command goes on where it stopped; when the stream has "
        "got longer, it trains the new stages.",
        allow_abbrev=False,
    )
    add = arguments.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream made by data_prep, or a fairseq-preprocess directory to cut up; or files (or folders "
        "of files) with settings, see slurm/experiments.py, and key=value: any option by its name, or a flag "
        "of fairseq-train that the experiments have. It holds for all of them, before what files say; --key "
        "and what follows `--` come before it",
    )
    add("--stream", metavar="STREAM", help="for experiments: what they train on")
    add("--size", metavar="S", help="for experiments: a file in sizes/ beside them, such as small")
    add("--learner", choices=LEARNERS, help="sm, moe: one model; ens, gens: ensembles; umix, gmoe")
    add("--out", type=Path, metavar="RUN", help="run directory to make or to go on with")
    add(
        "--cluster",
        choices=("local", "debug", "slurm"),
        default="local",
        help="where the stages run (default: here, one after the other); debug: here, with the terminal, so "
        "that breakpoint() works in the process of fairseq-train (not in more of them: one GPU, no workers)",
    )
    add("--dry-run", action="store_true", help="check all and say what would run, but run and write nothing")
    add("--verbose", action="store_true", help="with the plan: all settings, commands, what sbatch would get")
    add("--wait", action="store_true", help="with --cluster slurm: wait for the end, and fail if a job did")
    add("--members", type=int, metavar="N", help=f"ens, umix: how many (default: {MEMBERS})")
    add("--waiting-time", type=int, metavar="W", default=1, help="mega-batches to wait for (default: 1)")
    add("--replay", action="store_true", help="train on everything seen so far")
    add("--from-scratch", action="store_true", help="start every stage with a new model")
    add(
        "--update-multiplier",
        type=int,
        metavar="X",
        default=1,
        help="train X times --max-update (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="S", help="of weights and data order (default: 0)")
    add("--seeds", type=number_list, metavar="A-B,C", help="a run for each, in RUN_s0 and so on")
    add("--grow-experts", metavar="N[,N...]", help="gmoe: experts to add at each growth (default: 2)")
    add("--grow-router", choices=ROUTERS, help="gmoe: how to split a router (default: preserve)")
    add("--grow-optimizer", choices=("reset", "copy"), help="gmoe: its state after growth (default: reset)")
    add(
        "--context-window",
        type=int,
        metavar="N",
        default=0,
        help="tokens of context in evaluation (default: 0)",
    )
    add("--stages", type=int, metavar="N", help="stop after N stages; later, more of them go on from there")
    add("--name", help="to tell the run apart in reports")
    add(
        "--jobs",
        type=int,
        metavar="N",
        help="on this machine: trainings side by side (default: 1), each on GPUs of its own",
    )
    resources.add_flags(arguments)
    return arguments


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The launcher's options: up to the first `--`; the last of two that contradict each other counts."""
    return parser().parse_intermixed_args(list(itertools.takewhile(lambda word: word != "--", words)))


def read_requests(words: Sequence[str]) -> list[Request]:
    """The command line as requests: launcher flags up to the first `--`, flags of fairseq-train after it."""
    options = parse(words)
    flags = read_flags(list(itertools.dropwhile(lambda word: word != "--", words))[1:])
    options.what, overrides = read_overrides(options.what)
    experiments = [Path(each) for each in options.what if is_experiment(Path(each))]
    if not experiments:
        if overrides:
            key = next(iter(overrides))
            raise UserError(
                f"{key}=: key=value is for experiments (.yaml), and none is given: give --{key}; a flag of "
                "fairseq-train after `--`"
            )
        return _for_seeds(options, _request(options, flags))
    if len(experiments) < len(options.what):
        raise UserError("give a stream, or experiments (.yaml), whose stream is --stream; not both")
    requests: dict[Path, Request] = {}
    for file in experiment_files(experiments):
        own_words, own_flags = read_experiment(file, options.size, overrides)
        if machine := sorted(_OF_THE_MACHINE & {word.partition("=")[0] for word in own_words}):
            raise UserError(f"{file}: {machine[0]} says where to run: give {machine[0]} on the command line")
        try:
            merged = parse([*own_words, *words])
        except UserError as error:
            other = "; key=value is for flags that the file has, others go after `--`" if overrides else ""
            raise UserError(f"{file}: {error}{other}") from None
        merged.what = [merged.stream]
        for request in _for_seeds(merged, _request(merged, {**own_flags, **flags})):
            if requests.setdefault(request.out, request) != request:
                raise UserError(f"{file}: another experiment goes to {request.out} too: give one at a time")
    return list(requests.values())


def _for_seeds(options: argparse.Namespace, request: Request) -> list[Request]:
    """The request, or with --seeds one for each."""
    if options.seeds is None:
        return [request]
    out = request.out
    return [
        dataclasses.replace(request, seed=seed, out=out.with_name(f"{out.name}_s{seed}"))
        for seed in options.seeds
    ]


def _request(options: argparse.Namespace, flags: Flags) -> Request:
    """UserError: an option that is missing, or that is for experiments only."""
    given = vars(options)
    if len(given["what"]) > 1:
        raise UserError(f"{given['what'][1]}: give one stream; shards of one corpus are joined by ':'")
    (stream,) = given["what"]
    if stream != given["stream"] and (given["stream"], given["size"]) != (None, None):
        raise UserError(f"--size and --stream are for experiments (.yaml), and {stream} is none")
    for name in ("learner", "out", *(["stream"] if stream is None else [])):
        if given[name] is None:
            raise UserError(f"give --{name}; see `python -m slurm.launch --help`")
    named = {field.name: given[field.name] for field in dataclasses.fields(Request) if field.name in given}
    flags = {name: words for name, words in flags.items() if words != [f"{name}=false"]}
    return Request(**{**named, "stream": stream, "flags": flags})


def resolved(requests: Sequence[Request]) -> list[Request]:
    """The requests with their settings. UserError: fairseq-train would refuse the flags of one."""
    lines = [[each.stream, "--task", "alma_lm", *words_of(each.flags)] for each in requests]
    return [
        dataclasses.replace(request, settings={**settings, **_of_any_machine(request)})
        for request, settings in zip(requests, resolve(lines), strict=True)
    ]


def _of_any_machine(request: Request) -> dict[str, None]:
    """What fairseq's defaults take from the machine that it is asked on: not known where it is to run."""
    return {name: None for name in ("--distributed-world-size",) if name not in request.flags}
