"""A GPU in commands of ten minutes: what has to be seen on one, in the order of its worth.

    python -m benchmarks gpu wheels --wheels .wheels              # here: packages for a machine \
off line
    python -m benchmarks gpu ladder --wheels .wheels --out FOLDER # there: what each change gains
    python -m benchmarks gpu all --wheels .wheels --out FOLDER    # there: the ladder, then the rest
    python -m benchmarks gpu again --wheels .wheels --out FOLDER  # there: what is left or failed

FOLDER/gpu.json has all rows and FOLDER/gpu.log what processes print, both written after each case.
Without a GPU, or with --dry-run, all sizes are tiny. docs/install.md has the steps and their
limits.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from alma.errors import Parser, UserError
from alma.files import make_directory, write_json_atomic
from alma.provenance import commit, machine, versions
from alma.tables import as_text
from benchmarks.gpu.gains import by_kind, gains
from benchmarks.gpu.packages import carry
from benchmarks.gpu.process import NO_RESULT, Row, follow, shown, work_on


class Limit(NamedTuple):
    """Of a step."""

    seconds: int
    cases: str
    """Module of benchmarks, and its function that gives the cases."""
    title: str
    case_seconds: int = 0
    """Of a case; the process of one that takes longer, or crashes, is started again for those
    after it. 0: a process that crashes ends the step."""


STEPS = {
    "setup": Limit(
        30, "gpu.packages.setup", "installation from carried wheels, beside the machine's torch"
    ),
    "ladder": Limit(
        720,
        "gpu.ladder.ladder",
        "an update of the base model, one change after another",
        case_seconds=100,
    ),
    "tests": Limit(100, "gpu.tests.tests", "pytest -m gpu"),
    "switch": Limit(
        60,
        "switch_ffn.cases",
        "Switch layer by dispatcher against fairseq's dense layer, forward and backward",
    ),
    "train": Limit(
        220,
        "gpu.language.train",
        "the paper's models by fairseq-train beside transformer_lm of equal active size",
    ),
    "profile": Limit(60, "gpu.language.profile", "where the time of ten updates goes"),
    "images": Limit(30, "vision_stage.cases", "a stage of image learners against plain PyTorch"),
    "resume": Limit(
        90, "gpu.language.resume", "training after a signal against training without one"
    ),
    "stream": Limit(
        180,
        "gpu.stream.stream",
        "stages of a stream by alma train; has what the others leave of their time",
    ),
}
REMARKS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("padded / dense", lambda times: median(times) > 2, "padded dispatch is slow"),
    ("speed / transformer_lm", lambda ratio: ratio < 0.7, "slower than a dense model"),
    ("MFU", lambda share: share < 0.2, "little of the GPU's speed is used"),
    ("peak / estimate", lambda ratio: not 0.8 < ratio < 1.1, "the estimate of memory is wrong"),
    ("GPU idle", lambda share: share > 0.2, "the GPU waits for the host"),
    ("waits / update", lambda count: count > 3, "the host waits for the GPU"),
    ("plain / sm", lambda times: median(times) < 0.8, "slower than plain PyTorch"),
]
"""Columns, when to look at one, and why."""


def parser() -> Parser:
    """The command line."""
    command_line = Parser(prog="python -m benchmarks gpu", description=__doc__)
    add = command_line.add_argument
    add(
        "command",
        choices=("wheels", "ladder", "all", "again", "step"),
        help="see above; step: one, in this process",
    )
    add(
        "steps",
        nargs="*",
        metavar="STEP",
        help=f"steps of again (default: all): {', '.join(STEPS)}",
    )
    add("--out", type=Path, metavar="FOLDER", help="folder of gpu.json and gpu.log")
    add("--seconds", type=int, default=570, help="time limit of the whole command (default: 570)")
    add(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="wheels writes it, all and again install from it",
    )
    add(
        "--environment",
        type=Path,
        default=Path("/tmp/alma-gpu"),
        metavar="FOLDER",
        help="made by setup",
    )
    add("--cases", type=json.loads, help="cases of step: a list of labels in JSON (default: all)")
    add("--dry-run", action="store_true", help="tiny sizes (default where there is no GPU)")
    return command_line


def main(words: list[str]) -> None:
    """`python -m benchmarks gpu`; exits with code 1 if a case failed or has no result."""
    args = parser().parse_args(words)
    if unknown := set(args.steps) - set(STEPS):
        raise UserError(f"no step {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if args.command == "wheels":
        carry(args.wheels)
        return
    if not args.out or args.seconds < 1:
        raise UserError("give --out FOLDER, where gpu.json and gpu.log go, and --seconds 1 or more")
    make_directory(args.out)
    args.tiny = args.dry_run or not machine()["gpus"]
    if args.command == "step":
        work_on(STEPS[args.steps[0]].cases, args)
    elif not drive(args):
        sys.exit(1)


def drive(args: Any) -> bool:
    """Run steps, each a process that is killed at its limit, and print a summary; returns whether
    every case has a result. `again` keeps the rows of an earlier gpu.json and runs what is left of
    its cases."""
    began = time.monotonic()
    path = args.out / "gpu.json"
    again = args.command == "again"
    steps: dict[str, Any] = {}
    if again and path.exists():
        steps = json.loads(path.read_text())["steps"]
    record = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "tiny": args.tiny,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "steps": steps,
    }
    chosen = steps_of(args, steps)
    for place, name in enumerate(chosen):
        remaining = args.seconds - (time.monotonic() - began)
        is_last = place == len(chosen) - 1
        limit = remaining if again or is_last else min(STEPS[name].seconds, remaining)
        step = steps.setdefault(name, {"rows": []}) | {"title": STEPS[name].title, "limit": limit}
        steps[name] = step
        run_step(name, step, args, lambda: write_json_atomic(path, record))
    first = look_first(steps, args.tiny)
    record |= {"seconds": time.monotonic() - began, "look first": first}
    write_json_atomic(path, record)
    for name, step in steps.items():
        print_step(name, step)
    print("\nLook first at:\n" + ("\n".join(first) or "nothing: every case has a result"))
    return not any(open_cases(step) for step in steps.values())


def steps_of(args: Any, earlier: dict[str, Any]) -> list[str]:
    """The steps of a command, with those that `earlier` ones of a gpu.json leave open."""
    names = args.steps or list(STEPS)
    if args.command == "ladder":
        names = ["ladder"]
    chosen = [name for name in names if not earlier or open_cases(earlier.get(name))]
    if args.wheels and "setup" not in chosen:  # a new machine has no environment
        chosen.insert(0, "setup")
    return chosen


def run_step(name: str, step: dict[str, Any], args: Any, save: Callable[[], None]) -> None:
    """Run the cases of `step` that have no result, all if none has; `save` is called after each.

    With a limit of a case, a process that ends early is followed by one for the cases that it had
    not begun.
    """
    started = time.monotonic()
    if step["limit"] <= 0:
        step |= {"ended": "not begun: no time was left", "seconds": 0.0}
        return
    print(f"\n{name}: {step['title']}; at most {step['limit']:.0f} s", flush=True)
    cases = [row["case"] for row in step["rows"] if "error" in row]
    if name == "setup":
        cases = []
    case_limit = STEPS[name].case_seconds or float("inf")
    while True:
        earlier = [row for row in step["rows"] if "error" not in row or row["case"] not in cases]
        limit = step["limit"] - (time.monotonic() - started)
        rows: list[Row] = []
        ended = ""
        words = command(name, cases, args)
        for rows, ended in follow(words, limit, args.out / "gpu.log", case_limit):
            step["rows"] = without_cases(earlier, rows) + rows
            step |= {"ended": ended, "seconds": time.monotonic() - started}
            save()
        unbegun = [row["case"] for row in rows if row.get("error") == NO_RESULT]
        is_over = time.monotonic() - started > step["limit"]
        none_begun = len(unbegun) == len(rows)
        if ended == "complete" or not STEPS[name].case_seconds or is_over or none_begun:
            return
        cases = unbegun


def without_cases(rows: list[Row], replaced: list[Row]) -> list[Row]:
    """`rows` without those whose cases are in `replaced`."""
    cases = [row["case"] for row in replaced]
    return [row for row in rows if row["case"] not in cases]


def print_step(name: str, step: dict[str, Any]) -> None:
    """Print a table of the step's rows: the labels of the case, then its figures."""
    print(
        f"\n{name}: {step['title']}; {step['ended']}, "
        f"{step['seconds']:.0f} of {step['limit']:.0f} s"
    )
    if not step["rows"]:
        print("no case")
        return
    rows = []
    for row in step["rows"]:
        if name == "ladder" and "tokens/s" in row:
            continue
        figures = {column: value for column, value in row.items() if column != "case"}
        rows.append(row["case"] | figures)
    header = list(dict.fromkeys(column for row in rows for column in row))
    table = [header]
    for row in rows:
        table.append([shown(row.get(column, "")) for column in header])
    if rows:
        print(as_text(table))
    if name == "ladder":
        print("\n" + as_text(gains(step["rows"])))
        print("\n" + as_text(by_kind(step["rows"])))


