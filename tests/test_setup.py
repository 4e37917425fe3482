"""Installation: importing fairseq registers the plug-in; no file names a registry or a machine."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PTH = "fairseq_alma.pth"

FAIRSEQ = {
    "fairseq/__init__.py": "from fairseq import tasks\nCOMPLETE = True\n",
    "fairseq/tasks.py": "import fairseq.options\nREGISTRY = []\n",
    "fairseq/options.py": "",
    "fairseq_alma/__init__.py": (ROOT / "fairseq_alma" / "__init__.py").read_text(),
    "fairseq_alma/plugin.py": "import fairseq\nfairseq.tasks.REGISTRY.append(fairseq.COMPLETE)\n",
    "fairseq_alma/command.py": "import sys\nassert 'fairseq' not in sys.modules\nimport fairseq\n"
    "assert fairseq.tasks.REGISTRY == [True]\n",
}
"""A minimal fairseq: like the real one, it imports options before its task registry is complete."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the packaged files, so that builds do not write to the tree."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    for path in ROOT.iterdir():
        if (path / "__init__.py").exists() and path.name not in {"tests", "benchmarks"}:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.suffix in {".py", ".pth", ".toml"} or path.name in {"LICENSE", "README.md"}:
            shutil.copy2(path, folder)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages directory with the hook and the minimal fairseq,
    used by every `python(…, site)`."""
    for name in (PTH, "fairseq_alma_hook.py"):
        shutil.copy2(ROOT / name, tmp_path)
    for name, text in FAIRSEQ.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(tmp_path)!r})\n")
    return tmp_path


def python(code: str, site: Path | None = None, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python; modules in `site` come first."""
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    command = [sys.executable, *options, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)


