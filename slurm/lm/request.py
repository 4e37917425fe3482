"""Options, experiments and flags of fairseq-train become requests."""

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alma.errors import UserError, closest
from alma.experiments import check_nesting, read_experiment, read_overrides
from alma.options import flag_of, flag_words, given, options_of
from alma.protocol import of_preset
from slurm.engine import children
from slurm.engine.resources import Resources
from slurm.engine.terminal import say
from slurm.lm.options import parse, parser
from slurm.lm.plan import Flags, FlagValues, Request

USER_DIR = "--user-dir"  # a folder of Python that fairseq imports
_EVERY_STAGE = "leave it out, the launcher sets it for every stage"
_OF_THE_LAUNCHER = {
    "--save-dir": "give --out RUN before the `--`",
    "--task": "leave it out, it is always alma_lm",
    "--stage": _EVERY_STAGE,
    "--finetune-from-model": "stage 0 starts a new model, each later stage from the stage before",
    "--restore-file": _EVERY_STAGE,
    **{flag_of(name): f"give {flag_of(name)} before the `--`" for name in options_of(Request)},
}
_OF_THE_MACHINE = {"--cluster", "--jobs", "--wait", "--dry-run", "--megabatches", "--verbose"}
_OF_THE_MACHINE |= set(map(flag_of, options_of(Resources)))


def read_requests(words: Sequence[str], options: argparse.Namespace | None = None) -> list[Request]:
    """Read a command line: options up to the first `--` (`options`: parsed), then flags of fairseq-train."""
    options = options or parse(words)
    flags = read_flags(list(itertools.dropwhile(lambda word: word != "--", words))[1:])
    options.what, overrides = read_overrides(options.what)
    experiments = [Path(word) for word in options.what if word.endswith(".yaml")]
    if not experiments:
        if overrides:
            key = next(iter(overrides))
            what = "key=value overrides experiments (.yaml), and none is given"
            raise UserError(f"{key}=: {what}: use --{key}, or a flag of fairseq-train after `--`")
        return _requests(options, flags)
    if len(experiments) < len(options.what):
        raise UserError("give a stream, or experiments (.yaml) with their stream as --stream, not both")
    named = {*flags, *(word.partition("=")[0] for word in words)}
    known = [name.replace("_", "-") for name in vars(options)]
    requests: dict[Path, Request] = {}
    for file in experiments:
        for swept, folder, run_words, run_flags in read_experiment(file, options.size, overrides):
            names, own_flags = ({word.partition("=")[0] for word in own} for own in (run_words, run_flags))
            if machine := sorted(_OF_THE_MACHINE & names):
                say_where = f"{machine[0]} says where to run: give {machine[0]} on the command line"
                raise UserError(f"{file}: {say_where}")
            for key in swept:
                if f"--{key}" in named:
                    raise UserError(f"{file}: {key} is a list: give {key}=VALUE in place of --{key}")
            for key in overrides:
                if f"--{key}" in names and key not in known:
                    near = closest(key, [*known, *(name[2:] for name in own_flags)])
                    hint = f"did you mean {near}?" if near else "give other flags of fairseq-train after `--`"
                    raise UserError(f"{key}=: neither an option nor a flag that the experiment sets; {hint}")
            try:
                merged = parse([*run_words, *words])
                merged.what = [merged.stream]
                found = _requests(merged, {**read_flags(run_flags), **flags}, folder)
            except UserError as error:
                raise UserError(f"{file}: {error}") from None
            for request in found:
                if requests.setdefault(request.out, request) != request:
                    what = f"another experiment goes to {request.out} too"
                    raise UserError(f"{file}: {what}: give one at a time")
    return list(requests.values())


