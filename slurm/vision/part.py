"""A part of a sweep of image runs, as one SLURM job does it: by the command line of vision/run.py alone."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.files import make_directory, write_json_atomic
from slurm.engine import children as child
from slurm.engine.jobs import Restartable, patiently_locked
from slurm.engine.submission import LOGS

VISION = Path(__file__).resolve().parents[2] / "vision" / "run.py"
_SIGNAL_SECONDS = 2


@dataclass(frozen=True)
class Part(Restartable):
    """One element of the array: every `count`-th run of the sweep, from the `number`-th on."""

    out: Path
    """Folder of the sweep."""
    flags: tuple[str, ...]
    number: int
    count: int
    runs: tuple[str, ...]
    """Its run directories, as vision/run.py names them."""
    cpus: int

    @property
    def name(self) -> str:
        """For people."""
        return f"part {self.number} of {self.count}"

    @property
    def marker(self) -> Path:
        """Exists when all its runs are complete, and says which they are."""
        return self.out / LOGS / f"part_{self.number}_of_{self.count}.json"

    @property
    def log(self) -> Path:
        """What vision/run.py prints, of all jobs."""
        return self.marker.with_suffix(".log")

    @property
    def content(self) -> dict[str, Any]:
        """Of the marker."""
        return {"flags": list(self.flags), "runs": list(self.runs)}

    @property
    def done(self) -> bool:
        """Whether the marker is there, and of these runs with these flags."""
        try:
            return json.loads(self.marker.read_bytes()) == self.content
        except (OSError, ValueError):
            return False

    def __str__(self) -> str:
        return f"{self.out} {self.name}"

    def work(self) -> None:
        """Run what is not complete; vision/run.py goes on where each run was, and skips what is done."""
        if self.done:
            return
        words = [*self.flags, "--part", f"{self.number}/{self.count}", "--jobs", str(self.cpus)]
        make_directory(self.log.parent)
        # A job that SLURM took for dead may still be at it.
        with patiently_locked(self.log.parent, f".{self.marker.stem}.lock"):
            try:
                # The signal of `child.save` just ends it: its checkpoints are half a minute old at most.
                child.run(
                    [sys.executable, str(VISION), *words],
                    self.log,
                    self.name,
                    environment={"OMP_NUM_THREADS": str(self.cpus)},
                )
            except child.StageFailed:
                time.sleep(_SIGNAL_SECONDS)  # a signal for the whole job may have met the child first
                raise
            write_json_atomic(self.marker, self.content)


def parts(flags: Sequence[str], runs_per_job: int, cpus: int) -> list[Part]:
    """The sweep cut up. UserError: vision/run.py refuses the flags."""
    outs = _outs(flags)
    out = Path(outs[0] if len(outs) == 1 else os.path.dirname(outs[0])).resolve()
    count = -(-len(outs) // runs_per_job)
    return [
        Part(out, tuple(flags), number, count, tuple(outs[number - 1 :: count]), cpus)
        for number in range(1, count + 1)
    ]


def _outs(flags: Sequence[str]) -> list[str]:
    """The run directories of a sweep."""
    asked = subprocess.run(
        [sys.executable, str(VISION), *flags, "--list"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        problem = child.last_problem(asked.stderr)
        raise child.failure("listing the runs", asked.returncode, problem, f"flags: {shlex.join(flags)}")
    return asked.stdout.splitlines()
