"""`python -m benchmarks chaos`: commands under random faults give the results of an undisturbed run.

A run draws the settings of a tool and runs its commands undisturbed. Then it runs them again, from the
start, and disturbs them: signals to the process, its group or a child, a full disk, folders without
permission to write, a truncated file, a clock that jumps, the same command started a second time, and on
SLURM what jobs and nodes suffer. It repeats each command until it succeeds. Right is: the same results, no
process and no file left over, nothing finished done again, each error one line.
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from alma.errors import Parser, UserError, hint
from alma.tables import as_text
from benchmarks.broken_input import judge
from benchmarks.broken_input.sound import Sound
from benchmarks.chaos.faults import (
    FAULTS,
    FORKED,
    SIGNALS,
    EndOfCommand,
    Moment,
    Place,
    RunningCommand,
    adopt,
    truncate,
)
from benchmarks.chaos.workloads import WORKLOADS, Difference, Report, Workload, check_kept, finished

TOOLS = (*WORKLOADS, "slurm")
REPEATS = 3
"""How often a run is disturbed, from the start, for each time that it runs undisturbed."""
_TRACEBACK = re.compile(
    r"^(Exception ignored in atexit callback: .*\n)?Traceback \(most recent call last\):\n((?: .*\n)*)",
    re.M,
)
_PYTHONS_OWN = re.compile(r'  File "(<|.*/(multiprocessing|concurrent/futures)/|.*/threading\.py)')
"""Frames of what Python prints when a worker, its parent or its resource tracker was killed."""
_TORCHS_OWN = "torchinductor_"
"""Its cache, which a kill leaves."""
_NOT_STARTED = "Fatal Python error: init_import_site"
"""What Python prints if it is interrupted before it runs anything."""


class Local:
    """Runs of a tool on this machine, in `folder`; the inputs are kept there."""

    def __init__(self, folder: Path, tool: str, faults: Sequence[str]) -> None:
        self.tool, self.faults = tool, faults
        self.fresh = 0.2
        """Share of the disturbed runs of `FORKED` that are new interpreters."""
        self.sound = Sound(folder / "sound")
        self.place = Place(Path(tempfile.mkdtemp(prefix="chaos_", dir=folder)))
        if not self.place.mounted:
            print("no right to mount a file system: no full disks")
            self.faults = [each for each in faults if each != "disk full"]
        adopt()
        if tool == FORKED:
            judge.preload([FORKED])

    def run(self, rng: Random, number: int) -> Report:
        """Settings and faults are those that `rng` draws; the moments differ a little from time to time."""
        workload = WORKLOADS[self.tool](rng)
        report = Report(self.tool, number, "; ".join(workload.commands))
        try:
            self._prepare(workload)
            undisturbed = [self._finish(words) for words in workload.commands]
            expected = workload.result(self.place.work)
            for _ in range(REPEATS):
                self._prepare(workload)
                for words, before in zip(workload.commands, undisturbed, strict=True):
                    self._disturb(words, before, rng, report)
                self._compare(workload, expected)
        except Difference as problem:
            report.problem = str(problem)
        return report

    def close(self) -> None:
        """Remove the folder of the runs."""
        self.place.close()
        shutil.rmtree(self.place.folder)

    def _prepare(self, workload: Workload) -> None:
        """An empty place with the inputs, and a list of them."""
        self.place.clear()
        for name in workload.needs:
            source = self.sound.get(name)
            for folder in (self.place.work, self.place.folder / "inputs"):
                if source.is_dir():
                    shutil.copytree(source, folder / name)
                else:
                    folder.mkdir(exist_ok=True)
                    shutil.copy2(source, folder / name)

    def _finish(self, words: str) -> EndOfCommand:
        """Run a command undisturbed. Difference: it fails."""
        with RunningCommand(self.place, words) as command:
            ended = command.end()
        self._judge(ended, ())
        return ended

    def _disturb(self, words: str, before: EndOfCommand, rng: Random, report: Report) -> None:
        """Repeat a command under faults until it succeeds."""
        for _ in range(rng.randint(1, 8)):
            fault = rng.choice(self.faults)
            events = rng.randint(0, before.events) if rng.random() < 0.7 else 0
            seconds = rng.uniform(0, 0.05) if events else rng.uniform(0, before.seconds)
            done = finished(self.place.work)
            ended, met = self._meet(fault, words, Moment(events, seconds), rng)
            if met:
                report.faults.append(fault)
            if fault != "file truncated":
                check_kept(done)
            if not ended.code:
                return
        done = finished(self.place.work)
        self._finish(words)
        check_kept(done)

    def _meet(self, fault: str, words: str, moment: Moment, rng: Random) -> tuple[EndOfCommand, bool]:
        """The end of a command under a fault, and whether the fault came before it."""
        met = fault == "clock jumps"
        os.environ["ALMA_CHAOS_CLOCK"] = str(rng.uniform(-3e8, 3e8))
        with RunningCommand(self.place, words, fault, fresh=rng.random() < self.fresh) as command:
            with contextlib.ExitStack() as stack:
                if command.reach(moment):
                    met = True
                    if fault in SIGNALS:
                        command.send(fault, rng)
                    elif fault in ("file truncated", "clock jumps"):
                        command.send("SIGKILL to process", rng)
                    elif fault == "disk full":
                        stack.enter_context(self.place.full(rng.choice([0, 1 << 12, 1 << 16])))
                    elif fault == "no permission":
                        stack.enter_context(self.place.unwritable())
                    else:
                        self._second(words)
                ended = command.end()
            self._judge(ended, self._codes(fault))
        if fault == "file truncated" and ended.code and (cut := truncate(self.place, rng)):
            self._rerun_truncated(words, *cut)
        return ended, met

    def _second(self, words: str) -> None:
        """Start the same command beside the first one: it ends well, or refuses in one line."""
        with RunningCommand(self.place, words) as command:
            ended = command.end(alone=False)
        self._judge(ended, (2,))

    def _rerun_truncated(self, words: str, path: Path, content: bytes) -> None:
        """After the loss of a file's end: the command succeeds, or names the problem; then it is restored.

        A command may succeed without a file that it has finished before.
        """
        with RunningCommand(self.place, words) as command:
            ended = command.end()
        self._judge(ended, (1, 2))
        if path.exists() and content.startswith(path.read_bytes()):  # perhaps cut to a whole line
            path.write_bytes(content)

    @staticmethod
    def _codes(fault: str) -> tuple[int, ...] | None:
        """Exit codes that a command may have under a fault, besides 0; None: any."""
        if fault in SIGNALS or fault in ("file truncated", "clock jumps"):
            return None
        if fault == "second launch":
            return (2,)  # the second was first to take the lock
        return (1, 2) if fault in ("disk full", "no permission") else ()

    def _judge(self, ended: EndOfCommand, codes: Sequence[int] | None) -> None:
        if ended.left:
            raise Difference(f"left processes: {'; '.join(ended.left)}")
        started = _NOT_STARTED not in ended.text
        tracebacks = _TRACEBACK.findall(ended.text)
        if started and any(_is_ours(at_exit, frames, codes is None) for at_exit, frames in tracebacks):
            raise Difference(f"traceback:\n{ended.text[-3000:]}")
        if codes is None or not ended.code:
            return
        errors = [line for line in ended.text.splitlines() if line.startswith("error: ")]
        if ended.code not in codes or len(errors) != 1:
            raise Difference(f"exit code {ended.code}, {len(errors)} lines of errors:\n{ended.text[-3000:]}")

    def _compare(self, workload: Workload, expected: Mapping[str, object]) -> None:
        found = workload.result(self.place.work)
        if missing := expected.keys() - found.keys():
            raise Difference(f"missing: {sorted(missing)}")
        if more := found.keys() - expected.keys():
            raise Difference(f"left over: {sorted(more)}")
        if other := [name for name in found if found[name] != expected[name]]:
            where = _first_difference(found[other[0]], expected[other[0]])
            raise Difference(f"other results: {other}; {where}")
        left = sorted(path.name for path in (self.place.folder / "tmp").iterdir())
        if left := [name for name in left if not name.startswith(_TORCHS_OWN)]:
            raise Difference(f"temporary files left: {left}")


def _first_difference(found: object, expected: object) -> str:
    """Where two files differ, as far as `Workload.result` looks into them."""
    if not (isinstance(found, Mapping) and isinstance(expected, Mapping)):
        return "its content"
    return f"{min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))}"


def _is_ours(at_exit: str, frames: str, killed: bool) -> bool:
    """Whether a traceback is more than Python's own report of a killed process, or of one that exits."""
    files = [line for line in frames.splitlines() if line.startswith("  File ")]
    return not (killed and (at_exit or all(map(_PYTHONS_OWN.match, files))))


