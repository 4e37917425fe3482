"""The code of 0324bce that later changes replaced, for `python -m benchmarks gpu ladder` and
`ledger`: what each of them gains is seen beside it.

CHANGES are their names, in the order in which the ladder puts them back.
"""

import contextlib
import importlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock


class Earlier(NamedTuple):
    """Code that takes the place of an attribute."""

    owner: str
    """A module, or a class of one as `module:Class`."""
    name: str
    code: Any


EARLIER: dict[str, list[Earlier]] = {
    "gelu": [],
    "foreach": [],
    "loss": [],
    "waits": [],
    "dispatch": [],
}
CHANGES = tuple(EARLIER)


@contextlib.contextmanager
def without(changes: Collection[str]) -> Iterator[None]:
    """Put the earlier code of some changes in place."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            for earlier in EARLIER[change]:
                patch = mock.patch.object(owner_of(earlier.owner), earlier.name, earlier.code)
                stack.enter_context(patch)
        yield


def owner_of(name: str) -> Any:
    """The module or class of an `Earlier`."""
    module, _, kind = name.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, kind) if kind else owner


def kind_of(function: str) -> str | None:
    """The kind in `benchmarks.ledger` of a function of this module."""
    return None
