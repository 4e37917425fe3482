"""data_prep on gigabytes of synthetic text: time, memory and disk space per stage; takes up to an hour.

Documents are computed from their number when they are read, never stored. Words follow Zipf's law, lengths
are log-normal, and one document in 50 is a copy of one in another shard. The text is random, so encoding is
not as fast as on real text.
"""

import contextlib
import functools
import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from alma.errors import Parser, UserError
from alma.files import make_directory
from benchmarks.timing import Rows, Table, show
from data_prep import documents, pipeline
from data_prep.cut import Wanted
from data_prep.documents import Reader, Shard
from data_prep.work import Task, Work

MEGA_BATCHES = 4
VOCABULARY = 50_000  # tokens to train
LINES = 1 << 16  # lines that documents are made of
LINE_WORDS = 20  # mean length of a line
WORDS = 200_000  # distinct words in LINES, at most; each document adds one of its own
MEDIAN_WORDS = 400  # of a document
COPIES = 50  # one document in COPIES is a duplicate
SOURCES = ("books", "web", "wiki")
_SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"] + ["é", "ße", "ñu"]


class LinePool(NamedTuple):
    """The lines that all documents are made of."""

    lines: list[str]
    words: list[int]
    """Words of each line."""
    lengths: list[int]
    """Lines per document, at 4096 equidistant quantiles."""


@functools.lru_cache(maxsize=1)
def line_pool(seed: int) -> LinePool:
    """Lines of random words; short words are the frequent ones."""
    rng = np.random.default_rng(seed)
    pairs = map("".join, itertools.product(_SYLLABLES, repeat=2))
    triples = map("".join, itertools.product(_SYLLABLES, repeat=3))
    vocabulary = [*itertools.islice(itertools.chain(_SYLLABLES, pairs, triples), WORDS)]
    counts = rng.integers(LINE_WORDS // 4, 2 * LINE_WORDS - LINE_WORDS // 4, LINES, endpoint=True)
    share = 1 / np.arange(1, WORDS + 1)
    ranks = iter(rng.choice(WORDS, counts.sum(), p=share / share.sum()).tolist())
    lines = [" ".join([vocabulary[rank] for rank in itertools.islice(ranks, n)]) for n in counts.tolist()]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]
    lengths = [max(1, round(MEDIAN_WORDS / LINE_WORDS * math.exp(z))) for z in quantiles]
    return LinePool(lines, counts.tolist(), lengths)


