"""The wheels that are carried to a GPU machine."""

import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.errors import UserError

ROOT = Path(__file__).parents[2]
MACHINE = set(
    "cloudpickle colorama contourpy cycler cython filelock fonttools fsspec hf-xet httpx "
    "huggingface-hub jinja2 joblib kiwisolver lxml markupsafe matplotlib mpmath narwhals "
    "networkx numpy packaging pillow portalocker protobuf pyarrow pyparsing python-dateutil "
    "pyyaml regex sacrebleu safetensors scikit-learn scipy sentencepiece setuptools sympy "
    "tabulate threadpoolctl tokenizers torch torchaudio torchvision tqdm transformers typer "
    "typing-extensions".split()
)
"""What the GPU machine has of the packages that ALMA needs."""


@pytest.mark.thorough
def test_a_damaged_wheel_costs_the_others_nothing(benchmark, tmp_path):
    packages = benchmark("gpu.packages")
    for name in ("alpha", "beta", "gamma"):
        info = f"{name}-1.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            file.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr(f"{info}/RECORD", f"{name}.py,,\n")
    (tmp_path / "beta-1-py3-none-any.whl").write_bytes(b"no wheel")
    packages.make(tmp_path / "made")
    wheels = sorted(tmp_path.glob("*.whl"))
    with pytest.raises(UserError, match=r"^beta-1-py3-none-any.whl: "):
        packages.install(tmp_path / "made", wheels)
    code = "import sys, alpha, gamma, pytest, fairseq_alma_hook; print(sys.prefix, pytest.__file__)"
    python = tmp_path / "made/bin/python"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    # pytest is the machine's, of an environment
    assert done.stdout.split() == [str(tmp_path / "made"), pytest.__file__]
    assert not (tmp_path / "made/bin/pip").exists()


def test_what_alma_requires_is_carried_or_on_the_machine(benchmark):
    packages = benchmark("gpu.packages")
    plain = {re.sub(r"[-_.]+", "-", name.lower()) for name in packages.MISSING}
    needed = set()
    names = ["alma-macroscale"]
    while names:
        name = names.pop()
        for line in metadata.requires(name) or ():
            marker = line.partition(";")[2]
            if "extra" in marker and not re.search(
                r"extra == .(corpus|export|text|images|cluster).", marker
            ):
                continue
            other = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0].lower())
            if "extra" in marker and name != "alma-macroscale":
                continue
            if other not in needed and other not in MACHINE and installed(other):
                needed.add(other)
                names.append(other)
    assert needed == plain


def installed(name):
    """Not on Windows only, say."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_the_folder_of_wheels(benchmark, tmp_path, monkeypatch, capsys):
    packages = benchmark("gpu.packages")
    pinned = packages.pins((ROOT / "requirements.txt").read_text())
    assert [pin.split("==")[0] for pin in pinned] == list(packages.MISSING)
    with pytest.raises(UserError, match="no antlr4-python3-runtime, fairseq-fixed, "):
        packages.pins("fairscale==1 ; sys_platform == 'linux'\n")
    original = subprocess.run

    def run(words, **options):
        if "pip" not in words:
            return original(words, **options)
        (tmp_path / f"{words[3]}.whl").write_bytes(bytes(1_000_000))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(packages.subprocess, "run", run)
    (tmp_path / "old.whl").touch()
    packages.carry(tmp_path)
    assert "2 MB of wheels" in capsys.readouterr().out
    assert not (tmp_path / "old.whl").exists()
    monkeypatch.setattr(packages, "CARRIED", 3_000_000)
    with pytest.raises(UserError, match="2 MB of wheels and . MB of files, of 3 MB"):
        packages.carry(tmp_path)
