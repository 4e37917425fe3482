"""A step as a process: it prints its cases and rows, which the process that started it reads.

Lines `CASE {…}` name what will be measured, `BEGIN {…}` what is measured now, and
`ROW {"case": {…}, …}` has its figures; all else is for the log. A process that hangs, crashes or
prints garbage loses only the cases without a row.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any, NamedTuple

from slurm.engine.forks import dies_with_parent

ROOT = Path(__file__).parents[2]
NO_RESULT = "no result: no time was left, or the step crashed"
LOST_GPU = 70
"""Exit code of a step whose process can no longer use the GPU."""
SHOWN = 4
"""Of the figures that have names."""
Row = dict[str, Any]
"""Labels, or figures; a list of numbers is repeated measurements."""
Cases = Iterable[tuple[Row, Callable[[], Row]]]
"""Labels of a case, and what measures it."""


def work_on(name: str, args: Any) -> None:
    """Measure the cases of the function `name`, in this process: those in `args.cases`, if there
    are some."""
    module, _, function = name.rpartition(".")
    listed = getattr(importlib.import_module(f"benchmarks.{module}"), function)(args)
    cases = [(labels, work) for labels, work in listed if not args.cases or labels in args.cases]
    for labels, _ in cases:
        announce(labels)
    for labels, work in cases:
        begin(labels)
        failed = False
        try:
            figures = work()
            json.dumps(figures, allow_nan=False)
        except Exception as error:
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {error}"[-400:]}
            failed = True
        tell(labels, figures)
        if failed and not usable_gpu():
            sys.exit(LOST_GPU)


def usable_gpu() -> bool:
    """Whether this process can go on after a case that failed: some errors of a kernel are final
    for its process. Also frees the memory of the case."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        gc.collect()
        torch.cuda.empty_cache()
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def announce(labels: Row) -> None:
    """Say that a case will have a row."""
    print(f"\nCASE {json.dumps(labels)}", flush=True)


def begin(labels: Row) -> None:
    """Say that a case is measured now."""
    print(f"\nBEGIN {json.dumps(labels)}", flush=True)


def tell(labels: Row, figures: Row) -> None:
    """Say the figures of a case."""
    print(f"\nROW {json.dumps({'case': labels} | figures)}", flush=True)


class LogLine(NamedTuple):
    """What a step has printed: `kind` is CASE, BEGIN or ROW."""

    kind: str
    row: Row


def follow(
    words: Sequence[str], limit: float, log: Path, case_limit: float = float("inf")
) -> Iterator[tuple[list[Row], str]]:
    """Run a step for at most `limit` seconds, a case of it for `case_limit`. After each row and at
    the end it yields all rows, those of cases without a result with an error, and how the step
    ended."""
    deadline = time.monotonic() + limit
    progress = CaseProgress(case_limit)
    text = b""
    yield progress.rows, "running"
    with open(log, "ab") as output, started(words, PIPE) as process:
        assert process.stdout
        while (seconds := min(deadline, progress.deadline) - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], min(seconds, 0.1))[0]:
                if process.poll() is not None:  # what it has left running may hold the pipe
                    break
                continue
            read = os.read(process.stdout.fileno(), 1 << 16)
            output.write(read)
            output.flush()
            *lines, text = (text + read).split(b"\n")
            for line in filter(None, map(parse, lines)):
                progress.note(line)
                yield progress.rows, "running"
            if not read:
                break
        with contextlib.suppress(TimeoutExpired):
            remaining = min(deadline, progress.deadline) - time.monotonic()
            process.wait(max(0.0, remaining))
        code = process.poll()
    ended = "complete"
    if code is None and time.monotonic() < deadline:
        ended = f"a case was stopped at its limit of {case_limit:.0f} s"
    elif code is None:
        ended = "stopped at its limit"
    elif code:
        ended = f"exit code {code}"
    if ended != "complete":
        progress.lose(ended)
    yield progress.rows, ended


class CaseProgress:
    """The rows of a step so far, and the case that it works on."""

    def __init__(self, case_limit: float) -> None:
        self.rows: list[Row] = []
        self.deadline = float("inf")
        self.case_limit = case_limit
        self.begun: Row | None = None

    def note(self, line: LogLine) -> None:
        """Take a line of the step; prints the figures of a case."""
        if line.kind == "BEGIN":
            self.begun = line.row
            self.deadline = time.monotonic() + self.case_limit
            return
        self._replace(line.row)
        if line.kind == "ROW":
            self.begun = None
            self.deadline = float("inf")
            print(
                "  ".join(f"{name} {shown(value)}" for name, value in line.row.items()), flush=True
            )

    def lose(self, ended: str) -> None:
        """The process has ended within the case that had begun."""
        if self.begun is not None:
            self._replace({"case": self.begun, "error": f"no result: {ended}"})

    def _replace(self, row: Row) -> None:
        self.rows = [earlier for earlier in self.rows if earlier["case"] != row["case"]] + [row]


def parse(line: bytes) -> LogLine | None:
    """A line that `announce`, `begin` or `tell` printed, None for others; a case without figures
    has the error NO_RESULT."""
    with contextlib.suppress(ValueError, TypeError):
        if line.startswith(b"CASE "):
            return LogLine("CASE", {"case": dict(json.loads(line[5:])), "error": NO_RESULT})
        if line.startswith(b"BEGIN "):
            return LogLine("BEGIN", dict(json.loads(line[6:])))
        if line.startswith(b"ROW "):
            row = dict(json.loads(line[4:]))
            return LogLine("ROW", row) if isinstance(row["case"], dict) else None
    return None


def shown(value: Any) -> str:
    """A figure as text: four digits; of several their median and quartiles; of named ones the
    first."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in [*value.items()][:SHOWN])
    if isinstance(value, list):
        quartiles = [*value] * 3
        if len(value) > 1:
            quartiles = statistics.quantiles(value, n=4, method="inclusive")
        first, middle, third = map(shown, quartiles)
        return f"{middle} [{first}-{third}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


@contextlib.contextmanager
def started(words: Sequence[str], output: Any, folder: Path | None = None) -> Iterator[Popen]:
    """Run a command of this checkout in `folder`, in a process group of its own; the end of the
    block kills the group."""
    root = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    # each process would compile torch and fairseq anew
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = Popen(
        words,
        stdin=DEVNULL,
        stdout=output,
        stderr=STDOUT,
        cwd=folder,
        process_group=0,
        preexec_fn=dies_with_parent(),
        env=environment,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def child(
    words: Sequence[str], number: int = 0, after: str = "", folder: Path | None = None
) -> tuple[int, str]:
    """Run `python -m` with `words` to its end in `folder`; returns its exit code and what it
    printed, and prints that. Sends the signal `number`, if it is not 0, when the text `after` is
    printed."""
    text = ""
    with started([sys.executable, "-m", *words], PIPE, folder) as process:
        assert process.stdout
        for line in process.stdout:
            text += line.decode(errors="replace")
            if number and after in text:
                process.send_signal(number)
                number = 0
        code = process.wait()
    print(text, flush=True)
    return code, text
