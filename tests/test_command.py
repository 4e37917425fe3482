"""The command `alma`: subcommands, help without heavy imports, hints."""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import SUPPRESS, _HelpAction
from pathlib import Path

import pytest

from alma import __main__ as alma
from alma import __version__

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "fairseq", "numpy", "matplotlib", "sentencepiece", "submitit", "sklearn", "scipy")
CALLS = """
import contextlib, io, json, runpy, sys
found = []
for module, *words in json.load(sys.stdin):
    sys.argv, out, err, code = ["-m", *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
"""Runs command lines of modules as `python -m` does, all in one process."""
MODULES = (
    "data_prep",
    "data_prep.corpus",
    "data_prep.inspect",
    "slurm.launch",
    "alma.report",
    "vision.tsne",
)


def calls(*lines: str, stubs: Path) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each `python -m LINE`,
    where the import of a heavy package fails."""
    for name in HEAVY:
        (stubs / f"{name}.py").write_text(f"raise SystemExit('{name} is imported')")
    environment = os.environ | {"PYTHONPATH": f"{stubs}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-W", "ignore", "-c", CALLS]
    words = json.dumps([line.split() for line in lines])
    done = subprocess.run(
        program, env=environment, cwd=stubs, input=words, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ctrl_c_while_the_command_imports_prints_nothing(tmp_path):
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "alma", "--help"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def parsers(monkeypatch):
    """The parser of every subcommand, by its name."""
    monkeypatch.setattr(sys, "argv", ["alma"])
    return {name: alma.load(name).parser() for name in alma.TOOLS}


@pytest.fixture
def error(monkeypatch, capsys):
    """The only line of the error of `alma WORDS`."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["alma", *words])
        with pytest.raises(SystemExit) as stop:
            alma.main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def test_help_and_what_parsing_refuses_come_before_heavy_imports(tmp_path):
    names = [f"alma {name}" for name in alma.TOOLS]
    helps = [*names, *MODULES]
    required = {"corpus": "git r --out s", "data": "c --out s", "inspect": "s", "train": "s"}
    required |= {"export": "c --out d", "predict": "r i --out f"}
    required |= dict.fromkeys(("status", "cancel", "report", "advise", "due", "gate"), "r")
    required |= {"matrix": "m --data d --by month"}
    required |= dict.fromkeys(("tsne", "reproduce", "test"), "r")
    refused = [f"alma {name} {required.get(name, '')} --nonsense" for name in alma.TOOLS]
    outcomes = calls(*(f"{line} --help" for line in helps), *refused, stubs=tmp_path)
    names += [f"python -m {name}" for name in MODULES]
    for line, (code, out, err) in zip(names, outcomes, strict=False):
        assert (code, err) == (0, ""), line
        assert out.startswith(f"usage: {line} "), out
    for name, (code, out, err) in zip(alma.TOOLS, outcomes[len(helps) :], strict=True):
        assert (code, out) == (2, ""), (name, err)
        assert "unrecognized arguments: --nonsense" in err
        assert err.endswith(f"see `alma {name} --help`\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_overview_lists_every_subcommand(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["alma", *words])
    with pytest.raises(SystemExit, match="^0$|^None$"):
        alma.main()
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out and tool.help in out for name, tool in alma.TOOLS.items())


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["alma", "--version"])
    alma.main()
    assert capsys.readouterr().out == f"alma {__version__}\n"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("tran", "did you mean train?"),
        ("nothing-like-it", "choose from corpus, data, inspect,"),
        ("--verison", "did you mean --version?"),
        ("train s --learner gmo", "did you mean gmoe?"),
        ("train s --arch x", "--arch is a flag of fairseq-train: put it after `--`"),
        ("data c --out s --documents a=lines", "did you mean line?"),
        ("report r --figures visoin", "did you mean vision?"),
    ],
)
def test_a_misspelt_word_has_a_hint(error, line, hint):
    assert hint in error(*line.split())


def test_every_option_says_what_it_does_and_its_default(parsers):
    for name, parser in parsers.items():
        for action in parser._actions:
            assert action.help, (name, action)
            hidden = (
                action.help == SUPPRESS
                or not action.option_strings
                or isinstance(action, _HelpAction)
            )
            if not hidden and action.default not in (None, False, [], [False], SUPPRESS):
                assert "default: " in action.help, (name, action)


def examples(text: str) -> list[list[str]]:
    """The arguments of the `alma` command lines in a help text."""
    lines = re.findall(r"^  (alma .*)$", text.replace("\\\n", ""), re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_examples_in_help_are_accepted(parsers):
    for name, parser in {"alma": alma.parser(), **parsers}.items():
        lines = examples(parser.epilog)
        assert len(lines) > 1, name
        for subcommand, *words in lines:
            arguments = words[: words.index("--")] if "--" in words else words
            parsers[subcommand].parse_intermixed_args(arguments)