def command(name: str, cases: list[Row], args: Any) -> list[str]:
    """A step as a process of the environment that setup has made, if there is one."""
    python = sys.executable
    environment_python = args.environment / "bin/python"
    if args.wheels and environment_python.exists() and name != "setup":
        python = str(environment_python)
    words = [python, "-m", "benchmarks", "gpu", "step", name]
    words += [
        f"--{key}={getattr(args, key)}"
        for key in ("out", "environment", "wheels")
        if getattr(args, key)
    ]
    if args.tiny:
        words.append("--dry-run")
    if cases:
        words.append(f"--cases={json.dumps(cases)}")
    return words


def open_cases(step: dict[str, Any] | None) -> bool:
    """Whether a step did not end well, or a case of it has no result."""
    return not step or step["ended"] != "complete" or any("error" in row for row in step["rows"])


def look_first(steps: dict[str, Any], tiny: bool) -> list[str]:
    """Steps that did not end, cases that failed, and, but for tiny sizes, figures out of their
    range."""
    rows = [(name, row) for name, step in steps.items() for row in step["rows"]]
    lines = [
        f"{name}: {step['ended']}" for name, step in steps.items() if step["ended"] != "complete"
    ]
    lines += [f"{name} {row['case']}: {row['error'][:200]}" for name, row in rows if "error" in row]
    return lines + [
        f"{name} {row['case']}: {why}: {column} {shown(row[column])}"
        for column, wrong, why in ([] if tiny else REMARKS)
        for name, row in rows
        if column in row and not isinstance(row[column], str) and wrong(row[column])
    ]