def check(code: str, site: Path | None = None) -> None:
    """Assert that `code` succeeds without a message."""
    done = python(code, site)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_wheel_holds_packages_hook_and_pth(kind: str, source: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (archive,) = map(zipfile.ZipFile, tmp_path.glob("*.whl"))
    assert PTH in archive.namelist()
    if kind == "wheel":
        packages = [path.parent for path in source.glob("*/__init__.py")]
        modules = {
            str(path.relative_to(source)) for package in packages for path in package.rglob("*.py")
        }
        assert {"alma", "data_prep", "fairseq_alma"} <= {package.name for package in packages}
        assert not {*modules, "fairseq_alma_hook.py", "experiments/index.yaml"} - set(
            archive.namelist()
        )
        (scripts,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "alma = alma.__main__:main" in archive.read(scripts).decode().splitlines()


@pytest.mark.parametrize(
    "statement",
    [
        "import fairseq.options",
        "import fairseq_alma",
        "from fairseq import tasks; import fairseq_alma",
    ],
)
def test_plugin_is_registered_once_after_fairseq_is_complete(statement: str, site: Path) -> None:
    check(f"{statement}; import fairseq; assert fairseq.tasks.REGISTRY == [True]", site)


def test_command_registers_the_plugin_when_it_imports_fairseq(site: Path) -> None:
    command = [sys.executable, "-m", "fairseq_alma.command"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_finder_stays_until_the_first_import(site: Path) -> None:
    """Finding the spec of fairseq does not disarm it."""
    waiting = "[f for f in sys.meta_path if type(f).__module__ == 'fairseq_alma_hook']"
    check(
        "import importlib.util, sys; importlib.util.find_spec('fairseq')\n"
        "assert 'fairseq' not in sys.modules\n"
        f"assert len({waiting}) == 1\n"
        f"import fairseq; assert not {waiting} and fairseq.tasks.REGISTRY == [True]",
        site,
    )


def test_broken_plugin_raises(site: Path) -> None:
    (site / "fairseq_alma" / "plugin.py").write_text("import no_such_module\n")
    done = python("import fairseq.options", site)
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_pth_without_its_module_is_silent(site: Path) -> None:
    (site / "fairseq_alma_hook.py").unlink()
    done = python(f"import site; site.addsitedir({str(site)!r})", site, "-S", "-I")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_hook_does_no_harm_without_fairseq(site: Path) -> None:
    shutil.rmtree(site / "fairseq")
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import importlib.util, json\n"
        "assert importlib.util.find_spec('fairseq') is None\n"
        "try:\n import fairseq\n"
        "except ModuleNotFoundError as error: assert error.name == 'fairseq'\n"
        "else: raise SystemExit('fairseq is there')"
    )
    done = python(code, site, "-S", "-I")
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_without_fairseq_import_only_the_hook() -> None:
    before = python("import sys; print(*sorted(sys.modules))").stdout.split()
    assert "fairseq_alma_hook" in before, "not installed with its .pth; run `make`"
    assert not {"torch", "numpy", "fairseq", "fairseq_alma", "alma"} & set(before)


def test_importing_fairseq_replaces_nothing_and_a_command_installs_the_hooks_once(tmp_path) -> None:
    """Handlers of signals only for our task: they would keep another training from ending.
    --user-dir names task and arch too; without it: tests/test_chain.py."""
    words = (
        f"{tmp_path} --user-dir {ROOT}/fairseq_alma --task alma_lm --arch switch_gmoe --cpu "
        "--max-tokens 512"
    )
    done = python(
        "import signal, sys, fairseq, fairseq.trainer\n"
        "from fairseq import checkpoint_utils, models, options, tasks\n"
        "from fairseq.distributed import utils as distributed\n"
        "assert 'alma_lm' in tasks.TASK_REGISTRY and 'switch_gmoe' in models.ARCH_MODEL_REGISTRY\n"
        "assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL\n"
        "original = checkpoint_utils.load_checkpoint\n"
        "for function in (options.parse_args_and_arch, original, distributed.call_main):\n"
        "    assert function.__code__.co_filename.startswith(fairseq.__path__[0]), function\n"
        "for _ in range(2):\n"
        "    options.get_eval_lm_parser()\n"
        "    assert checkpoint_utils.load_checkpoint.__wrapped__ is original\n"
        "for task in ('language_modeling', 'alma_lm'):\n"
        "    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL\n"
        "    words = ['data', '--task', task, '--path', 'x']\n"
        "    options.parse_args_and_arch(options.get_eval_lm_parser(), words)\n"
        "assert callable(signal.getsignal(signal.SIGUSR2))\n"
        "from fairseq_cli import train\n"
        f"sys.argv[1:] = {words.split()}\n"
        "train.cli_main()"
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}")
    assert "Traceback" not in done.stderr


def test_no_file_names_a_registry_or_a_path_of_a_machine() -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*git, "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    hosts = ["py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org"]
    pattern = re.compile("|".join(map(re.escape, hosts)) + r"|(?<![\w./-])/(root|work)" + "/")
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {path: path.read_text("utf-8", errors="ignore") for path in tracked if path.is_file()}
    assert [str(path) for path, text in texts.items() if pattern.search(text)] == []


def test_requirements_are_pinned_and_name_no_host() -> None:
    text = (ROOT / "requirements.txt").read_text()
    assert "://" not in text
    pins = re.sub(r" *\\\n *", " ", text).splitlines()[2:]
    form = re.compile(r"[\w.-]+==[\w.]+( ; [^\\]+?)?( --hash=sha256:[0-9a-f]{64})+")
    assert [line for line in pins if not form.fullmatch(line)] == []
    assert len(pins) > 100


def test_make_joins_the_lines_of_a_package_and_drops_hashes_for_another_torch(
    tmp_path: Path,
) -> None:
    def pins(*words: str) -> list[str]:
        (tmp_path / "print.mk").write_text(f"include {ROOT}/Makefile\nprint:\n\t@$(PINS)\n")
        command = [
            "make",
            "--silent",
            "-f",
            tmp_path / "print.mk",
            "print",
            f"VENV={tmp_path}",
            *words,
        ]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    lines = [line for line in pins() if not line.startswith("#")]
    assert all(" --hash=sha256:" in line for line in lines)
    lines_of_torch = [line for line in pins("TORCH=2.7.1") if not line.startswith("#")]
    assert "torch==2.7.1" in lines_of_torch
    assert not [line for line in lines_of_torch if "hash" in line or line.startswith("nvidia")]
    same = {line.partition(" --hash")[0] for line in lines} & set(lines_of_torch)
    assert len(same) > 100


def test_make_refuses_other_pythons(tmp_path: Path) -> None:
    code = "import sys; sys.version_info = (3, 10); exec(sys.argv[2])"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    fake.chmod(0o755)
    venv = tmp_path / "venv"
    make = ["make", "--silent", f"VENV={venv}", f"PYTHON={fake}", f"{venv}/ready"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"error: {fake} does not start or is not Python 3.11 to 3.13; "
        "try make PYTHON=/path/to/python3.12"
    )
    assert not venv.exists()
