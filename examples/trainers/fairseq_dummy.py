"""fairseq-train as a trainer: its rows are those of `--learner sm` with the same flags.

alma train STREAM --trainer 'python examples/trainers/fairseq_dummy.py FLAGS...'
"""

import os
import subprocess
import sys
from pathlib import Path

_COSTS = ("updates", "tokens", "seconds", "flops", "validation_flops", "peak_memory_bytes")


def run(*words: str | Path, replace: bool = False) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    if replace:
        os.execv(command[0], command)  # signals reach fairseq itself
    if code := subprocess.run(command).returncode:
        sys.exit(code if code > 0 else 128 - code)
