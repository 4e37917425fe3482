"""Flags of fairseq-train that the task refuses, by `flags.yaml`."""

import argparse
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES

from alma.errors import UserError
from alma.stream import is_stream
from fairseq_alma import defaults

_CUTS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed", "--gpt2-encoder-json")
_LAST = "checkpoint_last.pt"  # the default of --restore-file


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, given_flags: set[str]) -> None:
    """Raise a UserError for a flag or choice that fails, does nothing, or breaks restarts.

    `given_flags` are the flags on the command line; `args` holds the values that `parser` read.
    """
    table = yaml.safe_load(defaults.FLAGS.read_text())
    changed = {}  # values that differ from the defaults, by flag
    for flag in sorted(given_flags):
        action = parser._option_string_actions[flag]
        value = getattr(args, action.dest, None)
        if action.nargs == 0 or value != action.default:
            changed[flag] = value
    _check_refused(table, args, changed)
    _check_needs(table, args, changed)
    _check_choices(table["choices"], args)
    _check_files(args, changed)
    resets = sorted(flag for flag in given_flags if flag.startswith("--reset-"))
    if resets and args.finetune_from_model:
        raise UserError(
            f"{resets[0]}: --finetune-from-model resets all but the weights; leave it out"
        )
    _check_metric(args)


def _check_metric(args: argparse.Namespace) -> None:
    """Raise a UserError if --best-checkpoint-metric names a metric that validation lacks.

    Only for criteria of fairseq and of this plug-in, whose metrics are known.
    """
    metric = args.best_checkpoint_metric
    criterion = REGISTRIES["criterion"]["registry"][args.criterion]
    if args.disable_validation or not _is_fairseqs(criterion):
        return
    computed = ["loss", "ppl"]
    if args.criterion == "label_smoothed_cross_entropy" or args.sentence_avg:
        computed.append("nll_loss")
    if getattr(args, "report_accuracy", False):
        computed.append("accuracy")
    if metric not in computed:
        problem = f"validation computes {', '.join(computed)}"
        raise UserError(f"--best-checkpoint-metric {metric}: {problem}: give one of them")


def _is_fairseqs(kind: type) -> bool:
    return kind.__module__.startswith(("fairseq.", "fairseq_alma."))


def _check_refused(table: Mapping, args: argparse.Namespace, changed: Mapping[str, Any]) -> None:
    refused = dict(table["refused"])
    if _is_fairseqs(ARCH_MODEL_REGISTRY[args.arch]):
        refused |= table["refused of models"]
    for flag in changed:
        if flag in refused:
            raise UserError(f"{flag}: {refused[flag]}")
        if flag in _CUTS and is_stream(args.data.split(":")[0]):
            raise UserError(
                f"{flag}: leave it out: {args.data} is a stream, and `alma data` cut it"
            )


def _check_needs(table: Mapping, args: argparse.Namespace, changed: Mapping[str, Any]) -> None:
    """Raise a UserError for a flag that does nothing without another flag or package."""
    for flag in changed:
        needed = table["needs"].get(flag, [])
        if needed and not any(getattr(args, other[2:].replace("-", "_"), None) for other in needed):
            raise UserError(
                f"{flag} does nothing without {' or '.join(needed)}: give both, or leave it out"
            )
        package = table["packages"].get(flag)
        if package and not importlib.util.find_spec(package):
            raise UserError(f"{flag}: `pip install {package}`, or leave it out")


def _check_choices(table: Mapping[str, list[str]], args: argparse.Namespace) -> None:
    for flag, choices in table.items():
        name = flag[2:].replace("-", "_")
        choice = getattr(args, name)
        kind = REGISTRIES[name]["registry"].get(choice, str) if name in REGISTRIES else str
        if choice not in (None, *choices) and kind.__module__.startswith(("fairseq.", "builtins")):
            raise UserError(f"{flag} {choice}: the task alma_lm takes {', '.join(choices)}")


def _check_files(args: argparse.Namespace, changed: Mapping[str, Any]) -> None:
    """Raise a UserError for a file that does not exist; fairseq would ignore it or crash."""
    read = ["--restore-file", "--decoder-embed-path", "--gpt2-encoder-json"]
    if not Path(args.save_dir, _LAST).exists():  # later starts do not read it
        read.append("--continue-once")
    for flag in read:
        name = changed.get(flag)
        if (
            not name
            or (flag, name) == ("--restore-file", _LAST)
            or "://" in name
            or Path(name).is_file()
        ):
            continue
        remedy = "give the path of a file, or leave it out"
        saved = Path(args.save_dir, name)
        if flag == "--restore-file" and saved.is_file():
            remedy = f"give {saved}"
        raise UserError(f"{flag} {name}: no such file; {remedy}")
    folder = Path(changed.get("--log-file") or ".").parent
    if not folder.is_dir():
        raise UserError(f"--log-file {changed['--log-file']}: no directory {folder}; make it first")