def _requests(options: argparse.Namespace, flags: Flags, folder: str = "") -> list[Request]:
    """One request, or with --seeds one for each seed; `folder`: of a combination of a sweep, in --out.

    Raises UserError for a missing option, one that only experiments have, or a run in a run.
    """
    if len(options.what) > 1:
        raise UserError(f"{options.what[1]}: give one stream; join the shards of one corpus by ':'")
    (stream,) = options.what
    if stream != options.stream and (options.stream, options.size) != (None, None):
        raise UserError(f"--size and --stream are for experiments (.yaml), and {stream} is none")
    for name in ("learner", "out", *(["stream"] if stream is None else [])):
        if getattr(options, name) is None:
            if stream and not os.path.exists(stream.partition(":")[0]):
                raise UserError(f"{stream}: no such stream; an experiment is a file, such as {stream}.yaml")
            raise UserError(f"give --{name}; see `{parser().prog} --help`")
    if options.seeds and options.seed is not None:
        raise UserError(f"--seed {options.seed} beside --seeds: give one of them")
    flags = {name: words for name, words in flags.items() if words != [f"{name}=false"]}
    out = options.out / folder
    if ":" in str(out):
        raise UserError(f"--out {out}: fairseq splits paths at colons; give another name")
    if options.out.name in ("", ".."):
        raise UserError(f"--out {options.out}: give the folder of a run, such as runs/sm")
    chosen = of_preset(options.preset, given(Request, options))
    request = Request(**{**chosen, "stream": stream, "flags": flags, "out": out})
    seeds = options.seeds or []
    requests = [replace(request, seed=seed, out=out.with_name(f"{out.name}_s{seed}")) for seed in seeds]
    for one in requests or [request]:
        check_nesting(options.out if folder else one.out, sweep=bool(folder))
    return requests or [request]


def read_flags(words: Sequence[str]) -> Flags:
    """Group words by flag. Raises UserError for a word before any flag, or a flag of the launcher."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name = word.partition("=")[0]
            name = "--arch" if name == "-a" else name
            if name in _OF_THE_LAUNCHER:
                raise UserError(f"{name} is not for fairseq-train here: {_OF_THE_LAUNCHER[name]}")
            flags.setdefault(name, []).append(word)
        elif flags:
            flags[name].append(word)
        else:
            raise UserError(f"{word!r}: after `--` come flags of fairseq-train, such as --max-update 400")
    return flags


def resolve(lines: Sequence[Sequence[str]]) -> list[FlagValues]:
    """The flag values of each command line of fairseq-train; a command line starts with its data.

    Imports fairseq once, in another process. Raises UserError if fairseq-train would refuse a command line.
    """
    say("checking the flags of fairseq-train")
    distinct = list(dict.fromkeys(map(tuple, lines)))
    command = [sys.executable, "-m", "fairseq_alma.check"]
    answer = children.ask(command, "checking the flags of fairseq-train", json.dumps(distinct))
    values = [line["settings"] | {"--arch": line["arch"]} for line in json.loads(answer)]
    return [values[distinct.index(tuple(line))] for line in lines]


def resolved(requests: Sequence[Request], without_code: bool = False) -> list[Request]:
    """The requests with their settings. Raises UserError if fairseq-train would refuse their flags.

    `without_code`: import no --user-dir, as in a dry run. Then what only that registers is refused.
    """
    by_fairseq = [request for request in requests if not request.trainer]
    lines = []
    for request in by_fairseq:
        of_options = (*("--schedule", request.schedule), *request.average_words)  # which set other defaults
        if request.init:  # the model's architecture is the default
            arch = ("--arch", "switch_gmoe") * request.learner_spec.switch
            of_options = (*of_options, *arch, *flag_words("--init", request.init))
        given = dict(request.flags)
        if without_code:
            given.pop(USER_DIR, None)
        flags = itertools.chain(*given.values())
        lines.append([request.stream, "--task", "alma_lm", *of_options, *flags])
    try:
        known = iter(resolve(lines) if lines else [])
    except UserError as error:
        if not without_code or not any(USER_DIR in request.flags for request in by_fairseq):
            raise
        why = f"a dry run imports no {USER_DIR}, which may register this: leave out --dry-run"
        raise UserError(f"{error}; {why}") from None
    found = []
    for request in requests:
        settings = next(known) if not request.trainer else _without_flags(request)
        if "--distributed-world-size" not in request.flags:  # the default is this machine's number of GPUs
            settings = {**settings, "--distributed-world-size": None}
        found.append(replace(request, settings=settings))
    return found


def _without_flags(request: Request) -> FlagValues:
    """The settings of a training that has no flags of fairseq-train: only the number of updates is known."""
    kind, _, amount = (request.budget or "").partition("=")
    names = ("--cpu", "--fp16", "--batch-size", "--max-tokens")
    ones = dict.fromkeys(("--tokens-per-sample", "--required-batch-size-multiple", "--num-workers"), 1)
    updates = int(amount) if kind == "updates" else 0
    return dict.fromkeys(names) | ones | {"--arch": "", "--max-update": updates, "--update-freq": [1]}
