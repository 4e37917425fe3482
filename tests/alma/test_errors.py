"""Errors of command lines, with hints, and number lists."""

import argparse
import errno
import os
from pathlib import Path

import pytest

from alma.errors import Parser, UserError, closest, command, count, hint, number_list


def parser(**settings) -> Parser:
    made = Parser(prog="it", **settings)
    made.add_argument("files", nargs="*")
    made.add_argument("--out", required=True)
    made.add_argument("--mega-batches", type=int)
    made.add_argument("--workers", type=int)
    return made


@pytest.mark.parametrize("method", ["parse_args", "parse_intermixed_args"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "a --out b --mega-batchs 4",
            "unrecognized arguments: --mega-batchs 4 (did you mean --mega-batches?)",
        ),
        (
            "a --out b --mega-batchs=4",
            "unrecognized arguments: --mega-batchs=4 (did you mean --mega-batches?)",
        ),
        ("a --ot b --worker 3", "the following arguments are required: --out (did you mean --out?)"),
        ("a --out b --nothing-like-it", "unrecognized arguments: --nothing-like-it"),
        ("a -- --ot", "the following arguments are required: --out"),
        ("--out b --worker x", "argument --workers: invalid int value: 'x'"),
    ],
)
def test_a_misspelt_option_has_a_hint(method, words, message):
    with pytest.raises(UserError) as refused:
        getattr(parser(), method)(words.split())
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith("; see `it --help`")


def test_every_misspelt_option_has_a_hint():
    with pytest.raises(UserError, match=r"\(did you mean --workers\? did you mean --mega-batches\?\)"):
        parser(allow_abbrev=False).parse_args("--out x --worker 1 --megabatches 2".split())


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--max-update", "--max-update is a flag of that: put it after `--`"),
        ("--max-updates", "did you mean --max-update? Then put it after `--`"),
        ("--worker", "did you mean --workers?"),
        ("--nothing-like-it", "if --nothing-like-it is a flag of that, put it after `--`"),
    ],
)
def test_a_flag_of_another_program_belongs_after_the_dashes(word, found):
    made = parser(allow_abbrev=False, other="that", other_flags=["--max-update"])
    with pytest.raises(UserError) as refused:
        made.parse_args(["--out", "x", word])
    assert f"({found})" in str(refused.value)


def test_a_misspelt_choice_has_a_hint():
    made = parser()
    made.add_argument("--learner", choices=("sm", "gmoe"))
    made.add_argument("--many", choices=range(20), type=int)
    for words, problem in (
        ("--learner gmo", "--learner: invalid choice: 'gmo' (did you mean gmoe?); see `it --help`"),
        ("--learner x", "--learner: invalid choice: 'x' (choose from sm, gmoe); see"),
        ("--many 30", f"--many: invalid choice: 30 (choose from {', '.join(map(str, range(12)))} and more"),
    ):
        with pytest.raises(UserError) as refused:
            made.parse_args(["--out", "x", *words.split()])
        assert str(refused.value).startswith(f"argument {problem}")


def test_help_wraps_a_line_keeps_several_and_puts_all_names_before_a_value(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words, lines = " ".join(["word"] * 40), "examples:\n  one\n  two"
    made = parser(description=words, epilog=lines)
    made.add_argument("--seed", "--seeds", metavar="LIST", help="of the runs")
    text = made.format_help()
    assert max(map(len, text.splitlines())) in range(90, 101)
    assert text.endswith(f"\n{lines}\n")
    assert "  --seed, --seeds LIST" in text


def test_hints():
    assert closest("vgg", ["switch_gmoe", "transformer_lm"]) is None
    assert hint("visoin", ("vision", "lm")) == "did you mean vision?"
    assert hint("x", iter(("vision", "lm"))) == "choose from vision, lm"


def test_lists_of_numbers():
    assert number_list("0-2,5,1") == [0, 1, 2, 5]
    assert number_list("3-3") == [3]
    assert number_list("2,2,0-1,1", repeats=True) == [2, 2, 0, 1, 1]


@pytest.mark.parametrize("text", ["2-0", "0,2-0", "", "1,", "a", "-1", "1-", "0-1-2", "1.5"])
def test_invalid_number_lists_are_refused(text):
    for kind in (argparse.ArgumentTypeError, UserError):  # for options, and for other text
        with pytest.raises(kind, match="a whole number|goes up"):
            number_list(text)


def _loop(path: Path) -> None:
    os.symlink(path.name, path)


@pytest.mark.parametrize(
    ("make", "told"), [(Path.mkdir, "Is a directory"), (_loop, "Too many levels of symbolic links")]
)
def test_what_is_no_file_is_one_line(tmp_path, capsys, make, told):
    make(tmp_path / "run.json")
    with pytest.raises(SystemExit) as stop:
        command(lambda: (tmp_path / "run.json").read_text() and None)()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/run.json: {told}; fix this and rerun the command\n"


def test_a_message_with_half_a_character_is_printed(capsys):
    @command
    def main() -> None:
        raise UserError("no learner \ud800")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: no learner \\ud800\n"


def test_ctrl_c_that_python_hides_behind_another_error_is_an_interruption(capsys):
    @command
    def main():
        try:
            raise KeyboardInterrupt
        finally:  # as in shutil.rmtree of Python 3.11
            raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err == "interrupted; rerun the same command to resume\n"


@pytest.mark.parametrize("hidden", [True, False])
def test_ctrl_c_while_a_compiled_module_is_imported_is_an_interruption(capsys, hidden):
    @command
    def main():
        raise ImportError("initialization failed") from (KeyboardInterrupt() if hidden else None)

    with pytest.raises(SystemExit if hidden else ImportError):
        main()
    assert capsys.readouterr().err == "interrupted; rerun the same command to resume\n" * hidden


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("440_000_000", 440_000_000), ("440M", 440_000_000), ("0.5M", 500_000), (".5M", 500_000)],
)
def test_counts(text, number):
    assert count(text) == number


@pytest.mark.parametrize(
    "text", ["", "M", ".M", "1.", "_", "0", ".5", "-1", "1e3", "1.0005k", "5 M", "9" * 400]
)
def test_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive whole number"):
        count(text)
