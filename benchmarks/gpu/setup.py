"""Step `setup`: a virtual environment that sees the machine's packages, with ALMA and carried wheels.

Runs with the machine's Python before anything is installed, so it imports no package. That Python may itself
be of a virtual environment, which --system-site-packages would not show: a .pth file does.
"""

import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from alma.errors import UserError
from benchmarks.gpu.frame import ROOT, Asked, Case, Row
from benchmarks.gpu.wheels import do, wheels_of

LOOK = """
import torch, fairseq_cli.train, fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast
from fairseq.models import ARCH_MODEL_REGISTRY
assert "switch_gmoe" in ARCH_MODEL_REGISTRY, "the environment has no fairseq_alma.pth"
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print("torch", torch.__version__, "CUDA", torch.version.cuda, *gpus, torch.__file__)
"""


def cases(asked: Asked) -> Iterator[Case]:
    """Make the environment, install into it, import. UserError: no folders are given."""
    if not (asked.wheels and asked.environment):
        raise UserError("setup needs --wheels FOLDER and --environment FOLDER")
    found, python = wheels_of(asked.wheels), str(asked.environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps"]
    yield {"what": "environment"}, partial(make, asked.environment)
    yield {"what": f"{len(found)} wheels"}, partial(do, [*install, *map(str, found)])
    yield {"what": "ALMA"}, partial(do, [*install, "--no-build-isolation", "--editable", str(ROOT)])
    yield {"what": "pip check"}, partial(do, [*pip, "check"])
    yield {"what": "import"}, partial(do, [python, "-W", "ignore", "-c", LOOK])


def make(environment: Path) -> Row:
    """An environment without pip: the machine may lack ensurepip, and its own pip can install elsewhere."""
    row = do([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    packages = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (inside,) = environment.glob("lib/python*/site-packages")
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in packages)
    (inside / "machine.pth").write_text(lines)
    return row
