"""Forked children that end as programs do."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run_and_exit(
    function: Callable[[], object], out: Path, err: Path | None = None, stdin: str = os.devnull
) -> NoReturn:
    """In a forked child: call `function`, add its output to files (`err`: `out`),
    exit with its code."""
    code = 1
    try:
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err or out)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        function()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
