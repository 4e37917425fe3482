"""Kinds of values in JSON files."""

import math

import pytest

from alma import schema
from alma.schema import AMOUNT, FLAG, NUMBER, PLAIN, TEXT, list_of, object_of, optional, whole

LOOP: dict = {}
LOOP["a"] = LOOP


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", b"\xff", "1" * 5000])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  the message is that of json, or ours
        schema.parse_json(text)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (TEXT, ["", "größer", "日本", "a b", "😀"], [None, 1, "\ud800", "a\x1b[2J", "a\0b", "a\nb"]),
        (NUMBER, [0, -1, 1.5, math.nan, math.inf, 2**63 - 1], [True, "1", None, 2**63, 10**400, 1e300]),
        (AMOUNT, [0, 1.5, math.nan], [-1, -0.1, True]),
        (FLAG, [True, False], [0, 1, None, "on"]),
        (whole(1, 9), [1, 9], [0, 10, True, 1.0, "1", None]),
        (optional(whole(1)), [None, 1], [0, "1"]),
        (list_of(TEXT), [[], ["a"]], [["a", 1], "a", None]),
        (object_of(NUMBER), [{}, {"a": 1}], [{"a": "b"}, [1], None]),
        (
            PLAIN,
            [{"a": [1, {"b": None}]}, "a", True],
            [{"a": "\ud800"}, {1: 2}, {"\0": 1}, [10**400], {1}, LOOP],
        ),
    ],
)
def test_kinds(kind, good, bad):
    assert [kind.fits(value) for value in good] == [True] * len(good)
    assert [kind.fits(value) for value in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"it is \[1\]: it should be an object"),
        ({"b": 1}, "it lacks a"),
        ({"a": "\x1b"}, r"a is '\\x1b': it should be a whole number from 1"),
        ({"a": 10**400}, "a is a huge number"),
        ({"a": "x" * 99}, "a is 'x{59}…: it"),
    ],
)
def test_a_message_is_printable_and_short(record, message):
    with pytest.raises(ValueError, match=message):
        schema.require(record, {"a": whole(1)}, ["a"])
    schema.require({"a": 1, "b": "unknown"}, {"a": whole(1)}, ["a"])
