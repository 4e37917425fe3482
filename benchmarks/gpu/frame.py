"""The frame of all steps: cases one after another, a time limit, a JSON file and a table."""

import contextlib
import importlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from alma.files import write_json_atomic
from alma.provenance import commit, machine, versions
from alma.tables import as_text
from slurm.engine.children import OWN_MODULES
from slurm.engine.parents import dies_with_parent

STEPS = {
    "wheels": "packages for a machine without a network",
    "setup": "an environment from carried wheels, with the machine's torch",
    "tests": "pytest -m gpu",
    "switch": "Switch and dense FFN, forward and backward, by dispatcher",
    "train": "training of the paper's models by fairseq-train, whole processes",
    "profile": "where the time of training goes",
    "images": "a stage of image learners against plain PyTorch",
    "resume": "training after signals against training without one",
    "stream": "a stream of a base-size model: raw and averaged weights",
}
ROOT = Path(__file__).parents[2]
GRACE = 10
"""Seconds between SIGTERM and SIGKILL for a child process."""
Row = dict[str, Any]
"""Labels and figures; a list of numbers is repeated measurements."""
Case = tuple[Row, Callable[[], Row]]
"""The labels of a row, and what measures the rest of it."""


class TimeUp(BaseException):
    """The time of the step is over. No Exception: libraries must not catch it."""


class Asked(NamedTuple):
    """A step as it was asked for."""

    step: str
    out: Path
    seconds: int
    repeats: int
    tiny: bool
    """Sizes that a CPU computes in seconds."""
    wheels: Path | None = None
    environment: Path | None = None

    @property
    def log(self) -> Path:
        """What child processes print; one file, because few come back from the machine."""
        return self.out / f"{self.step}.log"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block after `seconds`, or at SIGTERM."""

    def stop(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise TimeUp

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def run(asked: Asked) -> bool:
    """Run a step: print each row when it is done, then the table; returns whether a case failed."""
    rows: list[Row] = []
    title, began = STEPS[asked.step], time.monotonic()
    known = {"command": shlex.join([sys.executable, *sys.argv]), "title": title, "tiny": asked.tiny}
    known |= {"limit": asked.seconds, "repeats": asked.repeats, "commit": commit()}
    known |= {"machine": machine(), "versions": versions()}

    def write(complete: bool) -> list[list[str]]:
        header = list(dict.fromkeys(name for row in rows for name in row))
        table = [header, *([shown(row.get(name, "")) for name in header] for row in rows)]
        record = {"complete": complete, "seconds": time.monotonic() - began, "rows": rows}
        record |= {"table of medians and quartiles": table}
        write_json_atomic(asked.out / f"{asked.step}.json", known | record)
        return table

    asked.log.unlink(missing_ok=True)
    print(f"{asked.step}: {title}{'; tiny sizes' if asked.tiny else ''}", flush=True)
    complete = False
    try:
        with limited(asked.seconds), contextlib.closing(_cases(asked)) as cases:
            for labels, work in cases:
                rows.append(labels | _attempt(work))
                print("  ".join(f"{name} {shown(value)}" for name, value in rows[-1].items()), flush=True)
                write(complete)
        complete = True
    except TimeUp:
        print(f"stopped at the limit of {asked.seconds} s; rows are missing", flush=True)
    table = write(complete)
    print(f"\n{title}; medians and quartiles\n{as_text(table)}" if rows else "no row")
    return any("error" in row for row in rows)


def _cases(asked: Asked) -> Generator[Case, None, None]:
    yield from importlib.import_module(f"benchmarks.gpu.{asked.step}").cases(asked)


def _attempt(work: Callable[[], Row]) -> Row:
    """The figures of a case, or its error: the other cases go on."""
    try:
        row = work()
        json.dumps(row, allow_nan=False)
        return row
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def shown(value: Any) -> str:
    """A figure as text: four digits; of several their median and quartiles."""
    if isinstance(value, list):
        several = statistics.quantiles(value, n=4, method="inclusive") if len(value) > 1 else [*value] * 3
        first, middle, third = map(shown, several)
        return f"{middle} [{first}-{third}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def child(words: Sequence[str], log: Path, number: int = 0, after: str = "") -> tuple[int, str]:
    """Run `python -m` with `words` to its end; returns its exit code and what it printed, and adds that to
    `log`. Sends the signal `number`, if it is not 0, when the text `after` is printed."""
    began = log.stat().st_size if log.exists() else 0
    with started(words, log) as process:
        while number and process.poll() is None:
            if after in log.read_bytes()[began:].decode(errors="replace"):
                process.send_signal(number)
                break
            time.sleep(0.02)
        code = process.wait()
    return code, log.read_bytes()[began:].decode(errors="replace")


@contextlib.contextmanager
def started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """Run `python -m` with `words`; the end of the block, or of this process, ends it."""
    root = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "ab") as output:
        process = start(words, output, {**os.environ, **OWN_MODULES, "PYTHONPATH": root})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def start(words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen:
    """`python -m` with `words`, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
        preexec_fn=dies_with_parent(),
        env=environment,
    )
