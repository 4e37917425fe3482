"""`python -m tests.chaos TOOL`: commands under random faults give the results of an undisturbed
run.

A run draws the settings of a tool and runs its commands undisturbed. Then it runs them again, from
the start, and disturbs them: signals to the process, its group or a child, the same command started
a second time. It repeats each command until it succeeds. Right is: the same results, no process and
no file left over, nothing finished done again, each error one line, an end soon after Ctrl-C.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.broken_input.sound import Sound
from tests.chaos.faults import FAULTS, SIGNALS, EndOfCommand, RunningCommand, adopt
from tests.chaos.preemptions import preempt
from tests.chaos.workloads import WORKLOADS, Difference, Report, check_kept, compare, finished

REPEATS = 3
"""How often a run is disturbed, from the start, for each time that it runs undisturbed."""
SOON = 20
"""Seconds from Ctrl-C to the end of a command and its processes, on a busy machine too."""
_TRACEBACK = re.compile(
    r"^(Exception ignored in atexit callback: .*\n)?"
    r"Traceback \(most recent call last\):\n((?: .*\n)*)",
    re.M,
)
_PYTHONS_OWN = re.compile(r'  File "(<|.*/(multiprocessing|concurrent/futures)/|.*/threading\.py)')
"""Frames of what Python prints when a worker, its parent or its resource tracker was killed."""
_LIBRARIES_OWN = ("torchinductor_", "pymp-")
"""torch's cache and the folder of multiprocessing's sockets, which a kill leaves."""
_NOT_STARTED = "Fatal Python error: init_import_site"
"""What Python prints if it is interrupted before it runs anything."""


class Runs:
    """Runs of a tool below `folder`, in work/; sound/ keeps the inputs."""

    def __init__(self, folder: Path, tool: str, faults: Sequence[str] = FAULTS) -> None:
        self.tool = tool
        self.faults = faults
        self.sound = Sound(folder / "sound")
        self.work = folder / "work"
        self.temporary = folder / "tmp"
        adopt()

    def run(self, rng: Random) -> Report:
        """Settings and faults are those that `rng` draws;
        the moments differ a little from time to time."""
        workload = WORKLOADS[self.tool](rng)
        report = Report("; ".join(workload.commands))
        try:
            self._prepare(workload.needs)
            undisturbed = [self._finish(words) for words in workload.commands]
            expected = workload.result(self.work)
            for _ in range(REPEATS):
                self._prepare(workload.needs)
                for words, before in zip(workload.commands, undisturbed, strict=True):
                    self._disturb(words, before, rng, report)
                compare(workload.result(self.work), expected)
                names = sorted(path.name for path in self.temporary.iterdir())
                if names := [name for name in names if not name.startswith(_LIBRARIES_OWN)]:
                    raise Difference(f"temporary files left: {names}")
        except Difference as problem:
            report.problem = str(problem)
        return report

    def _prepare(self, needs: Sequence[str]) -> None:
        """Empty folders, and the inputs."""
        for folder in (self.work, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.sound.copy(needs, self.work)

    def _finish(self, words: str, *codes: int, alone: bool = True) -> EndOfCommand:
        """Run a command undisturbed. Difference: it does not end well, or with one of `codes`."""
        with RunningCommand(self.work, words) as command:
            ended = command.end(alone)
        _judge(ended, codes)
        return ended

    def _disturb(self, words: str, before: EndOfCommand, rng: Random, report: Report) -> None:
        """Repeat a command under faults until it succeeds."""
        for _ in range(rng.randint(1, 8)):
            fault = rng.choice(self.faults)
            events = rng.randint(0, before.events) if rng.random() < 0.7 else 0
            seconds = rng.uniform(0, 0.05) if events else rng.uniform(0, before.seconds)
            done = finished(self.work)
            ended, met = self._meet(fault, words, events, seconds, rng)
            if met:
                report.faults.append(fault)
            check_kept(done)
            if not ended.code:
                return
        done = finished(self.work)
        self._finish(words)
        check_kept(done)

    def _meet(
        self, fault: str, words: str, events: int, seconds: float, rng: Random
    ) -> tuple[EndOfCommand, bool]:
        """The end of a command under a fault, and whether the fault came before it."""
        with RunningCommand(self.work, words) as command:
            met = command.reach(events, seconds)
            if met and fault in SIGNALS:
                command.send(fault, rng)
            elif met:  # the same command beside the first one ends well, or refuses in one line
                self._finish(words, 2, alone=False)
            sent = time.monotonic()
            ended = command.end()
        if (
            met
            and fault in ("SIGINT to process", "SIGINT to group")
            and time.monotonic() - sent > SOON
        ):
            raise Difference(f"{fault}: no end within {SOON} s")
        _judge(
            ended, None if fault in SIGNALS else (2,)
        )  # the second command may be first at the lock
        return ended, met


def _judge(ended: EndOfCommand, codes: Sequence[int] | None) -> None:
    """Difference: processes are left, there is a traceback, or an error is not one line.

    `codes`: exit codes that are right besides 0; None: any, of a command that was killed.
    """
    if ended.left:
        raise Difference(f"left processes: {'; '.join(ended.left)}")
    for at_exit, frames in [] if _NOT_STARTED in ended.text else _TRACEBACK.findall(ended.text):
        files = [line for line in frames.splitlines() if line.startswith("  File ")]
        if codes is not None or not (at_exit or all(map(_PYTHONS_OWN.match, files))):
            raise Difference(f"traceback:\n{ended.text[-3000:]}")
    errors = [line for line in ended.text.splitlines() if line.startswith("error: ")]
    if codes is not None and ended.code and (ended.code not in codes or len(errors) != 1):
        raise Difference(
            f"exit code {ended.code}, {len(errors)} lines of errors:\n{ended.text[-3000:]}"
        )


def main() -> None:
    """Run until the time is over; print differences; exit with 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    add = parser.add_argument
    add(
        "tool",
        choices=(*WORKLOADS, "slurm"),
        help="what runs; slurm: jobs on a real SLURM, which are preempted",
    )
    count = "with slurm: preempt so many jobs (default: 100)"
    add("--preemptions", type=int, default=100, metavar="N", help=count)
    add(
        "--minutes",
        type=float,
        default=10,
        metavar="M",
        help="start runs for so long (default: 10)",
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of the first run (default: 0)")
    options = parser.parse_args()
    if options.tool == "slurm":
        sys.exit(bool(preempt(options.preemptions, options.seed)))
    began = time.monotonic()
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), options.tool)
        while not reports or time.monotonic() < began + 60 * options.minutes:
            seed = options.seed + len(reports)
            reports.append(runs.run(Random(f"{options.tool} {seed}")))
            report = reports[-1]
            if report.problem:
                print(f"seed {seed}: {report.settings}")
                print(f"    after {', '.join(report.faults)}:")
                print(f"    {report.problem}", flush=True)
    problems = sum(bool(report.problem) for report in reports)
    faults = sum(len(report.faults) for report in reports)
    print(f"{faults} faults in {len(reports)} runs, {problems} differences")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
