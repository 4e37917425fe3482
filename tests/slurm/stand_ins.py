"""Stand-ins for programs of SLURM, and jobs.json of a made-up run."""

import os
import pwd
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alma.files import write_json_atomic
from slurm.engine import queue

STUB = """#!/bin/sh
f="{folder}/${{0##*/}}"
echo "${{0##*/}} $*" >> {folder}/calls
if [ -e "$f.err" ]; then /bin/cat "$f.err" >&2; exit 1; fi
/bin/cat "$f.out"
"""


@dataclass
class Slurm:
    """Programs on PATH with prepared output, which record their command lines."""

    folder: Path

    def has(self, **programs: str) -> None:
        """Set the output of programs; a job of squeue is
        `id|state|node|restarts|reason|dependency`."""
        for name, text in programs.items():
            if name == "squeue":
                text = "".join(map(owned, text.splitlines()))
            self.put(f"{name}.out", text)
            (self.folder / f"{name}.err").unlink(missing_ok=True)
            if not (self.folder / name).exists():
                self.put(name, STUB.format(folder=self.folder))

    def fails(self, **programs: str) -> None:
        """Set the error message of programs, which exit with 1."""
        self.has(**dict.fromkeys(programs, ""))
        for name, text in programs.items():
            self.put(f"{name}.err", text + "\n")

    def put(self, name: str, text: str) -> None:
        """Write a file at once, because programs are running."""
        temporary = self.folder / f"{name}.new"
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(self.folder / name)

    def calls(self, name: str) -> list[list[str]]:
        """Arguments of each call of a program."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1:] for line in lines if line.split()[0] == name]


def owned(line: str) -> str:
    """A line of squeue with user, name and script, if it has none."""
    cells = [*line.split("|"), "", "", ""]
    if cells[7]:
        return f"{line}\n"
    return "|".join([*cells[:6], pwd.getpwuid(os.getuid()).pw_name, "alma-test", ""]) + "\n"


RUNNING = "".join(f"{job}|RUNNING|n1|0|None|\n" for job in "5 7_0 7_1 20 8_0 8_1 21".split())
"""Output of squeue while all jobs of the fixture `run` run."""


def entry(name: str, marker: str, job: str | None, *needs: str, **changes: object) -> dict:
    """A job of jobs.json; `needs` are markers."""
    kind = {"untrained.json": "untrained", "result.json": "evaluate"}.get(
        Path(marker).name, "train"
    )
    record = {"name": name, "kind": kind, "marker": marker, "job": job, "needs": needs}
    record["updates"] = 400 if kind == "train" else None
    return record | {"log": job and f"{os.getcwd()}/jobs/{job}.out"} | changes


def write(run: Path, *entries: dict) -> None:
    """Write jobs.json, and make the folders of its jobs and of SLURM's logs."""
    Path("jobs").mkdir(exist_ok=True)
    for job in entries:
        (run / job["marker"]).parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(run / queue.JOBS, {"jobs": entries})


@contextmanager
def later(change: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Within the block, `change(*arguments)` comes after .3 s."""
    timer = threading.Timer(0.3, change, arguments)
    timer.start()
    yield
    timer.join()


def finish(run: Path, *markers: str) -> None:
    """Write markers, with the measurement of an evaluation."""
    for marker in markers:
        (run / marker).write_text('{"perplexity": 118.574}')


def finish_all(run: Path) -> None:
    for job in queue.read_jobs(run):
        finish(job.run, str(job.marker.relative_to(run)))


def states(run: Path) -> dict[str, str]:
    return {status.job.name: status.state for status in queue.look([run])}
