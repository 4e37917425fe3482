"""Write docs/cli.md, the --help of all commands: `python docs/cli.py`. With --check only compare.

Line breaks and the (default: False) of some flags depend on the version of Python; --check ignores them.
"""

import importlib
import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "100"  # the width of help
sys.path[0] = str(Path(__file__).resolve().parents[1])

from alma import __main__ as alma  # noqa: E402
from alma.errors import Parser, UserError, command  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
ABOUT = """\
# Command line

`alma COMMAND` is short for `python -m MODULE`; the modules are in brackets. `python docs/cli.py` writes this
page from the `--help` of all commands.
"""
OTHERS = ("fairseq_alma.evaluate", "fairseq_alma.reshard")
"""Modules with a command line that have no subcommand."""


def section(title: str, parser: Parser) -> str:
    """The help of a command."""
    return f"## {title}\n\n```text\n{parser.format_help()}```\n"


def page() -> str:
    """The text of docs/cli.md."""
    sections = [ABOUT, section("alma", alma.parser())]
    for name, tool in alma.TOOLS.items():
        module = tool.module.removesuffix(".__main__")
        sections.append(section(f"alma {name} (`{module}`)", alma.load(name).parser()))
    sys.argv[0] = "-m"  # as with `python -m`
    for name in OTHERS:
        sections.append(section(f"python -m {name}", importlib.import_module(name).parser()))
    return "\n".join(sections)


def essence(text: str) -> str:
    """`text` without what depends on the version of Python."""
    return "".join(text.split()).replace("(default:False)", "")


@command
def main() -> None:
    """Write the page, or check that it is up to date."""
    made = Parser(prog="python docs/cli.py", description="Write docs/cli.md, the --help of all commands.")
    made.add_argument("--check", action="store_true", help="only check that the page is up to date")
    check = made.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text, "utf-8")
    elif essence(PAGE.read_text("utf-8")) != essence(text):
        raise UserError("docs/cli.md differs from the --help of the commands: run `python docs/cli.py`")


if __name__ == "__main__":
    main()
