"""A demo of everything, without downloads, in minutes on a CPU: `alma demo`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, command
from slurm.engine.children import OWN_MODULES

TRAINING = (
    "--arch switch_gmoe_tiny --tokens-per-sample 128 --max-tokens 1024 --max-update 40 --optimizer adam "
    "--lr 4e-3 --warmup-updates 10 --clip-norm 1 --no-epoch-checkpoints --cpu"
)
DECAY = "--lr-scheduler polynomial_decay --total-num-update 40"


def steps(out: Path) -> list[list[str]]:
    """The command lines of each step; those of one step run at the same time."""
    text, stream, runs = (shlex.quote(str(out / name)) for name in ("corpus/pydoc.jsonl", "stream", "runs"))
    sizes = "--mega-batches 4 --words 100k --eval-words 10k --valid-words 10k --vocab-size 4000"
    return [
        [f"alma corpus pydoc --out {text}"],
        [f"alma data {text} --out {stream} {sizes} --seed 1 --max-document-words 1k"],
        [
            f"alma train {stream} --learner sm --cluster local --out {runs}/sm -- {TRAINING} {DECAY}",
            f"alma train {stream} --learner gmoe --cluster local --out {runs}/gmoe --grow-experts 2,2,4 "
            f"-- {TRAINING} {DECAY}",
            f"alma train {stream} --learner sm --preset anytime --cluster local --out {runs}/anytime "
            f"-- {TRAINING}",
        ],
        [
            f"alma images --learner sm,ens,gens,gmoe --waiting-time 1,4 --out {runs}/digits",
            f"alma images --preset anytime --learner sm,ens --out {runs}/digits_anytime",
            "alma images --scenario classes --replay-share 0,0.5 --learner sm,ens --hidden 32 "
            f"--out {runs}/drift",
        ],
        [f"alma report {runs} --out {shlex.quote(str(out / 'report'))}"],
    ]


def run(lines: Sequence[str]) -> None:
    """Run the command lines of a step at the same time, each on its share of the cores; exit if one fails."""
    threads = max(1, (os.cpu_count() or 1) // len(lines))
    # Idle OpenMP threads spin: processes that each use all cores would slow each other down.
    environment = {**os.environ, **OWN_MODULES, "OMP_NUM_THREADS": str(threads)}
    print(*(f"\n$ {line}" for line in lines), sep="\n", flush=True)
    programs = [[sys.executable, "-m", *shlex.split(line)] for line in lines]
    started = [subprocess.Popen(program, env=environment) for program in programs]
    codes = [process.wait() for process in started]
    if code := next(filter(None, codes), 0):
        sys.exit(max(code, 1))


def parser() -> Parser:
    made = Parser(
        prog="alma demo",
        usage="%(prog)s [--out DIR]",
        description="Run all of ALMA on small data, without a download: text becomes a stream, three "
        "language models train on it, image learners train on digits, and a report compares the runs. Takes "
        "about 2 minutes on two idle cores. Rerun the demo to resume after an interruption.",
        epilog="examples:\n  alma demo\n  alma demo --out /tmp/demo",
    )
    out = "directory for the corpus, the stream, the runs and the report (default: demo_out)"
    made.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help=out)
    return made


@command
def main() -> None:
    out = parser().parse_args().out
    for lines in steps(out):
        run(lines)
    print(f"\ndone: {out / 'report/report.md'}")
