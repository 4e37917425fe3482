"""The bugs of planted_bugs.py can be planted; that tests find them takes an hour: run the script."""

import ast
from pathlib import Path

import pytest

from tests.planted_bugs import BUGS, ROOT, Bug, plant


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted(bug: Bug, tmp_path: Path) -> None:
    file = tmp_path / bug.path
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / bug.path).read_text())
    assert plant(bug, tmp_path) != file.read_text()
    ast.parse(file.read_text())
    assert all((ROOT / "tests" / name).is_file() for name in bug.tests.split())
