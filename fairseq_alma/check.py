"""Resolve fairseq-train command lines without running them.

Usage: `python -m fairseq_alma.check < LINES.json`.

Input: a JSON list of command lines, each a list of the words after `fairseq-train`. Output: a JSON
list with one object per command line: `arch`, and `settings`, the value of every flag (null if
unset). If fairseq-train would refuse a command line: one line on standard error and exit code 2.
"""

import json
import logging
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any
from unittest.mock import MagicMock

import msgspec
import yaml

from alma.errors import Parser, UserError, command
from fairseq_alma.defaults import FLAGS


def resolve(words: list[str]) -> dict[str, Any]:
    """Parse a command line as fairseq-train does.

    `words` follow `fairseq-train`. Returns "arch" and "settings", the value of every flag. Exits
    with code 2 if fairseq-train would refuse the command line.
    """
    from fairseq import options
    from fairseq.models import ARCH_MODEL_REGISTRY

    parser = options.get_training_parser(default_task="alma_lm")
    args = options.parse_args_and_arch(parser, words)
    config = getattr(ARCH_MODEL_REGISTRY[args.arch], "__dataclass", None)
    fields = config.__dataclass_fields__ if config else {}
    settings = {}
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            default = fields[action.dest].default if action.dest in fields else None
            settings[action.option_strings[0]] = getattr(args, action.dest, default)
    return {"arch": args.arch, "settings": settings}


def check_run(words: Iterable[str]) -> None:
    """Raise a UserError for a flag in `words` that `alma train` may not pass to fairseq-train.

    The flags and reasons are the section "refused in runs" of flags.yaml.
    """
    refused = yaml.safe_load(FLAGS.read_text())["refused in runs"]
    for flag in (word.partition("=")[0] for word in words):
        if flag in refused:
            raise UserError(f"{flag}: {refused[flag]}")


@command
def main() -> None:
    """Resolve fairseq-train command lines, given as JSON."""
    Parser(prog="python -m fairseq_alma.check", description=main.__doc__).parse_args()
    try:
        lines = msgspec.json.decode(sys.stdin.buffer.read(), type=list[list[str]])
    except msgspec.DecodeError as error:
        raise UserError(f"standard input: give a JSON list of command lines ({error})") from None
    check_run(chain(*lines))
    # fairseq imports them, which takes a second, and parsing needs none.
    for name in ("sklearn", "sklearn.metrics", "scipy", "scipy.stats"):
        sys.modules[name] = MagicMock()
    import fairseq  # noqa: F401  the plug-in registers with it

    logging.disable()
    print(json.dumps([resolve(words) for words in lines]))


if __name__ == "__main__":
    main()
