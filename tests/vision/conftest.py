"""Shared by the tests of image learners."""

import pytest

from alma.errors import UserError


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
