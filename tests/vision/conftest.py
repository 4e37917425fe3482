"""Shared by the tests of image learners."""

import pytest

from alma.errors import UserError
from alma.records import MACHINE_FIELDS, Run


def numbers(run):
    """The rows of a run, or of a folder, without those fields that differ between machines."""
    rows = (run if isinstance(run, Run) else Run.read(run)).rows
    return [{key: value for key, value in row.items() if key not in MACHINE_FIELDS} for row in rows]


@pytest.fixture
def refused():
    """`refused(function, ...)` calls the function and returns the one-line message of its UserError."""

    def message(function, *arguments, **options) -> str:
        with pytest.raises(UserError) as caught:
            function(*arguments, **options)
        line = str(caught.value)
        assert "\n" not in line
        return line

    return message
