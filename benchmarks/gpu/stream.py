"""Step `stream`: `alma train` of a base-size model on documentation of Python, as many stages as time allows.

The vocabulary is padded to 50,000, so that the output layer costs what the paper's does. A row appears when
`alma train` has written it: perplexity of averaged and of raw weights, seconds and memory of the stage.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from alma.errors import UserError
from alma.records import Run
from alma.stream import FileInfo, Stream
from benchmarks.gpu import frame
from benchmarks.gpu.frame import Asked, Case, Row

VOCABULARY = 50_000
LEARNER = "--learner moe --schedule continuous --average poly:8"
BASE = (
    "--arch switch_gmoe_base --moe-expert-count 8 --bf16 --criterion chunked_cross_entropy --batch-size 32 "
    "--max-update 60 --lr 1e-3 --warmup-updates 30 --validate-interval 100 --save-interval 100"
)
TINY = (
    "--arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --tokens-per-sample 32 --batch-size 2 "
    "--max-update 2 --validate-interval 100 --save-interval 100"
)


def cases(asked: Asked) -> Iterator[Case]:
    """A row for each mega-batch, and one before them."""
    with TemporaryDirectory() as folder:
        base, log = Path(folder), asked.log
        count = 1 if asked.tiny else 12
        yield {"t": "stream"}, partial(make_stream, base, log, count, asked.tiny)
        words = f"alma train {base}/stream {LEARNER} --out {base}/run -- {TINY if asked.tiny else BASE}"
        with frame.started(words.split(), log) as process:
            for t in range(count + 1):
                yield {"t": t}, partial(row_of, base / "run", t, process, log)


def make_stream(base: Path, log: Path, count: int, tiny: bool) -> Row:
    """A stream of `count` equal mega-batches."""
    part, size, padded = ("topics", 500, 600) if tiny else ("", 8000, VOCABULARY)
    do(f"alma corpus pydoc {part} --out {base}/text.jsonl", log)
    with open(base / "text.jsonl", encoding="utf-8") as file:
        total = sum(len(json.loads(line)["text"].split()) for line in file)
    held_out = total // 40
    words = int(0.8 * (total - 2 * held_out) / count)  # duplicates are dropped
    do(
        f"alma data {base}/text.jsonl --out {base}/stream --mega-batches {count} --words {words} --seed 1 "
        f"--eval-words {held_out} --valid-words {held_out} --vocab-size {size} --max-document-words 1k",
        log,
    )
    stream = Stream.load(base / "stream")
    pad(stream, padded)
    return {"words": words, "tokens": stream.megabatches[0].tokens}


def pad(stream: Stream, vocabulary: int) -> None:
    """Add tokens that do not occur to dict.txt."""
    path = stream.directory / "dict.txt"
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"madeupword{i:05} 0\n" for i in range(stream.vocab_size, vocabulary))
    replace(stream, vocab_size=vocabulary, files={**stream.files, "dict.txt": FileInfo.of(path)}).write()


def do(words: str, log: Path) -> None:
    """Run a command. UserError: it failed."""
    code, text = frame.child(words.split(), log)
    if code:
        raise UserError(f"{words.split(' -')[0]}: exit code {code}: {text[-200:]}")


def row_of(folder: Path, t: int, process: Popen, log: Path) -> Row:
    """Wait for a row of results.jsonl. UserError: the training ended without it."""
    while True:
        ended = process.poll() is not None
        rows = Run.read(folder).rows if (folder / "results.jsonl").exists() else ()
        if len(rows) > t:
            row = rows[t]
            raw = row["extra"].get("raw", {}).get("perplexity", row["value"])
            found = {"averaged": row["value"], "raw": raw, "seconds": row["seconds"]}
            return found | {"peak GB": row["peak_memory_bytes"] / 1e9}
        if ended:
            raise UserError(f"`alma train` ended with exit code {process.returncode}; see {log}")
        time.sleep(0.2)
