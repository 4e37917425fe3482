"""What in fairseq's sources can run code or import by a name: eval, imports, lookups in
globals()."""

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

EVALUATING = {"eval", "eval_str_list", "eval_str_dict", "eval_bool", "exec"}
BY_NAME = {"import_module", "__import__", "globals"}
SHELLS = {"Popen", "check_output", "system", "popen"}


def root() -> Path:
    """The folder of fairseq."""
    spec = find_spec("fairseq")
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def name_of(function: ast.expr) -> str:
    """The last word of a function's name; "" for another expression. A method `eval` sets a
    mode."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return "" if function.attr == "eval" else function.attr
    return ""


@functools.cache
def calls() -> list[tuple[str, ast.Call]]:
    """Each call in fairseq but its examples, with the path of its file."""
    folder = root()
    evaluations = []
    for path in sorted(folder.rglob("*.py")):
        if "examples" not in path.relative_to(folder).parts:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    evaluations.append((str(path.relative_to(folder)), node))
    return evaluations


def evaluated_settings() -> tuple[set[str], set[str]]:
    """Settings whose texts fairseq evaluates, by name;
    and the other evaluations, `FILE: expression`."""
    names: set[str] = set()
    otherwise: set[str] = set()
    for path, call in calls():
        if name_of(call.func) == "add_argument":
            kinds = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            words = [word.value for word in call.args if isinstance(word, ast.Constant)]
            evaluates = [
                kind for kind in kinds for node in ast.walk(kind) if name_of(node) in EVALUATING
            ]
            if evaluates:
                names.add(words[-1].removeprefix("--").replace("-", "_"))
        elif name_of(call.func) in EVALUATING and call.args:
            text = call.args[0]
            if isinstance(text, ast.Attribute):
                names.add(text.attr)
            else:
                otherwise.add(f"{path}: {ast.unparse(call)}")
    return names, otherwise


def by_name() -> set[str]:
    """Imports and lookups by a name, and programs that are started, `FILE: expression`."""
    names = set()
    for path, call in calls():
        if name_of(call.func) in BY_NAME | SHELLS:
            names.add(f"{path}: {ast.unparse(call)[:90]}")
    return names
