"""mkdocs hooks: the page of commands, and search without a script from the network.

The page of commands, cli.md, is the `--help` of all commands of the day of the build. Search works
when the pages are opened from a folder.
"""

import importlib
import os
import sys
from pathlib import Path
from unittest import mock

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
ABOUT = """\
# Command line

`alma COMMAND` is short for `python -m MODULE`; the modules are in brackets.
"""
_SHIM = "https://unpkg.com/iframe-worker/shim"
OTHERS = ("fairseq_alma.evaluate", "fairseq_alma.reshard")
"""Modules with a command line that have no subcommand."""


def page() -> str:
    """The text of cli.md."""
    from alma import __main__ as alma

    parsers = {"alma": alma.parser()}
    for name, tool in alma.TOOLS.items():
        parsers[f"alma {name} (`{tool.module.removesuffix('.__main__')}`)"] = alma.load(
            name
        ).parser()
    with mock.patch.object(sys, "argv", ["-m"]):  # as with `python -m`
        for name in OTHERS:
            parsers[f"python -m {name}"] = importlib.import_module(name).parser()
    with mock.patch.dict(os.environ, COLUMNS="100"):  # the width of help
        texts = [
            f"## {title}\n\n```text\n{each.format_help()}```\n" for title, each in parsers.items()
        ]
    return "\n".join([ABOUT, *texts])


def on_post_page(output, page, config):
    """Material's plugin `offline` loads a script from the network: ours is in the folder."""
    return output.replace(_SHIM, get_relative_url("search_in_folder.js", page.url))


def on_post_template(output, template_name, config):
    """The same for 404.html."""
    return output.replace(_SHIM, "search_in_folder.js")


def on_files(files, config):
    """Add the page."""
    files.append(File.generated(config, "cli.md", content=page()))
    return files
