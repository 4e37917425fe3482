"""`python -m benchmarks.chaos.interrupts`: Ctrl-C ends `alma data` soon, on a busy machine too.

Starts the command again and again, beside busy processes, sends SIGINT to it or to its group at a random
moment, and measures until it and its workers have ended. A command that takes too long gets SIGABRT and
prints the stack of every thread. Ends with exit code 1 if there was one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from alma.errors import Parser, command
from benchmarks.chaos.faults import adopt, running

_WORDS = "--mega-batches 3 --words 150k --valid-words 20k --max-document-words 1k --vocab-size 2000"
_SECONDS = 120
"""Until the stacks are printed and the processes killed."""


def write_corpus(folder: Path) -> None:
    """About 6 MB in eight files, so that each stage has several tasks."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(20_000)]
    folder.mkdir()
    for number in range(8):
        documents = (
            "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(rng.randint(2, 20)))
            for _ in range(900)
        )
        (folder / f"{number}.txt").write_text("\n\n".join(documents))


def start(place: Path, workers: int) -> subprocess.Popen[bytes]:
    """Start `alma data` in a process group of its own, with small shards and buckets."""
    program = (
        "import runpy\nfrom data_prep import documents, plan\n"
        "documents.SHARD_BYTES, plan.BUCKET_BYTES = 1 << 18, 200_000\n"
        "if __name__ == '__main__':\n    from data_prep.__main__ import main\n    main()\n"
    )
    script = place / "run.py"
    script.write_text(program)
    words = [str(place / "corpus"), *_WORDS.split(), "--workers", str(workers), "--out", str(place / "out")]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(place / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(script), *words],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def seconds_to_end(process: subprocess.Popen[bytes]) -> float:
    """Wait until the command and all its processes have ended; inf: not within _SECONDS, so killed."""
    began = time.monotonic()
    family = running(process.pid)
    while process.poll() is None or any(_lives(pid) for pid in family):
        family = sorted({*family, *running(process.pid)})
        if time.monotonic() - began > _SECONDS:
            for number in (signal.SIGABRT, signal.SIGKILL):
                for pid in filter(_lives, (process.pid, *family)):
                    os.kill(pid, number)
                time.sleep(2)
            process.wait()
            return float("inf")
        time.sleep(0.02)
    return time.monotonic() - began


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def measure(place: Path, kills: int, workers: int, limit: float) -> int:
    """Print the seconds of each end; the number of those beyond `limit`."""
    began = time.monotonic()
    if start(place, workers).wait():
        sys.exit((place / "log").read_text())
    whole = time.monotonic() - began
    print(f"undisturbed: {whole:.1f} s", flush=True)
    late, codes = 0, Counter[int]()
    for number in range(kills):
        shutil.rmtree(place / "out", ignore_errors=True)
        process = start(place, workers)
        moment = random.uniform(0, whole)
        time.sleep(moment)
        if process.poll() is None:
            (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGINT)
        took = seconds_to_end(process)
        codes[process.returncode] += 1
        print(f"{number}: at {moment:.2f} s, ended after {took:.2f} s, code {process.returncode}", flush=True)
        if took > limit or process.returncode not in (0, 130):
            late += took > limit
            print((place / "log").read_text(errors="replace")[-9000:], flush=True)
    print(f"{kills} kills, {late} later than {limit:g} s; exit codes {dict(codes)}")
    return late


@command
def main() -> None:
    """Measure beside busy processes."""
    parser = Parser(prog="python -m benchmarks.chaos.interrupts", description=__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=300, metavar="N", help="number of signals (default: 300)")
    add("--busy", type=int, default=12, metavar="N", help="busy processes, with nice 10 (default: 12)")
    add("--workers", type=int, default=3, metavar="K", help="--workers of the command (default: 3)")
    add("--limit", type=float, default=20, metavar="S", help="seconds that an end may take (default: 20)")
    options = parser.parse_args()
    adopt()
    busy = [
        subprocess.Popen([sys.executable, "-c", "import os\nos.nice(10)\nwhile os.getppid() > 1: pass"])
        for _ in range(options.busy)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder) / "corpus")
            late = measure(Path(folder), options.kills, options.workers, options.limit)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    sys.exit(late > 0)


if __name__ == "__main__":
    main()
