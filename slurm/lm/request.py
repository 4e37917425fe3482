"""Read command lines and experiment files into requests, and resolve flags of fairseq-train."""

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alma import averages
from alma.errors import UserError, closest, require_extra
from alma.experiments import naming
from alma.options import flag_of, flag_words, given, options_of
from alma.sweeps import check_nesting, seed_part
from slurm.engine import children
from slurm.engine.resources import Resources
from slurm.engine.terminal import say
from slurm.lm.engines import engine_of
from slurm.lm.experiments import read_experiment, read_overrides, runs_of
from slurm.lm.options import parse, parser
from slurm.lm.plan import Request
from slurm.lm.presets import with_preset
from slurm.lm.run_options import Flags, FlagValues

USER_DIR = "--user-dir"  # flag for a folder of Python code that fairseq imports
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
    """Read a command line: options up to the first `--`, then flags of fairseq-train.

    options: the parsed options, if they are parsed already. UserError: options or experiments that
    contradict each other.
    """
    options = options or parse(words)
    after_options = list(itertools.dropwhile(lambda word: word != "--", words))
    flags = read_flags(after_options[1:])
    options.what, overrides = read_overrides(options.what)
    experiments = [Path(word) for word in options.what if word.endswith(".yaml")]
    if not experiments:
        if overrides:
            return _of_stream(words, options, flags, overrides)
        return _requests(options, flags)
    if len(experiments) < len(options.what):
        remedy = "give a stream, or experiments (.yaml) with their stream as --stream, not both"
        raise UserError(remedy)
    requests: dict[Path, Request] = {}
    for file in experiments:
        for request in _of_experiment(file, words, options, flags, overrides):
            if requests.setdefault(request.out, request) != request:
                problem = f"another experiment goes to {request.out} too"
                raise UserError(f"{file}: {problem}: give one at a time")
    return list(requests.values())


def _of_experiment(
    file: Path,
    words: Sequence[str],
    options: argparse.Namespace,
    flags: Flags,
    overrides: Mapping[str, Any],
) -> Iterator[Request]:
    """The requests of an experiment file.

    `words`, `options`, `flags` and `overrides` come from the command line and override the file.
    """
    names_on_line = {*flags, *_flag_names(words)}
    option_names = [name.replace("_", "-") for name in vars(options)]
    for run in read_experiment(file, options.size, overrides):
        names = _flag_names(run.options)
        machine_flags = sorted(_OF_THE_MACHINE & names)
        if machine_flags:
            flag = machine_flags[0]
            remedy = f"give {flag} on the command line"
            raise UserError(f"{file}: {flag} says where to run: {remedy}")
        for key in run.swept:
            if f"--{key}" in names_on_line:
                remedy = f"give {key}=VALUE in place of --{key}"
                raise UserError(f"{file}: {key} is a list: {remedy}")
        for key in overrides:
            if f"--{key}" in names and key not in option_names:
                raise _unknown_key(key, [*option_names, *_keys(run.flags)])
        with naming(file):
            merged = parse([*run.options, *words])
            merged.what = [merged.stream]
            requests = _requests(merged, {**read_flags(run.flags), **flags}, run.folder)
        yield from requests


def _of_stream(
    words: Sequence[str], options: argparse.Namespace, flags: Flags, overrides: Mapping[str, Any]
) -> list[Request]:
    """A request for each combination of `overrides`, key=value, of one stream.

    A key is an option of the launcher, else a flag after the `--`.
    """
    stream = options.what
    option_names = [name.replace("_", "-") for name in options_of(Request)]
    names_on_line = {*flags, *_flag_names(words)}
    for key in overrides:
        if key in ("runs", "size"):
            raise UserError(f"{key}=: of experiments (.yaml), and none is given: leave it out")
        if f"--{key}" in names_on_line:
            raise UserError(f"{key}= beside --{key}: give one of them")
    of_launcher = {key: value for key, value in overrides.items() if key in option_names}
    of_engine = {key: value for key, value in overrides.items() if key not in option_names}
    requests = []
    for run in runs_of(of_launcher, of_engine):
        merged = parse([*run.options, *words])
        merged.what = stream
        requests += _requests(merged, {**read_flags(run.flags), **flags}, run.folder)
    return requests


def _flag_names(words: Iterable[str]) -> set[str]:
    """The words of a command line, without `=VALUE` at their ends."""
    return {word.partition("=")[0] for word in words}


def _keys(flags: Iterable[str]) -> list[str]:
    """Convert flags to keys of an experiment file: --batch-size to batch-size."""
    return [name[2:] for name in _flag_names(flags)]


def _unknown_key(key: str, candidates: Sequence[str]) -> UserError:
    """The error for `key=VALUE` that overrides nothing; it suggests the closest of `candidates`."""
    hint = "give other flags of fairseq-train after `--`"
    closest_key = closest(key, candidates)
    if closest_key:
        hint = f"did you mean {closest_key}?"
    return UserError(f"{key}=: neither an option nor a flag that the experiment sets; {hint}")


