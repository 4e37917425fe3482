"""Errors of command lines, with hints, and number lists."""

import argparse

import pytest

from alma.errors import Parser, UserError, closest, number_list


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
            "unrecognized arguments: --mega-batchs 4 (did you mean --mega-batches?); see `it --help`",
        ),
        (
            "a --out b --mega-batchs=4",
            "unrecognized arguments: --mega-batchs=4 (did you mean --mega-batches?)",
        ),
        ("a --ot b --worker 3", "the following arguments are required: --out (did you mean --out?); see"),
        ("a --out b --nothing-like-it", "unrecognized arguments: --nothing-like-it; see"),
        ("a -- --ot", "the following arguments are required: --out; see"),
        ("--out b --worker x", "argument --workers: invalid int value: 'x'; see"),
    ],
)
def test_a_misspelt_option_has_a_hint(method, words, message):
    with pytest.raises(UserError) as refused:
        getattr(parser(), method)(words.split())
    assert str(refused.value).startswith(message)


def test_every_misspelt_option_has_a_hint():
    with pytest.raises(UserError, match=r"\(did you mean --workers\? did you mean --mega-batches\?\)"):
        parser(allow_abbrev=False).parse_args("--out x --worker 1 --megabatches 2".split())


def test_closest_word():
    assert closest("switch_gmo", ["switch_gmoe", "transformer_lm"]) == "switch_gmoe"
    assert closest("vgg", ["switch_gmoe", "transformer_lm"]) is None


def test_lists_of_numbers():
    assert number_list("0-2,5,1") == [0, 1, 2, 5]
    assert number_list("3-3") == [3]


def test_repeats_may_be_kept():
    assert number_list("2,2,0-1,1", repeats=True) == [2, 2, 0, 1, 1]


@pytest.mark.parametrize("text", ["2-0", "0,2-0", "", "1,", "a", "-1", "1-", "0-1-2", "1.5"])
def test_invalid_number_lists_are_refused(text):
    for kind in (argparse.ArgumentTypeError, UserError):  # for options, and for other text
        with pytest.raises(kind, match="a whole number|goes up"):
            number_list(text)
