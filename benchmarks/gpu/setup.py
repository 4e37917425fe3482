"""Step `setup`: a virtual environment that sees the machine's packages, with ALMA and carried wheels.

Runs with the machine's own Python before anything is installed, so it imports no package. The machine's Python
may itself be of a virtual environment, which --system-site-packages would not show: a .pth file does.
"""

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from alma.errors import UserError
from benchmarks.gpu.frame import ROOT, Asked, Case, Row
from benchmarks.gpu.wheels import wheels_of

LOOK = """
import json, torch, fairseq_cli.train, fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast
from fairseq.models import ARCH_MODEL_REGISTRY
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "CUDA": str(torch.version.cuda), "GPUs": ", ".join(gpus),
    "from": torch.__file__, "switch_gmoe": "switch_gmoe" in ARCH_MODEL_REGISTRY}))
"""


def cases(asked: Asked) -> Iterator[Case]:
    """Make the environment, install into it, import."""
    assert asked.wheels and asked.environment
    found, python = wheels_of(asked.wheels), asked.environment / "bin/python"
    yield {"what": "environment"}, lambda: make(asked.environment)
    yield {"what": f"{len(found)} wheels"}, lambda: install(python, *map(str, found))
    yield {"what": "ALMA"}, lambda: install(python, "--no-build-isolation", "--editable", str(ROOT))
    yield (
        {"what": "pip check"},
        lambda: done([sys.executable, "-m", "pip", "--python", str(python), "check"])[0],
    )
    yield {"what": "import"}, lambda: imported(python)


def make(environment: Path) -> Row:
    """An environment without pip: the machine may lack ensurepip, and its own pip can install elsewhere."""
    figures, _ = done([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in packages)
    (environment / "lib" / version / "site-packages" / "machine.pth").write_text(lines)
    return figures


def install(python: Path, *what: str) -> Row:
    """By the machine's pip, offline; what the machine has stays as it is."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    return done([*pip, *what])[0]


def imported(python: Path) -> Row:
    """What a new process of the environment finds. UserError: the plug-in is not registered."""
    figures, output = done([str(python), "-W", "ignore", "-c", LOOK])
    found = json.loads(output.splitlines()[-1])
    if not found.pop("switch_gmoe"):
        raise UserError("fairseq does not know switch_gmoe: fairseq_alma.pth is not in the environment")
    return figures | found


def done(words: list[str]) -> tuple[Row, str]:
    """The seconds of a command, and its output. UserError: it failed."""
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise UserError(f"{' '.join(words[:6])}: {(ended.stderr or ended.stdout).strip()[-250:]}")
    return {"seconds": time.monotonic() - started}, ended.stdout
