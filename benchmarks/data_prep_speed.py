"""Speed of data_prep: the stages of `python -m data_prep`, and its encoder against SentencePiece's own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import sentencepiece
from tqdm import tqdm

from alma.errors import UserError
from benchmarks.timing import Rows, Table, spread
from data_prep.corpus import pydoc
from data_prep.corpus.writer import write
from data_prep.dictionary import EOS, UNKNOWN
from data_prep.documents import SHARD_BYTES, Reader, make_shards
from data_prep.settings import named_files
from data_prep.tokenizer import MODEL, SentencePiece

MEGA_BATCHES = 4
VOCABULARY = 50_000  # tokens to train, as in the paper
SAMPLE_BYTES = 20_000_000  # of text that is encoded
BLOCK = 10_000  # lines per call of SentencePiece
WORKERS = (1, 2)
LEAST_RUNS = 3  # of each process, for quartiles
MAX_DOCUMENT_WORDS = 5000  # so that small mega-batches of books meet their size

# Runs a command and reports its seconds, CPU seconds and the bytes of its largest process. It is a process of
# its own because a child inherits ru_maxrss from its parent.
_LAUNCHER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.call(sys.argv[2:])
seconds = time.perf_counter() - started
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([seconds, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss], file)
sys.exit(code)
"""


class CommandCost(NamedTuple):
    """Cost of a command, with the processes it started."""

    seconds: float
    cpu: float
    peak: float
    """Bytes of the largest process."""
    stages: dict[str, tuple[float, ...]]
    """Seconds, CPU seconds and peak MB of each stage, as data_prep prints them."""


def run(command: Sequence[str | Path]) -> CommandCost:
    """Run a command with one thread per process. UserError: it fails."""
    with tempfile.NamedTemporaryFile("r") as usage:
        done = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, usage.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        if done.returncode:
            raise UserError(f"{command[2]} ended with exit code {done.returncode}: {done.stdout[-400:]}")
        seconds, cpu, peak = json.load(usage)
    printed = []
    for what in ("seconds", "CPU seconds", "peak MB of a process"):
        (line,) = re.findall(rf"^{what}: (.*)", done.stdout, re.MULTILINE) or [""]
        printed.append(dict(re.findall(r"(\w+) ([\d.]+)", line)))
    stages = {name: tuple(float(found[name]) for found in printed) for name in printed[0]}
    return CommandCost(seconds, cpu, peak, stages)


def stages(corpus: Sequence[str], repeats: int, out: Path) -> Rows:
    """A row per number of workers and stage; the last stream stays in `out`."""
    reader = Reader(max_document_words=MAX_DOCUMENT_WORDS)
    size, words = 0, Counter[str]()
    for shard in make_shards(named_files(list(corpus)), reader, SHARD_BYTES):
        for source, text, count in reader.read(shard):
            size += len(text.encode()) + 1
            words[source] += count
    source, largest = words.most_common(1)[0]
    valid = min(500_000, largest // 20)
    each = int(0.7 * (words.total() - valid)) // (MEGA_BATCHES + 1)  # the rest may be duplicates
    flags = f"--mega-batches {MEGA_BATCHES} --words {each} --valid-words {valid} --valid-source {source}"
    flags += f" --vocab-size {VOCABULARY} --max-document-words {MAX_DOCUMENT_WORDS} --out {out} --workers"
    runs: dict[int, list[CommandCost]] = defaultdict(list)
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        for workers in WORKERS:
            shutil.rmtree(out, ignore_errors=True)
            runs[workers].append(
                run([sys.executable, "-m", "data_prep", *corpus, *flags.split(), str(workers)])
            )
    rows: Rows = []
    for workers, own in runs.items():
        costs = {stage: [made.stages[stage] for made in own] for stage in own[0].stages}
        costs["the command"] = [(made.seconds, made.cpu, made.peak / 1e6) for made in own]
        for stage, figures in costs.items():
            seconds, cpu, peaks = zip(*figures, strict=True)
            rows.append(
                {
                    "workers": workers,
                    "stage": stage,
                    "s / 100 MB": spread([1e8 / size * value for value in seconds]),
                    "CPU s / 100 MB": spread([1e8 / size * value for value in cpu]),
                    "peak MB": f"{max(peaks):.0f}",
                }
            )
    return rows


def encoding(model: Path, lines: list[str], repeats: int) -> Rows:
    """One row: data_prep's encoder with an empty cache against SentencePiece's; CPU time of this process."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def blocks() -> Iterator[list[list[int]]]:
        for start in range(0, len(lines), BLOCK):
            yield processor.encode(lines[start : start + BLOCK], num_threads=1)

    def ours() -> bytes:
        encoder = SentencePiece(model)
        blocks = [lines[start : start + BLOCK] for start in range(0, len(lines), BLOCK)]
        return b"".join([encoder.encode(["\n".join(block)])[:-1].tobytes() for block in blocks])

    dtype = SentencePiece(model).dtype
    pairs = []
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        started = time.process_time()
        ids = ours()
        turned = time.process_time()
        for _ in blocks():
            pass
        pairs.append((turned - started, time.process_time() - turned))
    # fairseq's ids are SentencePiece's plus 1, but for <unk>
    theirs = (i + 1 if i else UNKNOWN for block in blocks() for line in block for i in [*line, EOS - 1])
    if ids != np.fromiter(theirs, dtype).tobytes():
        raise AssertionError("the ids are not SentencePiece's")
    size = sum(len(line.encode()) + 1 for line in lines) / 1e6
    return [
        {
            "MB": f"{size:.1f}",
            "lines": len(lines),
            "data_prep, MB/s": f"{size / median(own for own, _ in pairs):.2f}",
            "SentencePiece, MB/s": f"{size / median(peer for _, peer in pairs):.2f}",
            "time, SentencePiece / data_prep": spread([peer / own for own, peer in pairs]),
        }
    ]


def measure(repeats: int, corpus: Sequence[str] = ()) -> Iterator[Table]:
    """The two tables, by default of installed documentation; whole processes run `repeats` / 2 times."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if not corpus:
            corpus = [str(directory / "pydoc.jsonl")]
            left_out: Counter[str] = Counter()
            write(pydoc.documents("", left_out), corpus[0], left_out)
        rows = stages(corpus, max(LEAST_RUNS, repeats // 2), directory / "stream")
        yield Table("data_prep_stages", "data_prep, whole processes", rows)
        lines: list[str] = []
        size = 0
        for shard in make_shards(named_files(list(corpus)), Reader(), SHARD_BYTES):
            for _, text, _ in Reader().read(shard):
                if size < SAMPLE_BYTES:
                    lines += text.split("\n")
                    size += len(text)
        model = directory / "stream" / MODEL
        yield Table("data_prep_encoding", "Encoding lines, CPU seconds", encoding(model, lines, repeats))
