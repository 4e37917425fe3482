"""Kinds of values in JSON files."""

import math

import msgspec
import pytest

from alma import schema
from alma.schema import AMOUNT, COUNT, NUMBER, TEXT, whole

LOOP: dict = {}
LOOP["a"] = LOOP


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "{",
        b"\xff",
        "1" * 5000,
        "1e400",
        "NaN",
        "[Infinity]",
        '"\\ud800"',
    ],
)
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  the message is that of msgspec, or ours
        schema.parse_json(text)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            TEXT,
            ["", "größer", "日本", "a b", "😀"],
            [None, 1, "\ud800", "a\x1b[2J", "a\0b", "a\n", "\x85"],
        ),
        (NUMBER, [0, -1, 1.5, 1e100], [True, "1", None, 10**400, 1e300, math.nan, math.inf]),
        (AMOUNT, [0, 1.5], [-1, -0.1, True, 1e300, math.nan]),
        (COUNT | None, [None, 1, 2**63 - 1], [0, "1", True, 1.0, 2**63, 10**400]),
        (whole(1, 9), [1, 9], [0, 10, None]),
    ],
)
def test_kinds(kind, good, bad):
    for value in good:
        assert msgspec.convert(value, kind) == value
    for value in bad:
        with pytest.raises(ValueError, match="it: "):
            schema.require({"it": value}, {"it": kind})


def test_plain_values():
    assert all(map(schema.is_plain, [{"a": [1, {"b": None}]}, "größer 日本", True, -1.5, math.nan]))
    for value in ({"a": "\ud800"}, {1: 2}, {"\0": 1}, [10**400], [1e300], {1}, LOOP):
        assert not schema.is_plain(value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"it is \[1\]: it should be an object"),
        ("x" * 99, "it is 'x{59}…: it"),
        (10**400, "it is a huge number"),
        ({"b": 1}, "it lacks a"),
        ({"a": "\x1b"}, "^a: Expected `int`, got `str`$"),
    ],
)
def test_a_message_is_printable_and_short(record, message):
    with pytest.raises(ValueError, match=message):
        schema.require(record, {"a": COUNT}, ["a"])
    schema.require({"a": 1, "b": "unknown"}, {"a": COUNT}, ["a"])
