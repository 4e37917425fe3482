"""Errors of command lines, with hints, and number lists."""

import argparse
import errno
from pathlib import Path

import pytest

from alma.errors import Parser, UserError, command, count, number_list


def parser(**settings) -> Parser:
    command_line = Parser(prog="it", **settings)
    command_line.add_argument("files", nargs="*")
    command_line.add_argument("--out", required=True)
    command_line.add_argument("--mega-batches", type=int)
    command_line.add_argument("--workers", type=int)
    return command_line


@pytest.mark.parametrize("method", ["parse_args", "parse_intermixed_args"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a --out b --wrokers 4", "unrecognized arguments: --wrokers 4 (did you mean --workers?)"),
        ("a --out b --wrokers=4", "unrecognized arguments: --wrokers=4 (did you mean --workers?)"),
        (
            "a --ot b --worker 3",
            "the following arguments are required: --out (did you mean --out?)",
        ),
        ("a --out b --nothing-like-it", "unrecognized arguments: --nothing-like-it"),
        ("a -- --ot", "the following arguments are required: --out"),
        ("--out b --workers x", "argument --workers: invalid int value: 'x'"),
    ],
)
def test_a_misspelt_option_has_a_hint(method, words, message):
    with pytest.raises(UserError) as refused:
        getattr(parser(), method)(words.split())
    assert str(refused.value) == f"{message}; see `it --help`"


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("--max-update", "--max-update is a flag of that: put it after `--`"),
        ("--max-updates", "--max-update is a flag of that: put it after `--`"),
        ("--worker", "did you mean --workers?"),
        ("--worker 1 --megabatches 2", "did you mean --workers? did you mean --mega-batches?"),
        ("--nothing-like-it", "if --nothing-like-it is a flag of that: put it after `--`"),
    ],
)
def test_a_flag_of_another_program_belongs_after_the_dashes(words, hints):
    command_line = parser(allow_abbrev=False, other="that", other_flags=["--max-update"])
    with pytest.raises(UserError) as refused:
        command_line.parse_args(["--out", "x", *words.split()])
    assert f"({hints})" in str(refused.value)


def test_help_wraps_a_line_and_keeps_several(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = " ".join(["word"] * 40)
    lines = "examples:\n  one\n  two"
    command_line = parser(description=words, epilog=lines)
    text = command_line.format_help()
    assert max(map(len, text.splitlines())) in range(90, 101)
    assert text.endswith(f"\n{lines}\n")


def test_numbers():
    assert number_list("0-2,5,1") == [0, 1, 2, 5]
    assert number_list("2,2,0-1,3-3,1", repeats=True) == [2, 2, 0, 1, 3, 1]
    assert [count(text) for text in ("7", "440_000_000", "440M")] == [7, 440_000_000, 440_000_000]
    assert [count(text) for text in ("0.5M", ".5M")] == [500_000, 500_000]


@pytest.mark.parametrize(
    "text", ["2-0", "0,2-0", "", "1,", "a", "-1", "1-", "0-1-2", "1.5", "0-1000000"]
)
def test_invalid_number_lists_are_refused(text):
    for kind in (argparse.ArgumentTypeError, UserError):  # for options, and for other text
        with pytest.raises(kind, match="a whole number|goes up|more than 100,000"):
            number_list(text)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_one_line(tmp_path, capsys, make, why):
    make(tmp_path / "run.json")
    with pytest.raises(SystemExit, match="2"):
        command(lambda: (tmp_path / "run.json").read_text() and None)()
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/run.json: {why}; fix this and rerun the command\n"
    )


def test_a_message_with_half_a_character_is_printed(capsys):
    @command
    def main() -> None:
        raise UserError("no learner \ud800")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: no learner \\ud800\n"


def interrupted_in_cleaning_up():
    try:
        raise KeyboardInterrupt
    finally:  # as in shutil.rmtree of Python 3.11
        raise OSError(errno.EBADF, "Bad file descriptor")


def interrupted_in_an_import():
    raise ImportError("initialization failed") from KeyboardInterrupt()


@pytest.mark.parametrize("main", [interrupted_in_cleaning_up, interrupted_in_an_import])
def test_ctrl_c_that_python_hides_behind_another_error_is_an_interruption(capsys, main):
    with pytest.raises(SystemExit, match="130"):
        command(main)()
    assert capsys.readouterr().err == "interrupted; rerun the same command to resume\n"


@pytest.mark.parametrize(
    "text", ["", "M", ".M", "1.", "_", "0", ".5", "-1", "1e3", "1.0005k", "5 M", "9" * 400]
)
def test_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive whole number"):
        count(text)
