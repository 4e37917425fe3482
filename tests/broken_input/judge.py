"""Runs a command in a forked child with limits, and judges how it ended."""

import gc
import hashlib
import importlib
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alma.__main__ import TOOLS

MEMORY_BYTES = 1 << 29  # of a child, beyond what the parent has
FILE_BYTES = 1 << 28  # of the largest file that a child may write
SECONDS = 90
MARKER = "executed"
"""Name of the folder, beside the working folder, that executed input makes."""
_MODULES = {name: tool.module for name, tool in TOOLS.items()}
_MODULES |= {name: f"fairseq_alma.{name}" for name in ("evaluate", "reshard", "check")}
_MODULES |= {"fairseq-train": "fairseq_cli.train", "fairseq-eval-lm": "fairseq_cli.eval_lm"}
_WARNING = re.compile(r"^.*\b\w*Warning: .*$", re.MULTILINE)
_LINES = 60  # of output of a refused command; fairseq prints its settings, one line


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (minus a signal's number), what it printed, seconds."""

    code: int
    out: str
    err: str
    seconds: float


def preload(commands: Sequence[str]) -> None:
    """Import the modules of the commands, so that children start with them."""
    for name in dict.fromkeys(commands):
        importlib.import_module(_MODULES[name])
    if {"fairseq-train", "fairseq-eval-lm", "evaluate", "export", "train"} & set(commands):
        import torch._dynamo  # noqa: F401  as every optimizer does: seconds

        for name in ("fairseq_cli.train", "fairseq_alma.stage_record", "fairseq_alma.hugging_face"):
            importlib.import_module(name)
    if "data" in commands:
        import data_prep.pipeline  # noqa: F401
    if {"images", "tsne"} & set(commands):
        for name in ("vision.data", "vision.experiment", "torchvision.datasets", "sklearn.datasets"):
            importlib.import_module(name)
    gc.freeze()


def main_of(words: Sequence[str]) -> Callable[[], object]:
    """The function that runs a command line; sets sys.argv."""
    name, *rest = words
    sys.argv = [f"alma {name}" if name in TOOLS else name, *rest]
    module = importlib.import_module(_MODULES[name])
    ours = not name.startswith("fairseq-")
    logging.basicConfig(level="WARNING" if ours else "INFO", stream=sys.stdout, force=True)
    if not ours:
        return module.cli_main
    if name == "train":
        from fairseq_alma.check import resolve
        from slurm.engine import children
        from slurm.lm import request

        # In place of two other processes that import fairseq: the same functions here.
        request.resolve = lambda lines: [  # type: ignore[assignment]
            (found := resolve(list(line)))["settings"] | {"--arch": found["arch"]} for line in lines
        ]
        children.run = _forked_child  # type: ignore[assignment]
    return module.main


def _forked_child(command, log, what, watch=None, environment=None) -> None:
    """`children.run` by a fork of this process."""
    from slurm.engine import children

    name = {"fairseq_cli.train": "fairseq-train"}.get(command[2], command[2].rpartition(".")[2])
    ended = run(lambda: main_of([name, *command[3:]])(), Path.cwd(), log.with_suffix(".tmp"))
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"\n$ {command}\n{ended.out}{ended.err}")
    if ended.code:
        problem = children.last_problem(ended.out + ended.err)
        raise children.failure(what, ended.code, problem, f"log: {log}")


def run(
    function: Callable[[], object], folder: Path, log: Path, stdin: str = os.devnull, limited: bool = True
) -> Ended:
    """Call `function` in a forked child, in `folder`; its output goes to LOG.out and LOG.err for a while."""
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    files = [Path(f"{log}.out"), Path(f"{log}.err")]
    pid = os.fork()
    if not pid:
        _child(function, folder, files, stdin, limited)
    status = None
    while status is None:
        done, status_now = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(status_now)
        elif time.monotonic() - began > SECONDS:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            status = -signal.SIGALRM
        else:
            time.sleep(0.005)
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    for file in files:
        file.unlink()
    return Ended(status, texts[0], texts[1], time.monotonic() - began)


def _child(
    function: Callable[[], object], folder: Path, files: list[Path], stdin: str, limited: bool
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        for number, place in enumerate((Path(stdin), *files)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY
            os.dup2(os.open(place, flags), number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        temporary = folder.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"  # programs of SLURM that only answer
        if limited:
            _limit()
        function()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    room = pages * resource.getpagesize() + MEMORY_BYTES
    _, limit = resource.getrlimit(resource.RLIMIT_DATA)  # of a child of a child: that of the child
    if limit == resource.RLIM_INFINITY or room < limit:
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def hashes(folder: Path) -> dict[str, str]:
    """Of all files below `folder`, by relative path; links by their target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def problem(
    ended: Ended, sound: Ended, names: Sequence[str], codes: Sequence[int], several: bool
) -> str | None:
    """What is wrong with how a command ended; None: nothing.

    An error must be one line `error: ...` on stderr with one of `names`. `several`: lines on stdout may come
    before it. `codes`: further exit codes that are right. `sound`: the end of the undamaged case.
    """
    text = ended.out + ended.err
    if "Traceback (most recent call last)" in text:
        return "traceback: " + next((each for each in reversed(text.splitlines()) if each.strip()), "")
    new = set(_WARNING.findall(text)) - set(_WARNING.findall(sound.out + sound.err))
    if new and ended.code != 2:
        return f"warning: {min(new).strip()}"
    if ended.code == -signal.SIGALRM:
        return f"no end after {SECONDS} s"
    if ended.code in (0, *codes):
        return None
    if ended.code != 2:
        last = next((each for each in reversed(text.splitlines()) if each.strip()), "")
        return f"exit code {ended.code}: {last}"
    errors = [each for each in text.splitlines() if each.startswith("error: ")]
    if len(errors) != 1 or ended.err.splitlines()[-1:] != errors:
        return f"{len(errors)} lines of errors: {ended.err[-300:]!r}"
    if not several and len(text.splitlines()) > _LINES + len(sound.out.splitlines()):
        return f"{len(text.splitlines())} lines of output"
    if new:
        return f"warning: {min(new).strip()}"
    if not any(name in (text if several else errors[0]) for name in names):
        return f"does not name {' or '.join(names)}: {errors[0]}"
    return None
