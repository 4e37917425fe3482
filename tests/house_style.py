"""What makes a reader stop, and no linter knows: `python -m tests.house_style FOLDER...`.

The rules are those of CONTRIBUTING.md, "Style", without exceptions; a fault is exit code 1.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PRONOUNS = frozenset(
    "alike asked each found given here known made more others own said several some there told "
    "wanted what".split()
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PLACES = (*COMPREHENSIONS, ast.IfExp, ast.Subscript, ast.Lambda, ast.stmt)


def faults_of(node: ast.AST, parents: Sequence[ast.AST]) -> Iterator[str]:
    """The faults of a node; `parents` are the nodes around it, the nearest first."""
    name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", None)
    if name in PRONOUNS and not isinstance(getattr(node, "ctx", None), ast.Load):
        yield f"the name {name} does not say what it holds"
    place = next((parent for parent in parents if isinstance(parent, PLACES)), None)
    if isinstance(node, ast.IfExp) and isinstance(
        place, (ast.IfExp, ast.If, ast.While, ast.Assert)
    ):
        yield "a conditional expression in another one or in a condition"
    if isinstance(node, ast.NamedExpr) and not isinstance(place, (ast.If, ast.While)):
        yield "a walrus outside the condition of if, elif or while"
    if isinstance(node, ast.Assign) and is_parallel(node):
        yield "a, b = x, y: assign one after the other"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and is_flag_product(node):
        yield "a text or list times a flag: write a condition"
    if isinstance(node, COMPREHENSIONS) and isinstance(place, COMPREHENSIONS):
        yield "a comprehension in a comprehension: write a loop or a function"


def is_parallel(node: ast.Assign) -> bool:
    """Whether unrelated values are assigned at once; a swap is none."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = (part for part in ast.walk(node.value) if isinstance(part, ast.expr))
    return names.isdisjoint(map(ast.unparse, values))


def is_flag_product(node: ast.BinOp) -> bool:
    """Whether a literal text, list or tuple is repeated once or never."""
    operands = (node.left, node.right)
    literal = any(isinstance(operand, (ast.JoinedStr, ast.List, ast.Tuple)) for operand in operands)
    literal |= any(isinstance(getattr(operand, "value", None), str) for operand in operands)
    negated = any(isinstance(getattr(operand, "op", None), ast.Not) for operand in operands)
    return literal and (
        negated or any(isinstance(part, (ast.Compare, ast.BoolOp)) for part in operands)
    )


def walk(node: ast.AST, parents: Sequence[ast.AST] = ()) -> Iterator[tuple[int, str]]:
    """Line and text of each fault in a tree."""
    for fault in faults_of(node, parents):
        yield getattr(node, "lineno", 0), fault
    for child in ast.iter_child_nodes(node):
        yield from walk(child, (node, *parents))


if __name__ == "__main__":
    faults = 0
    for file in sorted(path for folder in sys.argv[1:] for path in Path(folder).rglob("*.py")):
        for line, fault in walk(ast.parse(file.read_text())):
            print(f"{file}:{line}: {fault}")
            faults += 1
    sys.exit(faults > 0)
