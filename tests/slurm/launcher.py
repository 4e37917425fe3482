"""`python -m slurm.launch` over fake children (tests/slurm/fake), shared by several tests."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.errors import UserError
from alma.records import Run
from alma.stream import VERSION, FileInfo, Part, Stream
from slurm.launch import main
from slurm.lm import request
from slurm.lm.plan import Request
from tests.machine_fields import without_machine_fields

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/slurm/fake"
SMALL = ("--arch", "switch_gmoe_tiny")  # small checkpoints
FLAGS = (*SMALL, "--max-update", "2")
ESTIMATE = 3  # lines on stderr before a run: "checking the flags", table of 2 lines


@dataclass
class Launcher:
    """Starts `python -m slurm.launch` in its own folder, with a `stream` of 4 mega-batches."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    data: str = "stream"
    learner: str = "sm"
    run_name: str = "run"

    def start(self, *words: str, flags: tuple[str, ...] = FLAGS) -> subprocess.Popen:
        return self.start_words(
            self.data, "--learner", self.learner, "--out", "run", *words, "--", *flags
        )

    def start_words(
        self, *words: str, program: Sequence[str] = ("-m", "slurm.launch"), **options
    ) -> subprocess.Popen:
        """`options`: of Popen."""
        return subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=self.folder,
            env=os.environ | self._added,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
        )

    @property
    def _added(self) -> dict[str, str]:
        path = os.pathsep.join((str(FAKE), str(ROOT)))
        return {**self.environment, "PYTHONPATH": path, "FAKE_PIDS": str(self.pids)}

    def run(self, *words: str, code: int = 0, flags: tuple[str, ...] = FLAGS) -> tuple[str, str]:
        """Launch in this process, and check the exit code; return stdout and stderr."""
        words = (self.data, "--learner", self.learner, "--out", "run", *words, "--", *flags)
        return self.run_words(*words, code=code)

    def run_words(self, *words: str, code: int = 0) -> tuple[str, str]:
        """`run` with the whole command line."""
        out = io.StringIO()
        err = io.StringIO()
        before = dict(os.environ)
        os.environ.update(self._added)
        try:
            with (
                contextlib.chdir(self.folder),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.MonkeyPatch.context() as patch,
            ):
                patch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
                exit_code = call(main, patch, *words)
        finally:
            os.environ.clear()
            os.environ.update(before)
        assert exit_code == code, err.getvalue()
        return out.getvalue(), err.getvalue()

    @property
    def pids(self) -> Path:
        """File with the process ids of all fake trainings, one per line."""
        return self.folder / "pids"

    @property
    def out(self) -> Path:
        return self.folder / self.run_name

    @property
    def rows(self) -> list[dict]:
        return without_machine_fields(Run.read(self.out).rows)


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 60) -> tuple[str, str]:
    """Wait for a process and check its exit code; return stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, err
    return out, err


def make(folder: Path, **settings) -> Launcher:
    (folder / "stream").mkdir(parents=True)
    write_stream(folder / "stream", 4)
    return Launcher(folder, **settings)


def write_stream(folder: Path, megabatches: int, dictionary: str = "d") -> None:
    """Write stream.json of distinct mega-batches."""
    names = ["valid", "test", *(f"megabatch_{k:02d}" for k in range(megabatches))]
    parts = []
    for name in names:
        parts.append(Part(name, name, 1, 1, 1, 1, 1, {}, {f"{name}.bin": FileInfo(1, name)}))
    files = {"dict.txt": FileInfo(1, dictionary)}
    Stream(folder, VERSION, 0, 10, tuple(parts[2:]), parts[0], parts[1], {}, files).write()


def fake_check() -> SimpleNamespace:
    """The stand-in of fairseq_alma.check."""
    return SimpleNamespace(**runpy.run_path(str(FAKE / "fairseq_alma/check.py")))


def read_requests(words: Sequence[str]) -> list[Request]:
    """Requests with settings from the stand-in of fairseq. Raises UserError for refused flags."""
    fake = fake_check()

    def resolve(lines: Sequence[Sequence[str]]) -> list[dict]:
        try:
            resolved = [fake.resolve(list(line)) for line in lines]
        except fake.Refused as refused:
            raise UserError(str(refused)) from None
        return [answer["settings"] | {"--arch": answer["arch"]} for answer in resolved]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "resolve", resolve)
        return request.resolved(request.read_requests(words))


def call(main: Callable[[], None], monkeypatch, *words: object) -> int:
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def refused(main: Callable[[], None], monkeypatch, capsys, *words: object) -> str:
    """The one line of a command that ends with code 2."""
    assert call(main, monkeypatch, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ended(pid: int) -> bool:
    """Whether a process has ended; it may be a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
