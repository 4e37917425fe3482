"""A day with a GPU: what has to be seen on one, a command for each step, within minutes.

    python -m benchmarks gpu STEP --out FOLDER

Each step writes FOLDER/STEP.json after every case and prints a table. At its time limit it ends with what it
has. Without a GPU, or with --dry-run, all sizes are tiny. docs/install.md says how to run the steps.
"""

import sys
from pathlib import Path

from alma.errors import Parser, UserError
from alma.files import make_directory
from alma.provenance import machine
from benchmarks.gpu.frame import STEPS, Asked, run

LIMIT = 530
"""Seconds of a step. A call to the machine has 600."""


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m benchmarks gpu", description=__doc__)
    add = made.add_argument
    steps = "; ".join(f"{name}: {title}" for name, title in STEPS.items())
    add("step", choices=STEPS, metavar="STEP", help=steps)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder of the results")
    add("--seconds", type=int, default=LIMIT, help=f"time limit of the step (default: {LIMIT})")
    add("--repeats", type=int, default=7, help="measurements of each time (default: 7)")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels writes it, setup reads it")
    add("--environment", type=Path, metavar="FOLDER", help="where setup makes the virtual environment")
    add("--dry-run", action="store_true", help="tiny sizes (default where there is no GPU)")
    return made


def main(words: list[str]) -> None:
    """`python -m benchmarks gpu`; exits with code 1 if a case failed."""
    args = parser().parse_args(words)
    if args.repeats < 2 or args.seconds < 1:
        raise UserError("--repeats is 2 or more, for quartiles, and --seconds 1 or more")
    make_directory(args.out)
    tiny = args.dry_run or not machine()["gpus"]
    if run(Asked(args.step, args.out, args.seconds, args.repeats, tiny, args.wheels, args.environment)):
        sys.exit(1)
