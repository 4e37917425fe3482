"""Step `tests`: `pytest -m gpu` on several processes, a case for each test; without a GPU, only
collected."""

import os
from typing import Any

import pytest

from alma.errors import UserError
from benchmarks.gpu import process
from benchmarks.gpu.process import ROOT, Cases, Row, announce, tell

PROCESSES = 12
OF_UPDATES = ("fairseq_alma/test_gpu.py", "fairseq_alma/test_late.py", "fairseq_alma/test_tf32.py")
FILES = (*OF_UPDATES, "vision/test_gpu.py", "vision/test_data.py")
SLOW = "resumes or two_gpus or fully_sharded"
"""Tests that the step `ladder` leaves to this one."""


class Outcomes:
    """A plugin of pytest that prints cases and rows."""

    def __init__(self) -> None:
        self.collected = dict[str, None]()

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """The tests, once from each process of xdist."""
        for name in ids:
            if name not in self.collected:
                announce({"test": name})
        self.collected |= dict.fromkeys(ids)

    def pytest_collection_finish(self, session: Any) -> None:
        """The tests without xdist."""
        self.collected |= dict.fromkeys(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome of a test, or of its set-up if that is all there is."""
        if report.when == "call" or report.outcome != "passed":
            row = {"outcome": report.outcome, "seconds": report.duration}
            tell(
                {"test": report.nodeid},
                row | ({"error": str(report.longrepr)[-300:]} if report.failed else {}),
            )


def tests(args: Any) -> Cases:
    """None: pytest prints them."""
    names = [case["test"] for case in args.cases or ()] or [f"tests/{name}" for name in FILES]
    words = [*names, "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"  # the tests share the cores
    outcomes = Outcomes()
    pytest.main([*words, *(["--collect-only"] if args.tiny else [f"-n{PROCESSES}"])], [outcomes])
    if args.tiny or not outcomes.collected:
        figures = {"collected": len(outcomes.collected)}
        yield (
            {"test": "all"},
            lambda: figures if outcomes.collected else {"error": "no test was collected"},
        )


def tests_of_an_update(tiny: bool) -> Row:
    """The tests of what `ladder` measures, in a process of pytest. UserError: one failed."""
    chosen = ["--collect-only"] if tiny else [f"-n{PROCESSES}"]
    files = [f"tests/{name}" for name in OF_UPDATES]
    common = ["-m", "gpu", "-k", f"not ({SLOW})", "-q", "-p", "no:cacheprovider"]
    code, text = process.child(["pytest", *files, *common, *chosen], folder=ROOT)
    lines = text.strip().splitlines() or ["nothing was printed"]
    if code:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise UserError(f"exit code {code}: {'; '.join([*failed, lines[-1]])}")
    return {"tests": lines[-1]}
