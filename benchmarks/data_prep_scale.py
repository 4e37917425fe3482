"""data_prep on gigabytes of synthetic text: time, memory and disk space per stage; takes up to an hour.

Documents are computed from their number when they are read, never stored. Words follow Zipf's law, lengths
are log-normal, and one document in 50 is a copy of one in another shard. The text is random, so encoding is
not as fast as on real text. With --documents there is no text: the records of a scan are made up, and only
the stages sort, cut and plan are measured.
"""

import contextlib
import functools
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from alma.errors import Parser, UserError, count
from alma.files import make_directory
from alma.processes import peak_memory, reset_peak_memory, resident_memory
from benchmarks.timing import Rows, Table, show
from data_prep import documents, pipeline
from data_prep.cut import Wanted
from data_prep.documents import Reader, Shard
from data_prep.scan import RECORD, write_run
from data_prep.work import Task, Work, Workspace, open_items

MEGA_BATCHES = 4
VOCABULARY = 50_000  # tokens to train
LINES = 1 << 16  # lines that documents are made of
LINE_WORDS = 20  # mean length of a line
WORDS = 200_000  # distinct words in LINES, at most; each document adds one of its own
MEDIAN_WORDS = 400  # of a document
COPIES = 50  # one document in COPIES is a duplicate
SOURCES = ("books", "web", "wiki")
MEAN_WORDS = 500  # of a made-up record
SHARD_RECORDS = documents.SHARD_BYTES // (6 * MEAN_WORDS)  # a word and its space have 6 bytes
RECORD_BYTES = 90  # on disk for each made-up record, all stages together
_SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"] + ["é", "ße", "ñu"]
_MASK = LINES - 1


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
    vocabulary = [_word(rank) for rank in range(WORDS)]
    counts = rng.integers(LINE_WORDS // 4, 2 * LINE_WORDS - LINE_WORDS // 4, LINES, endpoint=True)
    share = 1 / np.arange(1, WORDS + 1)
    ranks = iter(rng.choice(WORDS, counts.sum(), p=share / share.sum()).tolist())
    lines = [" ".join([vocabulary[rank] for rank in itertools.islice(ranks, n)]) for n in counts.tolist()]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]
    lengths = [max(1, round(MEDIAN_WORDS / LINE_WORDS * math.exp(z))) for z in quantiles]
    return LinePool(lines, counts.tolist(), lengths)


def _word(rank: int) -> str:
    word = ""
    while True:
        rank, digit = divmod(rank, len(_SYLLABLES))
        word += _SYLLABLES[digit]
        if not rank:
            return word
        rank -= 1


def mix(*numbers: int | np.ndarray) -> np.ndarray:
    """A random uint64 for each combination of numbers, by SplitMix64."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = (state ^ np.asarray(number, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


@dataclass(frozen=True)
class SyntheticReader(Reader):
    """Computes the documents of a file NUMBER.txt.gz from NUMBER; the file itself is never read."""

    seed: int = 0
    file_documents: int = 1

    def read(self, shard: Shard, skipped: Any = None) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) of each document."""
        lines, words, lengths = line_pool(self.seed)
        for segment in shard:
            for chance in self.chances(int(Path(segment.path).name.partition(".")[0])).tolist():
                first, step = chance & _MASK, chance >> 16 & _MASK | 1  # odd, so that no line repeats
                end = first + step * lengths[chance >> 32 & 4095]
                places = [place & _MASK for place in range(first, end, step)]
                own = f"{chance:x}"  # a word that makes the document unique
                text = "\n".join([own, *[lines[place] for place in places]])
                yield segment.source, text, sum([words[place] for place in places]) + 1

    def chances(self, file: int) -> np.ndarray:
        """The number that determines each document; a copy has that of a document of an earlier file."""
        numbers = np.arange(self.file_documents)
        own = mix(self.seed, file, numbers)
        if not file:
            return own
        other = mix(self.seed + 1, file, numbers)
        copied = mix(self.seed, other % np.uint64(file), (other >> np.uint64(32)) % np.uint64(len(numbers)))
        return np.where(mix(self.seed + 2, file, numbers) % np.uint64(COPIES) == 0, copied, own)


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
        wanted = nearly_all(self.words)
        return pipeline.StreamSettings(self.files, wanted, self.reader.seed, self.reader, VOCABULARY, {})


