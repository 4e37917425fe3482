"""The whole path in a few minutes on a CPU: corpus, stream, two learners, report. Nothing is downloaded.

python -m slurm.demo [--out DIR]

Each command is printed before it runs, to be copied; after an interruption all of it can be run again.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from alma.errors import Parser, command

MEGABATCHES = 4
WORDS = "100k"
EVAL_WORDS = VALID_WORDS = "10k"
VOCABULARY = 4000
TRAINING = (
    "--arch switch_gmoe_tiny --tokens-per-sample 128 --max-tokens 2048 --max-update 40 "
    "--optimizer adam --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 10 --clip-norm 1 --cpu "
    "--no-epoch-checkpoints"
)
LEARNERS = {"sm": "", "gmoe": "--grow-experts 2,2,4"}


def commands(out: Path) -> list[str]:
    """The command lines, in order."""
    corpus, stream, runs = (shlex.quote(str(out / name)) for name in ("corpus", "stream", "runs"))
    sources = " ".join(f"{name}={corpus}/{name}.txt" for name in ("topics", "stdlib", "packages"))
    lines = [
        f"python -m data_prep.pydoc_corpus {corpus}",
        f"python -m data_prep {sources} --out {stream} --mega-batches {MEGABATCHES} --words {WORDS} "
        f"--eval-words {EVAL_WORDS} --valid-words {VALID_WORDS} --vocab-size {VOCABULARY} --seed 1",
    ]
    for learner, growth in LEARNERS.items():
        options = f"--learner {learner} --cluster local --out {runs}/{learner} {growth}".strip()
        lines.append(f"python -m slurm.launch {stream} {options} -- {TRAINING}")
    if Path("vision/run.py").exists():
        lines.append("python vision/run.py")
    return [*lines, f"python -m alma.report {runs} --out {shlex.quote(str(out / 'report'))}"]


@command
def main() -> None:
    """Entry point of `python -m slurm.demo`."""
    parser = Parser(prog="python -m slurm.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help="default: demo_out")
    for line in commands(parser.parse_args().out):
        print(f"\n$ {line}", flush=True)
        code = subprocess.run([sys.executable, *shlex.split(line)[1:]]).returncode
        if code:
            sys.exit(code if code > 0 else 1)


if __name__ == "__main__":
    main()