def _requests(options: argparse.Namespace, flags: Flags, folder: str = "") -> list[Request]:
    """One request, or with --seeds one for each seed.

    folder: name of the run's folder below --out, if it is part of a sweep; else "".

    Raises UserError for a missing option, one that only experiments have, or a run in a run.
    """
    if len(options.what) > 1:
        raise UserError(f"{options.what[1]}: give one stream; join the shards of one corpus by ':'")
    (stream,) = options.what
    if stream != options.stream and (options.stream, options.size) != (None, None):
        raise UserError(f"--size and --stream are for experiments (.yaml), and {stream} is none")
    for name in ["learner", "out", "stream"] if stream is None else ["learner", "out"]:
        if getattr(options, name) is None:
            if stream and not os.path.exists(stream.partition(":")[0]):
                remedy = f"an experiment is a file, such as {stream}.yaml"
                raise UserError(f"{stream}: no such stream; {remedy}")
            raise UserError(f"give --{name}; see `{parser().prog} --help`")
    if options.seeds and options.seed is not None:
        raise UserError(f"--seed {options.seed} beside --seeds: give one of them")
    flags = {name: words for name, words in flags.items() if words != [f"{name}=false"]}
    out = options.out / folder
    if ":" in str(out):
        raise UserError(f"--out {out}: fairseq splits paths at colons; give another name")
    if options.out.name in ("", ".."):
        raise UserError(f"--out {options.out}: give the folder of a run, such as runs/sm")
    options.engine = engine_of(options)
    chosen = with_preset(options.preset, given(Request, options))
    request = Request(**{**chosen, "stream": stream, "flags": flags, "out": out})
    requests = [request]
    if options.seeds:
        requests = []
        for seed in options.seeds:
            folder_of_seed = out.with_name(f"{out.name}_{seed_part(seed)}")
            requests.append(replace(request, seed=seed, out=folder_of_seed))
    for request in requests:
        check_nesting(options.out if folder else request.out, sweep=bool(folder))
    return requests


def read_flags(words: Sequence[str]) -> Flags:
    """Group words by flag. Raises UserError for a word before any flag, or a flag of the
    launcher."""
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
            raise UserError(
                f"{word!r}: after `--` come flags of fairseq-train, such as --max-update 400"
            )
    return flags


def resolve(lines: Sequence[Sequence[str]]) -> list[FlagValues]:
    """The flag values of each command line of fairseq-train; a command line starts with its data.

    Imports fairseq once, in another process. Raises UserError if fairseq-train would refuse a
    command line.
    """
    say("checking the flags of fairseq-train")
    distinct = list(dict.fromkeys(map(tuple, lines)))
    command = [sys.executable, "-m", "fairseq_alma.check"]
    answer = children.ask(command, "checking the flags of fairseq-train", json.dumps(distinct))
    values = [line["settings"] | {"--arch": line["arch"]} for line in json.loads(answer)]
    return [values[distinct.index(tuple(line))] for line in lines]


def resolved(requests: Sequence[Request], without_code: bool = False) -> list[Request]:
    """Return the requests with `settings`, the values of all flags of fairseq-train.

    `without_code`: do not import --user-dir, as in a dry run; names that only it registers are then
    refused. Raises UserError if fairseq-train would refuse the flags.
    """
    by_fairseq = [request for request in requests if request.by_fairseq]
    if by_fairseq:
        require_extra("text", "alma train (--engine fairseq)")
    lines = [_line_of_fairseq(request, without_code) for request in by_fairseq]
    by_transformers = iter(_resolved_by_transformers(requests))
    try:
        answers = iter(resolve(lines) if lines else [])
    except UserError as error:
        if not without_code or not any(USER_DIR in request.flags for request in by_fairseq):
            raise
        reason = f"a dry run imports no {USER_DIR}, which may register this: leave out --dry-run"
        raise UserError(f"{error}; {reason}") from None
    requests_with_settings = []
    for request in requests:
        if request.engine:
            settings = next(by_transformers)
        else:
            settings = _without_flags(request) if request.trainer else next(answers)
            # fairseq's default is the number of GPUs of this machine; `place` sets it instead.
            if "--distributed-world-size" not in request.flags:
                settings = {**settings, "--distributed-world-size": None}
        requests_with_settings.append(replace(request, settings=settings))
    return requests_with_settings


def _resolved_by_transformers(requests: Sequence[Request]) -> list[FlagValues]:
    """The settings of the requests that transformers trains. UserError: it would refuse them."""
    questions = []
    for request in requests:
        if request.engine:
            question = {
                "words": list(itertools.chain(*request.flags.values())),
                "init": request.init,
                "average": str(request.average),
                "stream": request.stream,
            }
            questions.append(question)
    if not questions:
        return []
    require_extra("transformers", "--engine transformers")
    say("checking the flags of transformers' Trainer")
    command = [sys.executable, "-m", "transformers_alma.check"]
    name = "checking the flags of transformers' Trainer"
    answers = json.loads(children.ask(command, name, json.dumps(questions)))
    return [{**answer["settings"], "words": answer["words"]} for answer in answers]


def _line_of_fairseq(request: Request, without_code: bool) -> list[str]:
    """The command line of fairseq-train to resolve for a request."""
    words = [request.stream, "--task", "alma_lm"]
    # These options of the launcher change defaults of fairseq-train's flags.
    words += ["--schedule", request.schedule, *averages.training_flags(request.average)]
    if request.init:
        if request.learner_spec.switch:
            words += ["--arch", "switch_gmoe"]
        words += flag_words("--init", request.init)  # its architecture becomes the default
    for name, flag in request.flags.items():
        if not (without_code and name == USER_DIR):
            words += flag
    return words


def _without_flags(request: Request) -> FlagValues:
    """The settings of a run with the user's own trainer: at most the number of updates is known."""
    kind, _, amount = (request.budget or "").partition("=")
    unset = ("--cpu", "--fp16", "--batch-size", "--max-tokens")
    ones = ("--tokens-per-sample", "--required-batch-size-multiple", "--num-workers")
    return {
        **dict.fromkeys(unset),
        **dict.fromkeys(ones, 1),
        "--arch": "",
        "--max-update": int(amount) if kind == "updates" else 0,
        "--update-freq": [1],
    }
