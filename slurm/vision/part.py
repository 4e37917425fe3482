"""A part of a sweep of image runs, the work of one SLURM job. It only calls `alma images`."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alma.files import make_directory, patiently_locked, write_json_atomic
from slurm.engine import children
from slurm.engine.jobs import Job
from slurm.engine.submission import LOGS

_IMAGES = (sys.executable, "-m", "alma", "images")


@dataclass(frozen=True, kw_only=True)
class PartJob(Job):
    """One element of the array: every N-th run of the sweep, for N parts."""

    flags: tuple[str, ...]
    part: str  # K/N, the value of --part
    runs: tuple[str, ...]  # its run directories, as `alma images --list` names them
    cpus: int

    def work(self) -> None:
        """Run `alma images`, which skips complete runs and resumes others."""
        if self.done:
            return
        words = [*self.flags, "--part", self.part, "--jobs", str(self.cpus)]
        make_directory(self.marker.parent)
        # A job that SLURM declared dead may still be running.
        with patiently_locked(self.marker.parent, f".{self.marker.stem}.lock"):
            try:
                # `alma images` does not save on a signal, so it just ends; its last checkpoint is
                # at most half a minute old.
                log = self.marker.with_suffix(".log")
                environment = {"OMP_NUM_THREADS": str(self.cpus)}
                children.run([*_IMAGES, *words], log, self.name, environment=environment)
            except children.StageFailed:
                time.sleep(2)  # a signal to the whole job may have reached the child before us
                raise
            write_json_atomic(self.marker, {"flags": self.flags, "runs": self.runs})


def parts(flags: Sequence[str], runs_per_job: int, cpus: int) -> list[PartJob]:
    """Split a sweep into parts. Raises UserError if `alma images` refuses the flags."""
    outs = children.ask([*_IMAGES, *flags, "--list"], "listing the runs").splitlines()
    out = Path(outs[0] if len(outs) == 1 else os.path.dirname(outs[0])).resolve()
    count = -(-len(outs) // runs_per_job)
    experiments = [Path(flag) for flag in flags if flag.endswith(".yaml")]
    files = [path for one in experiments for path in (one, *one.parent.glob("sizes.yaml"))]
    content = json.dumps([*flags, *outs, *(path.read_text() for path in files)])
    # With other flags, or a changed experiment file, markers have other names.
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return [
        PartJob(
            run=out,
            name=f"part {number} of {count}",
            kind="sweep",
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
