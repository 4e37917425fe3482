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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from alma.__main__ import TOOLS
from tests.child import run_and_exit

MEMORY_BYTES = 1 << 29  # of a child, beyond what the parent has
FILE_BYTES = 1 << 28  # of the largest file that a child may write
SECONDS = 300
_MODULES = {name: tool.module for name, tool in TOOLS.items()}
_MODULES |= {name: f"fairseq_alma.{name}" for name in ("evaluate", "reshard", "check")}
_MODULES |= {"fairseq-train": "fairseq_cli.train", "fairseq-eval-lm": "fairseq_cli.eval_lm"}
_MODULES |= {f"fairseq-{name}": f"fairseq_cli.{name}" for name in ("generate", "interactive")}
_FAIRSEQ = (
    "torch._dynamo",
    "fairseq_cli.train",
    "fairseq_alma.stage_record",
    "fairseq_alma.hugging_face",
)
_VISION = ("vision.data", "vision.experiment", "torchvision.datasets", "sklearn.datasets")
_LATE = dict.fromkeys(("fairseq-train", "fairseq-eval-lm", "evaluate", "export"), _FAIRSEQ)
_LATE["export"] += ("fairseq_alma.export",)
_LATE |= {"data": ("data_prep.pipeline",), "images": _VISION, "tsne": _VISION}
"""Modules that a command imports late."""
_WARNING = re.compile(r"^.*\b\w*Warning: .*$", re.MULTILINE)
_LINES = 60  # of output of a refused command; fairseq prints its settings, one line


class Ended(NamedTuple):
    """How a child ended: exit code (minus a signal's number), and what it printed."""

    code: int
    out: str = ""
    err: str = ""


def preload(commands: Sequence[str]) -> None:
    """Import the modules of the commands, so that children start with them."""
    for name in dict.fromkeys(commands):
        for module in (_MODULES[name], *_LATE.get(name, ())):
            importlib.import_module(module)
    gc.freeze()


def main_of(words: Sequence[str]) -> Callable[[], object]:
    """The function that runs a command line; sets sys.argv."""
    name, *arguments = words
    sys.argv = [f"alma {name}" if name in TOOLS else name, *arguments]
    module = importlib.import_module(_MODULES[name])
    is_alma = not name.startswith("fairseq-")
    logging.basicConfig(level="WARNING" if is_alma else "INFO", stream=sys.stdout, force=True)
    return module.main if is_alma else module.cli_main


def run(
    function: Callable[[], object],
    folder: Path,
    log: Path,
    stdin: str = os.devnull,
    limited: bool = True,
) -> Ended:
    """Call `function` in a forked child, in `folder`;
    its output goes to LOG.out and LOG.err for a while."""

    def inside() -> None:
        os.chdir(folder)
        temporary = folder.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        os.environ["PATH"] = (
            f"{folder}/bin:{os.environ['PATH']}"  # programs of SLURM that only answer
        )
        if limited:
            _limit()
        function()

    sys.stdout.flush()
    sys.stderr.flush()
    files = [Path(f"{log}.out"), Path(f"{log}.err")]
    if not (pid := os.fork()):
        run_and_exit(inside, *files, stdin)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    for file in files:
        file.unlink()
    return Ended(code, *texts)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    room = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)  # ends the process


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of all files below `folder`, by relative path; links by their target."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            digests[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            digests[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def problem(
    ended: Ended, sound: Ended, names: Sequence[str], codes: Sequence[int], several: bool
) -> str:
    """What is wrong with how a command ended; "": nothing.

    An error must be one line `error: ...` on stderr with one of `names`. `several`: lines on stdout
    may come before it. `codes`: further exit codes that are right. `sound`: the end of the
    undamaged case.
    """
    text = ended.out + ended.err
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if "Traceback (most recent call last)" in text:
        return f"traceback: {last}"
    if new := set(_WARNING.findall(text)) - set(_WARNING.findall(sound.out + sound.err)):
        return f"warning: {min(new).strip()}"
    if ended.code == -signal.SIGALRM:
        return f"no end after {SECONDS} s"
    if ended.code in (0, *codes):
        return ""
    if ended.code != 2:
        return f"exit code {ended.code}: {last}"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or ended.err.splitlines()[-1:] != errors:
        return f"{len(errors)} lines of errors: {ended.err[-300:]!r}"
    if not several and len(text.splitlines()) > _LINES + len(sound.out.splitlines()):
        return f"{len(text.splitlines())} lines of output"
    if not any(name in (text if several else errors[0]) for name in names):
        return f"does not name {' or '.join(names)}: {errors[0]}"
    return ""
