"""A step as a process: it prints its cases and rows, which the process that started it reads.

Lines `CASE {…}` name what will be measured, `ROW {"case": {…}, …}` has the figures of one; all else
is for the log. A process that hangs, crashes or prints garbage loses only the cases without a row.
"""

import contextlib
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
from typing import Any

from slurm.engine.forks import dies_with_parent

ROOT = Path(__file__).parents[2]
NO_RESULT = "no result: no time was left, or the step crashed"
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
        try:
            figures = work()
            json.dumps(figures, allow_nan=False)
        except Exception as error:
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {error}"[-400:]}
        tell(labels, figures)


def announce(labels: Row) -> None:
    """Say that a case will have a row."""
    print(f"\nCASE {json.dumps(labels)}", flush=True)


def tell(labels: Row, figures: Row) -> None:
    """Say the figures of a case."""
    print(f"\nROW {json.dumps({'case': labels} | figures)}", flush=True)


def follow(words: Sequence[str], limit: float, log: Path) -> Iterator[tuple[list[Row], str]]:
    """Run a step for at most `limit` seconds. After each row and at the end it yields all rows,
    those of cases without a result with the error NO_RESULT, and how the step ended."""
    deadline = time.monotonic() + limit
    text = b""
    rows: list[Row] = []
    yield rows, "running"
    with open(log, "ab") as output, started(words, PIPE) as process:
        assert process.stdout
        while (seconds := deadline - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], min(seconds, 0.1))[0]:
                if process.poll() is not None:  # what it has left running may hold the pipe
                    break
                continue
            read = os.read(process.stdout.fileno(), 1 << 16)
            output.write(read)
            output.flush()
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                row = parse(line)
                if row:
                    rows = [earlier for earlier in rows if earlier["case"] != row["case"]] + [row]
                    if row.get("error") != NO_RESULT:
                        figures = [f"{name} {shown(value)}" for name, value in row.items()]
                        print("  ".join(figures), flush=True)
                    yield rows, "running"
            if not read:
                break
        with contextlib.suppress(TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        code = process.poll()
    ended = "complete"
    if code is None:
        ended = "stopped at its limit"
    elif code:
        ended = f"exit code {code}"
    yield rows, ended


def parse(line: bytes) -> Row | None:
    """The row of a line that `announce` or `tell` printed; None for other lines."""
    with contextlib.suppress(ValueError, TypeError):
        if line.startswith(b"CASE "):
            return {"case": dict(json.loads(line[5:])), "error": NO_RESULT}
        if line.startswith(b"ROW "):
            row = dict(json.loads(line[4:]))
            return row if isinstance(row["case"], dict) else None
    return None


def shown(value: Any) -> str:
    """A figure as text: four digits; of several their median and quartiles."""
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
def started(words: Sequence[str], output: Any) -> Iterator[Popen]:
    """Run a command of this checkout in a process group of its own; the end of the block kills the
    group."""
    root = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    # each process would compile torch and fairseq anew
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = Popen(
        words,
        stdin=DEVNULL,
        stdout=output,
        stderr=STDOUT,
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


def child(words: Sequence[str], number: int = 0, after: str = "") -> tuple[int, str]:
    """Run `python -m` with `words` to its end; returns its exit code and what it printed, and
    prints that. Sends the signal `number`, if it is not 0, when the text `after` is printed."""
    text = ""
    with started([sys.executable, "-m", *words], PIPE) as process:
        assert process.stdout
        for line in process.stdout:
            text += line.decode(errors="replace")
            if number and after in text:
                process.send_signal(number)
                number = 0
        code = process.wait()
    print(text, flush=True)
    return code, text