def table(reports: Sequence[Report]) -> str:
    """Faults by kind and tool, runs and differences."""
    tools = list(dict.fromkeys(each.tool for each in reports))
    counts = Counter((fault, each.tool) for each in reports for fault in each.faults)
    kinds = [*FAULTS, *sorted({fault for fault, _ in counts} - set(FAULTS))]
    lines = [["", *tools, "all"]]
    for kind in kinds:
        numbers = [counts[kind, tool] for tool in tools]
        if any(numbers):
            lines.append([kind, *map(str, [*numbers, sum(numbers)])])
    for name, value in (
        ("faults", lambda each: len(each.faults)),
        ("runs", lambda each: 1),
        ("differences", lambda each: bool(each.problem)),
    ):
        numbers = [sum(value(each) for each in reports if each.tool == tool) for tool in tools]
        lines.append([name, *map(str, [*numbers, sum(numbers)])])
    return as_text(lines)


def main(words: Sequence[str]) -> None:
    """Run until the time is over; print differences and the table; exit with 1 if there is a difference."""
    parser = Parser(prog="python -m benchmarks chaos", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10, metavar="M", help="start runs for so long (default: 10)")
    add("--seed", type=int, default=0, metavar="S", help="seed of settings and faults (default: 0)")
    add("--tool", default=",".join(TOOLS), metavar="TOOL,...", help=f"of {', '.join(TOOLS)} (default: all)")
    add("--faults", metavar="FAULT,...", help="on this machine, such as 'disk full' (default: all)")
    add("--run", type=int, metavar="K", help="run number K of the seed alone")
    add("--first", type=int, default=0, metavar="K", help="number of the first run (default: 0)")
    add("--folder", type=Path, metavar="DIR", help="keeps the inputs (default: a temporary one)")
    options = parser.parse_args(words)
    tools = options.tool.split(",")
    for name in tools:
        if name not in TOOLS:
            raise UserError(f"--tool {name}: unknown; {hint(name, TOOLS)}")
    for name in options.faults.split(",") if options.faults else ():
        if name not in FAULTS:
            raise UserError(f"--faults {name}: unknown; {hint(name, FAULTS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        reports = _repeat(folder, tools, options)
    if any(each.problem for each in reports):
        sys.exit(1)


def _repeat(folder: Path, tools: Sequence[str], options: Namespace) -> list[Report]:
    """Runs of each tool, for an equal share of the time."""
    began = time.monotonic()
    numbers = [options.run] if options.run is not None else range(options.first, sys.maxsize)
    reports: list[Report] = []
    with contextlib.suppress(KeyboardInterrupt):  # the table has the runs so far
        for place, tool in enumerate(tools, start=1):
            end = began + 60 * options.minutes * place / len(tools)
            with _runs(folder, tool, options) as run:
                for number in numbers:
                    report = run(Random(f"{options.seed} {tool} {number}"), number)
                    reports.append(report)
                    if report.problem:
                        print(f"{tool}: run {number} of seed {options.seed}: {report.settings}")
                        print(f"    after {len(report.faults)} faults ({', '.join(report.faults)}):")
                        print(f"    {report.problem}", flush=True)
                    if time.monotonic() > end:
                        break
    print(f"\n{table(reports)}\n{(time.monotonic() - began) / 3600:.2f} hours, seed {options.seed}")
    return reports


@contextlib.contextmanager
def _runs(folder: Path, tool: str, options: Namespace) -> Iterator[Callable[[Random, int], Report]]:
    """The function that makes a run of a tool."""
    if tool != "slurm":
        runs = Local(folder, tool, options.faults.split(",") if options.faults else FAULTS)
        try:
            yield runs.run
        finally:
            runs.close()
        return
    from benchmarks.chaos.jobs import OnSlurm
    from tests.slurm.cluster import missing

    if name := missing():
        raise UserError(f"{name}: not installed; install SLURM, or leave slurm out of --tool")
    with tempfile.TemporaryDirectory(dir=folder) as place, OnSlurm(Path(place)) as jobs:
        yield jobs.run
