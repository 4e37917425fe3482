"""Demo, minutes on a CPU without downloads: corpus, stream, two language models, image learners, report.

python -m slurm.demo [--out DIR]

Prints each command before it runs. Rerun the demo to resume after an interruption.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alma.errors import Parser, command

MEGABATCHES = 4
WORDS = "100k"
EVAL_WORDS = VALID_WORDS = "10k"
VOCABULARY = 4000
TRAINING = (
    "--arch switch_gmoe_tiny --tokens-per-sample 128 --max-tokens 1024 --max-update 40 --optimizer adam "
    "--lr 4e-3 --lr-scheduler polynomial_decay --warmup-updates 10 --total-num-update 40 --clip-norm 1 "
    "--no-epoch-checkpoints --cpu"
)
OPTIONS = {"sm": "", "gmoe": "--grow-experts 2,2,4"}
"""Of the launcher, by learner."""


def steps(out: Path) -> list[list[str]]:
    """The command lines of each step; those of one step run at the same time."""
    corpus, stream, runs = (shlex.quote(str(out / name)) for name in ("corpus", "stream", "runs"))
    sources = " ".join(f"{name}={corpus}/{name}.txt" for name in ("topics", "stdlib", "packages"))
    launches = []
    for learner, own in OPTIONS.items():
        options = f"--learner {learner} --cluster local --out {runs}/{learner} {own}".strip()
        launches.append(f"python -m slurm.launch {stream} {options} -- {TRAINING}")
    return [
        [f"python -m data_prep.pydoc_corpus {corpus}"],
        [
            f"python -m data_prep {sources} --out {stream} --mega-batches {MEGABATCHES} --words {WORDS} "
            f"--eval-words {EVAL_WORDS} --valid-words {VALID_WORDS} --vocab-size {VOCABULARY} --seed 1 "
            "--max-document-words 1k"
        ],
        launches,
        [f"python vision/run.py --learner sm,ens,gens,gmoe --waiting-time 1,4 --jobs 2 --out {runs}/digits"],
        [f"python -m alma.report {runs} --out {shlex.quote(str(out / 'report'))}"],
    ]


def run(lines: Sequence[str]) -> None:
    """Run the command lines of a step at the same time, each on its share of the cores; exit if one fails."""
    threads = max(1, (os.cpu_count() or 1) // len(lines))
    # Idle OpenMP threads spin: processes that each use all cores would slow each other down.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    output = None if len(lines) == 1 else subprocess.PIPE
    processes = []
    for line in lines:
        print(f"\n$ {line}", flush=True)
        words = [sys.executable, *shlex.split(line)[1:]]
        error = output and subprocess.STDOUT
        processes.append(subprocess.Popen(words, env=environment, stdout=output, stderr=error, text=True))
    with ThreadPoolExecutor(len(lines)) as pool:
        codes = list(pool.map(_follow, processes, lines))
    for code in codes:
        if code:
            sys.exit(code if code > 0 else 1)


def _follow(process: subprocess.Popen, line: str) -> int:
    """Print the output of a process, each line after the name of its learner; return its exit code."""
    name = line.partition("--learner ")[2].partition(" ")[0]
    for text in process.stdout or ():
        print(f"{name:>4} | {text}", end="", flush=True)
    return process.wait()


@command
def main() -> None:
    """Entry point of `python -m slurm.demo`."""
    parser = Parser(prog="python -m slurm.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help="default: demo_out")
    for lines in steps(parser.parse_args().out):
        run(lines)


if __name__ == "__main__":
    main()
