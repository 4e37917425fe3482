"""The sections of `alma images`: its command line, once for each section of an experiment."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, hint
from alma.experiments import naming, sections_of, values_of
from alma.options import flag_of
from alma.sweeps import setting_text
from vision import arrived
from vision.alpha import BACKGROUND, check_background
from vision.image_files import ImageSource
from vision.periods import listed

_OF_THE_COMMAND = {
    "cluster",
    "device",
    "dry-run",
    "help",
    "jobs",
    "list",
    "list-periods",
    "part",
    "save-interval",
}

PERIODS = {"by": None, "manifest": None, "group_by": None, "classes": "all"}
"""Flags of a stream by date, with their defaults."""
_FILES = {"data_root": "data", "cache_images": None, "background": BACKGROUND}
USUAL = {"device": "auto"} | _FILES | PERIODS
"""Defaults of flags that a recorded command leaves out."""


def read_sections(parser: Parser, words: Sequence[str]) -> list[argparse.Namespace]:
    """Parse a command line, which overrides an experiment: once for each section of that.

    Sets the default of --out, and the data set and the number of mega-batches of a stream by date.
    UserError: a file is missing or malformed, or has an unknown setting or a wrong value; flags
    contradict --by, or need it.
    """
    options = parser.parse_args(words)
    if options.experiment:
        sections = _of_experiment(parser, words, options)
    elif options.size:
        raise UserError("--size is for experiments: give a file, such as experiments/figure7.yaml")
    else:
        sections = [options]
    for section in sections:
        _complete(section)
    return sections


def _of_experiment(
    parser: Parser, words: Sequence[str], options: argparse.Namespace
) -> list[argparse.Namespace]:
    """The sections of an experiment; `words` and `options` are of the command line."""
    path = options.experiment
    name = f"{path.stem}_{options.size}" if options.size else path.stem
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions |= {text.removeprefix("--"): action for text in action.option_strings}
    parsed_sections = []
    for section in sections_of(path, options.size):
        settings = dict(section.options)
        if section.flags:
            settings["flags"] = section.flags
        words_of_section = _words(path, settings, actions)
        with naming(path):
            parsed = parser.parse_args([*words_of_section, *words])
        parsed.out = parsed.out or Path("runs", name)
        parsed_sections.append(parsed)
    return parsed_sections


def _words(
    path: Path, settings: Mapping[str, Any], actions: Mapping[str, argparse.Action]
) -> list[str]:
    """Settings of an experiment as on the command line, where a list is a comma list.

    UserError: a setting is not one of an experiment, or has no value.
    """
    words = []
    for name, value in settings.items():
        if name in _OF_THE_COMMAND:
            remedy = f"give --{name} on the command line"
            raise UserError(f"{path}: {name} says how to run: {remedy}")
        if name not in actions:
            raise UserError(f"{path}: {name} is not a setting ({hint(str(name), actions)})")
        values = values_of(f"{path}: {name}", value)
        if isinstance(value, bool) and actions[name].nargs == 0:
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={','.join(map(setting_text, values))}")
    return words


def _complete(section: argparse.Namespace) -> None:
    """Set what follows from other options. UserError: flags contradict --by, or need it."""
    section.source = None
    if section.by:
        section.dataset = section.dataset or ["folder"]
        section.out = section.out or _usual_out(section)
        section.source = _source(section)
        periods, _ = listed(section.source)
        section.megabatches = [len(periods)]
    else:
        _check_without_by(section)
    section.dataset = section.dataset or ["digits"]
    section.out = section.out or _usual_out(section)


def _usual_out(section: argparse.Namespace) -> Path:
    """The default of --out."""
    return Path("runs", "_".join([*section.dataset, *section.learner]))


def _source(section: argparse.Namespace) -> ImageSource:
    """The images of a section with --by. UserError: other flags contradict it."""
    for name in ("dataset", "megabatches", "stream_seed", "scenario"):
        if getattr(section, name) not in (None, ["folder"]):
            raise UserError(f"{flag_of(name)}: leave it out, --by makes the stream")
    if section.manifest and section.data_root != USUAL["data_root"]:
        relative = "paths of --manifest are relative to its folder"
        raise UserError(f"--data-root: leave it out, {relative}")
    record = str(section.write) if section.write else arrived.record_of(section.out)
    check_background(section.background)
    return ImageSource(
        section.data_root,
        section.by,
        section.manifest,
        section.group_by,
        record,
        section.background,
        section.skip_unreadable,
    )


def _check_without_by(section: argparse.Namespace) -> None:
    """UserError: a flag needs --by."""
    defaults = PERIODS | {"append": False, "test_past": None, "write": None}
    for name, default in defaults.items():
        if getattr(section, name) != default:
            raise UserError(f"{flag_of(name)} needs --by, such as --by week")