def nearly_all(words: int) -> Wanted:
    """The sizes of a stream that takes nearly all of the words."""
    valid = min(500_000, words // 50)
    each = int(0.95 * words * (1 - 1 / COPIES) - valid) // (MEGA_BATCHES + 1)
    return Wanted(MEGA_BATCHES, each, each, valid, SOURCES[0])


class Records:
    """The records of `documents` documents, as a scan would make them; words follow a power law."""

    bytes_per_word = 6.0

    def __init__(self, documents: int) -> None:
        self.reader = SyntheticReader(file_documents=min(SHARD_RECORDS, max(1, documents // 2)))
        self.shards = documents // self.reader.file_documents
        self.documents = self.shards * self.reader.file_documents
        self.words = int(0.97 * MEAN_WORDS * self.documents)
        """Fewer than there are, because the longest are cut."""

    def write(self, space: Workspace, number: int) -> None:
        """Write the scan of a shard; a copy has all hashes of its original."""
        chances = self.reader.chances(number)
        records = np.zeros(len(chances), RECORD)
        for field, name in enumerate(("high", "low", "second")):
            records[name] = mix(chances, field)
        share = (mix(chances, 3) >> np.uint64(11)) / 2**53
        records["words"] = np.minimum(MEAN_WORDS / 3 * (1 - share) ** (-2 / 3), 1e6)
        records["bytes"] = self.bytes_per_word * records["words"]
        records["source"], records["shard"] = number % len(SOURCES), number
        records["place"] = np.arange(len(records))
        with open_items(space.file("scan", number, "bin")) as file:
            write_run(file, records)


@functools.lru_cache(maxsize=1)
def _memory_before(log: Path) -> int:
    """Memory before this process's first task of a stage, whose name `log` has; restarts its peak."""
    reset_peak_memory()
    return resident_memory()


def logged(log: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call the function, then append to `log`: process id, memory before the stage, peak so far."""
    before = _memory_before(log)
    function(*arguments)
    with open(log, "a") as file:  # one short write, so the lines of several processes do not mix
        file.write(f"{os.getpid()} {before} {peak_memory()}\n")


class _EnoughError(Exception):
    """Ends the pipeline when everything is measured."""


class MeasuredWork(Work):
    """Records a row per stage, and ends after `share` of the buckets are encoded."""

    def __init__(self, workers: int, corpus: Corpus | Records, directory: Path, share: float = 1) -> None:
        super().__init__(workers)
        self.rows: Rows = []
        self._corpus, self._directory, self._share = corpus, directory, share

    def run(self, stage: str, function: Callable[..., None], tasks: Sequence[Task], unit: str) -> None:
        """Run the stage, each task `logged`."""
        words = self._corpus.words
        if stage == "encode":
            tasks = tasks[: math.ceil(self._share * len(tasks))]
            words = sum(task.weight for task in tasks)
        log = self._directory / f"{stage}.log"
        reset_peak_memory()
        super().run(stage, functools.partial(logged, log, function), tasks, unit)
        records = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
        self.rows.append(self._row(stage, words, records))
        if stage == "encode":
            raise _EnoughError

    def _row(self, stage: str, words: int, records: list[tuple[int, ...]]) -> dict[str, Any]:
        seconds = self.seconds[stage]
        reads = stage not in ("sort", "cut", "plan", "tokenizer")  # all text
        peaks = {process: peak for process, _, peak in records}  # the last line of each
        early = max(peak for *_, peak in records[: max(1, len(records) // 10)])
        disk = sum(512 * path.stat().st_blocks for path in self._directory.rglob("*"))
        return {
            "stage": stage,
            "tasks": len(records),
            "seconds": f"{seconds:.1f}",
            "MB/s": f"{words * self._corpus.bytes_per_word / seconds / 1e6:.1f}" * reads,
            "words/s": f"{words / seconds / 1e6:.2f}M" * reads,
            "peak MB of each process": " ".join(f"{peak / 1e6:.0f}" for peak in peaks.values()),
            "after a tenth of the tasks": f"{early / 1e6:.0f}",
            "main process": f"{peak_memory() / 1e6:.0f}",
            "disk GB": f"{disk / 1e9:.2f}",
        }


def measure(gigabytes: float, directory: Path, workers: int, share: float) -> Rows:
    """A row per stage; `directory` is for temporary files."""
    inputs = directory / "corpus"
    inputs.mkdir()
    corpus = Corpus(gigabytes * 1e9, inputs)
    (shard, *_) = documents.make_shards(corpus.files, corpus.reader, documents.SHARD_BYTES)
    started = time.perf_counter()
    made = sum(len(text.encode()) + 1 for _, text, _ in corpus.reader.read(shard))
    print(
        f"{corpus.documents:,} documents, about {corpus.words:,} words, in {len(corpus.files)} shards; "
        f"making the text, twice: {made / (time.perf_counter() - started) / 1e6:.0f} MB/s a core"
    )
    work = MeasuredWork(workers, corpus, directory, share)
    with work, contextlib.suppress(_EnoughError):
        pipeline.make_stream(corpus.settings(), directory / "stream", work)
    return work.rows


def measure_plan(documents: int, directory: Path, workers: int) -> Rows:
    """A row for each of the stages sort, cut and plan; `directory` is for temporary files."""
    records = Records(documents)
    place = directory / "work"
    place.mkdir()
    space = Workspace(place, 0, Reader(), SOURCES)
    wanted = nearly_all(records.words)
    print(f"{records.documents:,} records in {records.shards:,} shards")
    work = MeasuredWork(workers, records, directory)
    with work:
        scans = [(space.file("scan", number, "bin"), number) for number in range(records.shards)]
        tasks = [Task(path, 1, (space, number)) for path, number in scans]
        work.run("records", records.write, tasks, "shard")
        ranges = pipeline.sort_documents(space, wanted, work, records.shards, [])
        plan = pipeline.plan_buckets(space, wanted, work, ranges)
    print(
        f"{ranges:,} ranges, {len(plan.bucket_split):,} buckets; {plan.words:,} words, "
        f"{plan.duplicate_documents:,} duplicates"
    )
    return work.rows[1:]


def main(arguments: list[str]) -> None:
    """`python -m benchmarks data_prep_scale` with these arguments."""
    parser = Parser(prog="python -m benchmarks data_prep_scale", description=__doc__)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gigabytes", type=float, metavar="G", help="size of the text")
    size.add_argument("--documents", type=count, metavar="N", help="made-up records, without text")
    temporary = f"for temporary files: up to 1.5 x G GB, or {RECORD_BYTES} x N bytes"
    add("--out", type=Path, required=True, metavar="DIR", help=temporary)
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=cores, metavar="K", help=f"processes (default: all cores, {cores})")
    share = "share of the buckets to encode (default: 0.2)"
    add("--encode-share", type=float, default=0.2, metavar="S", help=share)
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the CSV")
    args = parser.parse_args(arguments)
    if not ((args.documents or args.gigabytes > 0) and args.workers > 0 and 0 < args.encode_share <= 1):
        raise UserError("--gigabytes, --workers and --encode-share are positive, the last at most 1")
    make_directory(args.out)
    make_directory(args.results)
    needed = RECORD_BYTES * args.documents / 1e9 if args.documents else 1.5 * args.gigabytes
    free = shutil.disk_usage(args.out).free / 1e9
    if free < needed:
        raise UserError(f"{args.out}: {free:.0f} GB free, {needed:.0f} are needed; choose another --out")
    with tempfile.TemporaryDirectory(dir=args.out, prefix="scale-") as directory:
        if args.documents:
            rows = measure_plan(args.documents, Path(directory), args.workers)
            table = Table("data_prep_plan", f"the plan of {args.documents:,} made-up documents", rows)
        else:
            rows = measure(args.gigabytes, Path(directory), args.workers, args.encode_share)
            table = Table("data_prep_scale", f"data_prep on {args.gigabytes:g} GB of synthetic text", rows)
    show(args.results, table)
