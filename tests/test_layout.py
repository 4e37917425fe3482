"""The layout: which wing may import which, unique names of classes, short files and functions."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "alma",
    "benchmarks",
    "data_prep",
    "fairseq_alma",
    "slurm",
    "transformers_alma",
    "vision",
)
ARROWS = {
    "alma": ("alma",),
    "alma.decisions": ("alma", "alma.decisions", "alma.report"),
    "alma.report": ("alma", "alma.report"),
    "data_prep": ("alma", "slurm.engine", "data_prep"),
    "fairseq_alma": ("alma", "fairseq_alma"),
    "slurm": ("alma", "slurm", "slurm.engine", "slurm.lm", "slurm.vision"),
    "slurm.engine": (
        *("alma.errors", "alma.escape", "alma.files", "alma.options", "alma.processes"),
        "slurm.engine",
    ),
    "slurm.lm": ("alma", "slurm.engine", "slurm.lm"),
    "slurm.matrix": (
        *("alma", "alma.report", "data_prep", "slurm.engine", "slurm.lm"),
        "slurm.matrix",
    ),
    "slurm.vision": ("alma", "slurm.engine", "slurm.vision"),
    "transformers_alma": ("alma", "transformers_alma"),
    "vision": ("alma", "alma.report", "vision"),
}
"""What each wing may import of this repository;
the modules of the longest name that fits are a wing."""
FORBIDDEN = {
    "alma": {"torch", "fairseq", "matplotlib"},
    "slurm": {"torch", "fairseq", "transformers"},
    "transformers_alma": {"fairseq"},
    "vision": {"fairseq"},
}
FILE_LINES = 400
FUNCTION_LINES = 80
STALENESS = ("law", "matrix", "metric_of_column", "period", "plan", "retraining", "staleness")
"""Modules of alma.report.advice that take losses from anywhere: they need no run records."""
STALENESS_NEEDS = {
    "alma.dates",
    "alma.errors",
    "alma.escape",
    "alma.report.losses",
    "alma.report.metric",
    "alma.tables",
}


def sources(*folders: str) -> list[Path]:
    """Python files below the folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text("utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports, those inside functions included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                exists = (ROOT / Path(*inner.split("."))).with_suffix(".py").exists()
                yield inner if exists or (ROOT / Path(*inner.split("."))).is_dir() else node.module


def wing_of(module: str) -> str:
    """The longest name in ARROWS that the module belongs to."""
    return max((wing for wing in ARROWS if f"{module}.".startswith(f"{wing}.")), key=len)


def allowed(module: str, wing: str) -> bool:
    """Whether `wing` may import `module`."""
    return module in ARROWS[wing] or wing_of(module) in ARROWS[wing]


@pytest.mark.parametrize("wing", ARROWS)
def test_arrows_point_one_way(wing):
    turned = [
        f"{module_of(path)} imports {name}"
        for path in sources(wing.replace(".", "/"))
        if wing_of(module_of(path)) == wing
        for name in imports(path)
        if name.partition(".")[0] in PACKAGES and not allowed(name, wing)
    ]
    assert not turned, f"{wing} may import {ARROWS[wing]}"


def test_the_law_of_staleness_and_plans_need_losses_numpy_and_scipy_alone():
    """Imports of imports and late ones count."""
    wing = {f"alma.report.advice.{name}" for name in STALENESS}
    modules = {module_of(path): path for path in sources("alma")}
    reached = set()
    packages = set()
    left = list(wing)
    while left:
        module = left.pop()
        reached.add(module)
        for name in imports(modules[module]):
            if name.partition(".")[0] in PACKAGES:
                left += {name} - reached
            else:
                packages.add(name.partition(".")[0])
    assert reached == wing | STALENESS_NEEDS
    assert packages - sys.stdlib_module_names == {"numpy", "scipy"}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_loads_what_its_wing_does_without(package):
    names = [module_of(path) for path in sources(package) if path.stem != "__main__"]
    names += [f"{package}.report.__main__"] if package == "alma" else []
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    code += "print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not FORBIDDEN[package] & set(loaded.stdout.split())


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Names that cannot be put in an order in which each imports earlier ones only."""
    remaining = set(arrows).union(*arrows.values())
    while free := {name for name in remaining if not arrows.get(name, set()) & remaining}:
        remaining -= free
    return sorted(remaining)


def test_no_two_modules_or_packages_import_each_other():
    """Late imports count too. A package may import those that contain it, and a wing its
    packages."""
    modules = {module_of(path): path for path in sources(*PACKAGES)}
    arrows = {
        module: set(imports(path)) & modules.keys() - {module} for module, path in modules.items()
    }
    assert not circle(arrows)
    packages = [module_of(path) for path in sources(*PACKAGES) if path.name == "__init__.py"]

    def package_of(module: str) -> str:
        return max((name for name in packages if f"{module}.".startswith(f"{name}.")), key=len)

    between: dict[str, set[str]] = defaultdict(set)
    for module, imported in arrows.items():
        package = package_of(module)
        for other_package in map(package_of, imported):
            if not f"{package}.".startswith(
                f"{other_package}."
            ) and not f"{other_package}.".startswith(f"{package}."):
                between[package].add(other_package)
    assert not circle(between)


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_public_class_names_have_one_meaning():
    places = defaultdict(list)
    for path in sources(*PACKAGES):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module_of(path))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_files_and_functions_are_short():
    long = []
    for path in sources(*PACKAGES, "tests"):
        lines = len(path.read_text("utf-8").splitlines())
        long += [f"{path}: {lines} lines"] if lines > FILE_LINES else []
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.end_lineno - node.lineno >= FUNCTION_LINES
            ):
                lines = node.end_lineno - node.lineno + 1
                long.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not long
