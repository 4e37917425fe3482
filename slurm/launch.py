"""Run all stages of a language-model learner: `alma train`. Rerun the same command to resume."""

import sys

from alma.errors import command
from slurm.lm.options import parse
from slurm.lm.options import parser as parser  # alma.__main__ expects a parser in every tool


@command
def main() -> None:
    parsed = parse(sys.argv[1:])
    from slurm.lm import launcher  # imports much, so the options are checked first

    launcher.start(sys.argv[1:], parsed)


if __name__ == "__main__":
    main()
