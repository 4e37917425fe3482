"""Arrows: alma imports only alma, without its reports, and neither torch nor fairseq."""

import ast
import subprocess
import sys

import pytest

from .synthetic import ROOT

MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "alma").rglob("*.py"))
OURS = ("alma", "benchmarks", "data_prep", "fairseq_alma", "slurm", "vision")


def imports(path):
    """Modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_what_its_place_allows(path):
    for name in imports(path):
        top, _, rest = name.partition(".")
        assert top not in {"torch", "fairseq", *OURS} - {"alma"}, name
        assert not rest.startswith("report") or path.parts[1] == "report", name


def test_no_module_loads_torch_fairseq_or_matplotlib():
    names = [".".join(path.with_suffix("").parts) for path in MODULES]
    script = f"import sys, importlib; [importlib.import_module(name) for name in {names}]\n"
    script += "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'fairseq', 'matplotlib'})"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True).stdout == b"\n"
