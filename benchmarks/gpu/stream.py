"""Step `stream`: rows of `alma train`, base size, on documentation of Python, as many as time
allows."""

import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from alma.errors import UserError
from benchmarks.gpu import process
from benchmarks.gpu.process import Cases, Row

STREAM = "--learner moe --schedule continuous --average poly:8"
BASE = (
    "--arch switch_gmoe_base --moe-expert-count 8 --bf16 --criterion chunked_cross_entropy "
    "--batch-size 32 --max-update 60 --lr 1e-3 --warmup-updates 30 "
    "--validate-interval 100 --save-interval 100"
)
TINY = (
    "--arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --tokens-per-sample 32 "
    "--batch-size 2 --max-update 2 --validate-interval 100 --save-interval 100"
)


def stream(args: Any) -> Cases:
    """The stream, then a case for each row of its run, all of them again if one has failed."""
    base = Path(f"{args.environment}-stream")
    count = 1 if args.tiny else 4
    args.cases = None
    rows = rows_of(base, args.tiny)
    yield {"t": "stream"}, partial(make_stream, base, count, args.tiny)
    for t in range(count + 1):
        yield {"t": t}, partial(next, rows)


def make_stream(base: Path, count: int, tiny: bool) -> Row:
    """A stream of `count` equal mega-batches. UserError: a command failed."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    do(f"alma corpus pydoc {'topics' if tiny else ''} --out {base}/text.jsonl")
    documents = (base / "text.jsonl").read_text("utf-8").splitlines()
    total = sum(len(json.loads(line)["text"].split()) for line in documents)
    words = int(0.75 * total / count)  # duplicates are dropped
    held_out = total // 40
    sizes = f"--mega-batches {count} --words {words}"
    sizes += f" --eval-words {held_out} --valid-words {held_out}"
    vocabulary = f"--vocab-size {500 if tiny else 8000} --max-document-words 1k"
    do(f"alma data {base}/text.jsonl --out {base}/stream {sizes} {vocabulary}")
    return {"words": words}


def do(words: str) -> None:
    """Run a command. UserError: it failed."""
    code, text = process.child(words.split())
    if code:
        raise UserError(f"{words.split(' -')[0]}: exit code {code}: {text[-200:]}")


def rows_of(base: Path, tiny: bool) -> Iterator[Row]:
    """Train; yield the figures of each row. UserError: the training ended without one."""
    words = f"alma train {base}/stream {STREAM} --out {base}/run -- {TINY if tiny else BASE}"
    path = base / "run/results.jsonl"
    with process.started([sys.executable, "-m", *words.split()], None) as training:
        for t in itertools.count():
            while not path.exists() or path.read_text().count("\n") <= t:
                if training.poll() is not None:
                    raise UserError(f"`alma train` ended with exit code {training.returncode}")
                time.sleep(0.2)
            row = json.loads(path.read_text().splitlines()[t])
            raw = row["extra"].get("raw", {}).get("perplexity", row["value"])
            figures = {"averaged": row["value"], "raw": raw, "seconds": row["seconds"]}
            yield figures | {"peak GB": row["peak_memory_bytes"] / 1e9}
