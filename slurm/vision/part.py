"""A part of a sweep of image runs, the work of one SLURM job. It only calls vision/run.py."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alma.files import make_directory, patiently_locked, sha256_file, write_json_atomic
from slurm.engine import children
from slurm.engine.jobs import Job
from slurm.engine.submission import LOGS

VISION = Path(__file__).resolve().parents[2] / "vision" / "run.py"
_SIGNAL_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class PartJob(Job):
    """One element of the array: every N-th run of the sweep, for N parts."""

    flags: tuple[str, ...]
    part: str
    """K/N, the value of --part."""
    runs: tuple[str, ...]
    """Its run directories, as vision/run.py names them."""
    cpus: int
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the experiment among the flags, and of its sizes."""

    @property
    def content(self) -> dict[str, Any]:
        files = {"files": self.files} if self.files else {}
        return {"flags": list(self.flags), "runs": list(self.runs), **files}

    @property
    def done(self) -> bool:
        """Whether the marker exists, with the same runs and flags."""
        try:
            return json.loads(self.marker.read_bytes()) == self.content
        except (OSError, ValueError):
            return False

    def work(self) -> None:
        """Run vision/run.py, which skips complete runs and resumes others."""
        if self.done:
            return
        words = [*self.flags, "--part", self.part, "--jobs", str(self.cpus)]
        make_directory(self.marker.parent)
        # A job that SLURM declared dead may still be running.
        with patiently_locked(self.marker.parent, f".{self.marker.stem}.lock"):
            try:
                # The signal of `children.save` only ends it: its checkpoints are at most half a minute old.
                children.run(
                    [sys.executable, str(VISION), *words],
                    self.marker.with_suffix(".log"),
                    self.name,
                    environment={"OMP_NUM_THREADS": str(self.cpus)},
                )
            except children.StageFailed:
                time.sleep(_SIGNAL_SECONDS)  # a signal to the whole job may have reached the child first
                raise
            write_json_atomic(self.marker, self.content)


def parts(flags: Sequence[str], runs_per_job: int, cpus: int) -> list[PartJob]:
    """Split a sweep into parts. Raises UserError if vision/run.py refuses the flags."""
    outs = children.ask([sys.executable, str(VISION), *flags, "--list"], "listing the runs").splitlines()
    out = Path(outs[0] if len(outs) == 1 else os.path.dirname(outs[0])).resolve()
    count = -(-len(outs) // runs_per_job)
    experiments = [Path(flag) for flag in flags if flag.endswith(".yaml")]
    settings = [path for one in experiments for path in (one, *one.parent.glob("sizes.yaml"))]
    files = {str(path): sha256_file(path) for path in settings}
    return [
        PartJob(
            run=out,
            name=f"part {number} of {count}",
            kind="sweep",
            array="alma-sweep",
            directory=out,
            marker=out / LOGS / f"part_{number}_of_{count}.json",
            flags=tuple(flags),
            part=f"{number}/{count}",
            runs=tuple(outs[number - 1 :: count]),
            cpus=cpus,
            files=files,
        )
        for number in range(1, count + 1)
    ]
