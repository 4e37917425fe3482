"""Speed of data_prep, against SentencePiece's encoder and fairseq-preprocess.

Three tables: the stages of `python -m data_prep` on the whole text; its encoder against SentencePiece's
batched one, in this process; and a uniform sample of the documents converted to .bin and .idx, against
fairseq-preprocess, which starts from SentencePiece's pieces. The files of both must be identical.
"""

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
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
from tqdm import tqdm

from alma.errors import UserError
from alma.stream import Stream
from benchmarks.timing import Rows, Table, spread
from data_prep.corpus.recipes import make
from data_prep.dictionary import DICTIONARY, EOS, UNKNOWN
from data_prep.documents import SHARD_BYTES, Reader, make_shards
from data_prep.scan import content_key
from data_prep.settings import named_files
from data_prep.tokenizer import MODEL, SentencePiece

MEGA_BATCHES = 4
VOCABULARY = 50_000  # tokens to train, as in the paper
SAMPLE_BYTES = 20e6
BLOCK = 10_000  # lines per call of SentencePiece
WORKERS = (1, 2)
LEAST_RUNS = 3  # of each process, for quartiles
_LAST = "of it encode and finalise"
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

# The input of fairseq-preprocess: writes the pieces of each text to a file beside it.
_PIECES = """
import itertools, sys
import sentencepiece
_, model, block, *paths = sys.argv
processor = sentencepiece.SentencePieceProcessor(model_file=model)
for path in paths:
    with open(path, newline="\\n") as text, open(path + ".pieces", "w", newline="\\n") as out:
        while lines := [line[:-1] for line in itertools.islice(text, int(block))]:
            out.writelines(" ".join(p) + "\\n" for p in processor.encode(lines, out_type=str, num_threads=1))
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


class Survey(NamedTuple):
    """Size of a text: bytes with a newline after each document, words, and distinct words by source."""

    bytes: int
    words: int
    unique_words: Counter[str]


class CorpusText:
    """The text of CORPUS arguments."""

    def __init__(self, corpus: Sequence[str]) -> None:
        """UserError: no files."""
        self.corpus = list(corpus)
        self._files = named_files(self.corpus)

    def documents(self) -> Iterator[tuple[str, bytes, int]]:
        """Source, text and words of each document."""
        reader = Reader(max_document_words=MAX_DOCUMENT_WORDS)
        for shard in make_shards(self._files, reader, SHARD_BYTES):
            for source, text, words in reader.read(shard):
                for piece, size in reader.split(text, words):
                    yield source, piece.encode(), size

    def survey(self) -> Survey:
        """Count everything. Memory: a key for each document."""
        size = total = 0
        unique: Counter[str] = Counter()
        seen = set()
        for source, data, words in self.documents():
            size += len(data) + 1
            total += words
            if (key := content_key(data, 0)[:16]) not in seen:
                seen.add(key)
                unique[source] += words
        return Survey(size, total, unique)

    def sample(self, share: float) -> list[bytes]:
        """A share of the distinct documents, in hash order with seed 0."""
        bound = int(min(share, 1) * 2**64)
        keyed = ((content_key(data, 0), data) for _, data, _ in self.documents())
        return [data for _, data in sorted({k: d for k, d in keyed if int.from_bytes(k[:8]) < bound}.items())]


def data_prep(corpus: Sequence[str], out: Path, workers: int, *flags: object) -> CommandCost:
    """Make a stream."""
    flags = ("--out", out, "--workers", workers, "--max-document-words", MAX_DOCUMENT_WORDS, *flags)
    return run([sys.executable, "-m", "data_prep", *corpus, *map(str, flags)])


def stages(text: CorpusText, survey: Survey, repeats: int, out: Path) -> Rows:
    """A row per number of workers and stage; the last stream stays in `out`."""
    source, words = survey.unique_words.most_common(1)[0]
    valid = min(500_000, words // 20)
    each = int(0.97 * (survey.unique_words.total() - valid)) // (MEGA_BATCHES + 1)
    sizes = ("--mega-batches", MEGA_BATCHES, "--words", each, "--valid-words", valid)
    flags = (*sizes, "--valid-source", source, "--vocab-size", VOCABULARY)
    runs: dict[int, list[CommandCost]] = defaultdict(list)
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        for workers in WORKERS:
            shutil.rmtree(out, ignore_errors=True)
            runs[workers].append(data_prep(text.corpus, out, workers, *flags))
    stream = Stream.load(out)
    encoded = sum(part.words for part in (*stream.megabatches, stream.valid, stream.test))
    handled = {"tokenizer": stream.megabatches[0].words, "encode": encoded, "finalise": encoded}

    def row(workers: int, stage: str, costs: list[tuple[float, ...]]) -> dict[str, Any]:
        """`costs`: seconds, CPU seconds and peak MB of each run."""
        seconds, cpu, peaks = zip(*costs, strict=True)
        words = handled.get(stage, survey.words)
        return {
            "workers": workers,
            "stage": stage,
            "s / 100 MB": spread([1e8 / survey.bytes * value for value in seconds]),
            "CPU s / 100 MB": spread([1e8 / survey.bytes * value for value in cpu]),
            "words/s": f"{words / median(seconds) / 1e6:.2f}M" if median(seconds) else "",
            "peak MB": f"{max(peaks):.0f}",
        }

    rows: Rows = []
    for workers, own in runs.items():
        for stage in own[0].stages:
            rows.append(row(workers, stage, [run.stages[stage] for run in own]))
        rows.append(row(workers, "the command", [(run.seconds, run.cpu, run.peak / 1e6) for run in own]))
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


class Sample:
    """Some documents, as a stream of one mega-batch by data_prep and as files of fairseq-preprocess."""

    def __init__(self, documents: list[bytes], words: int, model: Path, directory: Path) -> None:
        """`documents` are in hash order."""
        self._documents, self._model, self._directory = documents, model, directory
        self._text = directory / "sample.txt"
        self._text.write_bytes(b"\n\n".join(documents))
        self._out, self._peer = directory / "sample", directory / "peer"
        valid = max(words // 100, 2 * MAX_DOCUMENT_WORDS)
        sizes = ("--mega-batches", 1, "--words", words - 3 * valid, "--eval-words", valid)
        self._flags = (*sizes, "--valid-words", valid, "--tokenizer", model)

    def prepare(self, workers: int) -> CommandCost:
        """Run data_prep, from the text to .bin and .idx."""
        shutil.rmtree(self._out, ignore_errors=True)
        return data_prep([str(self._text)], self._out, workers, *self._flags)

    def write_parts(self) -> float:
        """Write the text of each part in the order of its .bin; returns the MB of all."""
        stream = Stream.load(self._out)
        held = sorted(self._documents, key=lambda data: content_key(data, 0)[16:])[: stream.valid.documents]
        left = set(held)
        rest = [data for data in self._documents if data not in left]
        cut, end = stream.megabatches[0].documents, stream.megabatches[0].documents + stream.test.documents
        parts = {"valid": [data for data in self._documents if data in left]}
        parts |= {"train": rest[:cut], "test": rest[cut:end]}
        for name, documents in parts.items():
            (self._directory / name).write_bytes(b"".join(data + b"\n\n" for data in documents))
        (self._directory / "line").write_bytes(b"a\n")
        return sum(part.bytes for part in (*stream.megabatches, stream.valid, stream.test)) / 1e6

    def pieces(self) -> CommandCost:
        """Run SentencePiece, from the text of the parts to their pieces."""
        paths = [str(self._directory / name) for name in ("train", "valid", "test", "line")]
        return run([sys.executable, "-c", _PIECES, str(self._model), str(BLOCK), *paths])

    def preprocess(self, workers: int, *names: str) -> CommandCost:
        """Run fairseq-preprocess, from the pieces of the named parts to .bin and .idx."""
        shutil.rmtree(self._peer, ignore_errors=True)
        command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--workers", str(workers)]
        for split, name in zip(("train", "valid", "test"), names, strict=False):
            command += [f"--{split}pref", str(self._directory / f"{name}.pieces")]
        return run([*command, "--srcdict", str(self._out / DICTIONARY), "--destdir", str(self._peer)])

    def check(self) -> None:
        """AssertionError: the files of the two differ."""
        stream = Stream.load(self._out)
        for name, part in (("train", stream.megabatches[0]), ("valid", stream.valid), ("test", stream.test)):
            for suffix in (".bin", ".idx"):
                own, peer = self._out / f"{part.prefix}{suffix}", self._peer / f"{name}{suffix}"
                if own.read_bytes() != peer.read_bytes():
                    raise AssertionError(f"{part.prefix}{suffix} is not what fairseq-preprocess writes")


class ProcessTime(NamedTuple):
    """Seconds of a command."""

    whole: float
    start: float
    """Imports, before the first stage."""
    cpu: float


def against_preprocess(sample: Sample, repeats: int) -> Rows:
    """Rows of data_prep and of fairseq-preprocess, for each number of workers."""
    costs: dict[tuple[str, int], list[ProcessTime]] = defaultdict(list)
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        for workers in WORKERS:
            own = sample.prepare(workers)
            start = own.seconds - sum(seconds for seconds, *_ in own.stages.values())
            costs["data_prep", workers].append(ProcessTime(own.seconds, start, own.cpu))
            ended, ended_cpu, _ = map(sum, zip(own.stages["encode"], own.stages["finalise"], strict=True))
            # Printed with two digits, so they may be 0.
            costs[_LAST, workers].append(ProcessTime(max(ended, 0.01), 0, max(ended_cpu, 0.01)))
        size = sample.write_parts()
        pieces = sample.pieces()
        start = sample.preprocess(1, "line").seconds
        for workers in WORKERS:
            peer = sample.preprocess(workers, "train", "valid", "test")
            sample.check()
            costs["fairseq-preprocess", workers].append(ProcessTime(peer.seconds, start, peer.cpu))
            both = ProcessTime(pieces.seconds + peer.seconds, start, pieces.cpu + peer.cpu)
            costs["SentencePiece, fairseq-preprocess", workers].append(both)
    return [
        {"process": name, "workers": workers} | _row(size, own, costs[_LAST, workers])
        for (name, workers), own in costs.items()
    ]


def _row(size: float, costs: list[ProcessTime], last: list[ProcessTime]) -> dict[str, str]:
    """Times for `size` MB, and relative to those of data_prep's last stages."""
    working = [cost.whole - cost.start for cost in costs]
    return {
        "seconds": f"{median(cost.whole for cost in costs):.2f}",
        "of it start": f"{median(cost.start for cost in costs):.2f}",
        "CPU s": f"{median(cost.cpu for cost in costs):.2f}",
        "MB/s": f"{size / median(cost.whole for cost in costs):.2f}",
        "MB/s, started": f"{size / median(working):.2f}",
        "time / last stages": spread([cost.whole / own.whole for cost, own in zip(costs, last, strict=True)]),
        "started / last stages": spread([time / own.whole for time, own in zip(working, last, strict=True)]),
        "CPU / last stages": spread([cost.cpu / own.cpu for cost, own in zip(costs, last, strict=True)]),
    }


def measure(repeats: int, corpus: Sequence[str] = ()) -> Iterator[Table]:
    """The three tables, by default of installed documentation; whole processes run `repeats` / 2 times."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if not corpus:
            corpus = [str(directory / "pydoc.jsonl")]
            make("pydoc", "", corpus[0])
        text = CorpusText(corpus)
        survey = text.survey()
        half = max(LEAST_RUNS, repeats // 2)
        title = f"data_prep, {survey.bytes / 1e6:.1f} MB, {survey.words:,} words"
        yield Table("data_prep_stages", title, stages(text, survey, half, directory / "stream"))
        model = directory / "stream" / MODEL
        documents = text.sample(SAMPLE_BYTES / survey.bytes)
        lines = [line for data in documents for line in data.decode().split("\n")]
        yield Table("data_prep_encoding", "Encoding lines, CPU seconds", encoding(model, lines, repeats))
        words = sum(line.count(" ") + 1 for line in lines)
        sample = Sample(documents, words, model, directory)
        title = f"Text to .bin and .idx, {words:,} words; fairseq-preprocess starts from pieces"
        yield Table("data_prep_preprocess", title, against_preprocess(sample, half))
