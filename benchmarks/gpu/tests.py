"""Step `tests`: `pytest -m gpu`, file by file; without a GPU the tests are only collected."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from alma.errors import UserError
from benchmarks.gpu import frame
from benchmarks.gpu.frame import ROOT, Asked, Case, Row


def cases(asked: Asked) -> Iterator[Case]:
    """The files with tests marked gpu."""
    for path in files():
        name = str(path.relative_to(ROOT))
        yield {"file": name}, partial(measure, name, asked.log, asked.tiny)


def files() -> list[Path]:
    """In a fixed order."""
    return [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")
    ]


def measure(name: str, log: Path, collect: bool) -> Row:
    """Numbers of tests by outcome. UserError: one failed, or there was none."""
    words = ["pytest", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / name)]
    code, text = frame.child([*words, *(["--collect-only"] if collect else ["-n", "4"])], log)
    if code:
        failed = re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE)
        raise UserError(f"exit code {code}: {'; '.join(failed)[:200]}")
    last = text.splitlines()[-1]
    counts = {what: int(number) for number, what in re.findall(r"(\d+)(?:/\d+)? (\w+)", last)}
    return {"outcome": ", ".join(f"{number} {what}" for what, number in counts.items() if what != "in")}
