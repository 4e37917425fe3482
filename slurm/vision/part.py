"""The work of SLURM jobs of image runs: a part of a sweep. It only calls `alma images`."""

import hashlib
import json
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.files import make_directory, patiently_locked, write_json_atomic
from alma.records import Run
from slurm.engine import children
from slurm.engine.jobs import Job
from slurm.engine.submission import LOGS

_IMAGES = (sys.executable, "-m", "alma", "images")


@dataclass(frozen=True, kw_only=True)
class CommandJob(Job):
    """A job that runs a command of ALMA, which skips what is complete and resumes the rest."""

    kind: str = "sweep"
    cpus: int

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """The words of the command."""

    @property
    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the marker says."""

    def work(self) -> None:
        """Run the command, and write the marker."""
        if self.done:
            return
        make_directory(self.marker.parent)
        # A job that SLURM declared dead may still be running.
        with patiently_locked(self.marker.parent, f".{self.marker.stem}.lock"):
            try:
                # The command does not save on a signal, so it just ends; its last checkpoint is
                # at most half a minute old.
                log = self.marker.with_suffix(".log")
                environment = {"OMP_NUM_THREADS": str(self.cpus)}
                children.run(self.command, log, self.name, environment=environment)
            except children.StageFailed:
                time.sleep(2)  # a signal to the whole job may have reached the child before us
                raise
            write_json_atomic(self.marker, self.about)


@dataclass(frozen=True, kw_only=True)
class PartJob(CommandJob):
    """One element of the array: every N-th run of the sweep, for N parts."""

    flags: tuple[str, ...]
    part: str  # K/N, the value of --part
    runs: tuple[str, ...]  # its run directories, as `alma images --list` names them

    @property
    def command(self) -> list[str]:
        return [*_IMAGES, *self.flags, "--part", self.part, "--jobs", str(self.cpus)]

    @property
    def about(self) -> dict[str, Any]:
        return {"flags": self.flags, "runs": self.runs}

    @property
    def done(self) -> bool:
        """Whether its marker is there, and all its runs: their folders may have been removed."""
        return self.marker.exists() and all(_is_complete(Path(run)) for run in self.runs)

    def remove_stale_marker(self) -> None:
        """Remove the marker if a run is missing, so that the queue does not count it as done."""
        if not self.done:
            self.marker.unlink(missing_ok=True)


def _is_complete(run: Path) -> bool:
    """Whether a run has a row for each of its mega-batches."""
    if not (run / "run.json").exists():
        return False
    record = Run.read(run)
    rows = record.rows_as_written
    return bool(rows) and rows[-1]["t"] == record.config["megabatches"]


def parts(flags: Sequence[str], runs_per_job: int, cpus: int) -> list[PartJob]:
    """Split a sweep into parts. Raises UserError if `alma images` refuses the flags."""
    outs = children.ask([*_IMAGES, *flags, "--list"], "listing the runs").splitlines()
    experiments = [Path(flag) for flag in flags if flag.endswith(".yaml")]
    periods = ""
    if experiments or any(flag.partition("=")[0] == "--by" for flag in flags):
        periods = children.ask([*_IMAGES, *flags, "--list-periods"], "listing the periods")
    out = Path(outs[0] if len(outs) == 1 else os.path.dirname(outs[0])).resolve()
    count = -(-len(outs) // runs_per_job)
    files = [path for one in experiments for path in (one, *one.parent.glob("sizes.yaml"))]
    settings = [flag for flag in flags if flag != "--append"]
    content = json.dumps([*settings, *outs, *(path.read_text() for path in files), periods])
    # With other flags, a changed experiment file or new periods, markers have other names.
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return [
        PartJob(
            run=out,
            name=f"part {number} of {count}",
            array="alma-sweep",
            directory=out,
            marker=out / LOGS / f"part_{number}_of_{count}_{digest}.json",
            flags=tuple(flags),
            part=f"{number}/{count}",
            runs=tuple(outs[number - 1 :: count]),
            cpus=cpus,
        )
        for number in range(1, count + 1)
    ]