@dataclass(frozen=True)
class SyntheticReader(Reader):
    """Computes the documents of a file NUMBER.txt.gz from NUMBER; the file itself is never read."""

    seed: int = 0
    file_documents: int = 1

    def read(self, shard: Shard, skipped: Any = None) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) of each document; one in COPIES is of an earlier file."""
        lines, words, lengths = line_pool(self.seed)
        for segment in shard:
            file = int(Path(segment.path).name.partition(".")[0])
            rng = random.Random(f"{self.seed} {file}")
            for number in range(self.file_documents):
                place = file, number
                if file and not rng.randrange(COPIES):
                    place = rng.randrange(file), rng.randrange(self.file_documents)
                own = random.Random(f"{self.seed} {place}")
                chosen = own.choices(range(LINES), k=own.choice(lengths))
                text = "\n".join([f"{place[0]}x{place[1]}", *[lines[line] for line in chosen]])
                yield segment.source, text, sum([words[line] for line in chosen]) + 1


class Corpus:
    """About `size` bytes of documents, as sparse files without content."""

    def __init__(self, size: float, directory: Path, seed: int = 0) -> None:
        pool = line_pool(seed)
        lines = float(np.mean(pool.lengths))
        words = lines * float(np.mean(pool.words)) + 1
        document = lines * float(np.mean([len(line.encode()) + 1 for line in pool.lines])) + 17
        self.bytes_per_word = document / words
        self.reader = SyntheticReader(seed=seed, file_documents=max(1, int(documents.SHARD_BYTES / document)))
        file_bytes = int(self.reader.file_documents * document)
        self.files = []
        for number in range(max(2, round(size / file_bytes))):
            path = directory / f"{number}.txt.gz"  # a shard each: compressed files are not cut
            with open(path, "wb") as file:
                file.truncate(file_bytes)
            self.files.append((SOURCES[number % len(SOURCES)], str(path)))
        self.documents = len(self.files) * self.reader.file_documents
        self.words = int(self.documents * words)
        """Expected; within 1% for more than 0.2 GB."""

    def settings(self) -> pipeline.StreamSettings:
        """Settings of a stream that takes nearly all words."""
        valid = min(500_000, self.words // 50)
        each = int(0.95 * self.words * (1 - 1 / COPIES) - valid) // (MEGA_BATCHES + 1)
        wanted = Wanted(MEGA_BATCHES, each, each, valid, SOURCES[0])
        return pipeline.StreamSettings(self.files, wanted, self.reader.seed, self.reader, VOCABULARY, {})


class _EnoughError(Exception):
    """Ends the pipeline when everything is measured."""


class MeasuredWork(Work):
    """Records a row per stage, and ends after `share` of the buckets are encoded."""

    def __init__(self, workers: int, corpus: Corpus, directory: Path, share: float) -> None:
        super().__init__(workers)
        self.rows: Rows = []
        self._corpus, self._directory, self._share = corpus, directory, share

    def run(self, stage: str, function: Callable[..., None], tasks: Sequence[Task], unit: str) -> None:
        """Run the stage and measure it."""
        words = self._corpus.words
        if stage == "encode":
            tasks = tasks[: math.ceil(self._share * len(tasks))]
            words = sum(task.weight for task in tasks)
        super().run(stage, function, tasks, unit)
        reads = stage not in ("sort", "cut", "plan", "tokenizer")  # all text
        seconds, usage = self.seconds[stage], self.usage[stage]
        disk = sum(512 * path.stat().st_blocks for path in self._directory.rglob("*"))
        self.rows.append(
            {
                "stage": stage,
                "tasks": len(tasks),
                "seconds": f"{seconds:.1f}",
                "CPU s": f"{usage.cpu:.1f}",
                "MB/s": f"{words * self._corpus.bytes_per_word / seconds / 1e6:.1f}" * reads,
                "peak MB of a process": f"{usage.peak / 1e6:.0f}",
                "disk GB": f"{disk / 1e9:.2f}",
            }
        )
        if stage == "encode":
            raise _EnoughError


def measure(gigabytes: float, directory: Path, workers: int, share: float) -> Rows:
    """A row per stage; `directory` is for temporary files."""
    inputs = directory / "corpus"
    inputs.mkdir()
    corpus = Corpus(gigabytes * 1e9, inputs)
    print(f"{corpus.documents:,} documents, about {corpus.words:,} words, in {len(corpus.files)} shards")
    work = MeasuredWork(workers, corpus, directory, share)
    with work, contextlib.suppress(_EnoughError):
        pipeline.make_stream(corpus.settings(), directory / "stream", work)
    return work.rows


def main(arguments: list[str]) -> None:
    """`python -m benchmarks data_prep_scale` with these arguments."""
    parser = Parser(prog="python -m benchmarks data_prep_scale", description=__doc__)
    add = parser.add_argument
    add("--gigabytes", type=float, required=True, metavar="G", help="size of the text")
    add("--out", type=Path, required=True, metavar="DIR", help="for temporary files: up to 1.5 x G GB")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, metavar="K", help=f"processes (default: all cores, {cores})")
    share = "share of the buckets to encode (default: 0.2)"
    add("--encode-share", type=float, default=0.2, metavar="S", help=share)
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the CSV")
    args = parser.parse_args(arguments)
    if not (args.gigabytes > 0 and args.workers > 0 and 0 < args.encode_share <= 1):
        raise UserError("--gigabytes, --workers and --encode-share are positive, the last at most 1")
    make_directory(args.out)
    make_directory(args.results)
    with tempfile.TemporaryDirectory(dir=args.out, prefix="scale-") as directory:
        rows = measure(args.gigabytes, Path(directory), args.workers, args.encode_share)
    show(
        args.results, Table("data_prep_scale", f"data_prep on {args.gigabytes:g} GB of synthetic text", rows)
    )
