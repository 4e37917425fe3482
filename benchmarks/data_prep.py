"""data_prep: its stages, its encoder against SentencePiece, and near duplicates against exact
similarities.

The stages can be measured on gigabytes of made-up text instead. Its documents are computed from
their number when they are read, never stored. Words follow Zipf's law, and one document in COPIES
is a copy of one of an earlier file. Such text is random, so encoding is not as fast as on real
text.
"""

import functools
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import sentencepiece
from scipy import sparse
from tqdm import tqdm

from alma.processes import peak_memory, reset_peak_memory
from alma.workers import Workers
from benchmarks.timing import Rows, Table, spread
from data_prep import near_duplicates
from data_prep.contamination import contamination
from data_prep.corpus import pydoc
from data_prep.corpus.__main__ import write
from data_prep.cut import Splits
from data_prep.dictionary import EOS, UNKNOWN
from data_prep.documents import SHARD_BYTES, Reader, Shard, make_shards
from data_prep.inputs import named_files
from data_prep.pipeline import make_stream
from data_prep.scan import content_key
from data_prep.settings import StreamSettings
from data_prep.tokenizer import MODEL, SentencePiece
from data_prep.work import Task, Work, Workspace, mapped, open_items

Files = list[tuple[str, str]]
"""(source, path) of each."""

MEGA_BATCHES = 4
VOCABULARY = 50_000  # tokens to train, as in the paper
MAX_DOCUMENT_WORDS = 5000  # so that small mega-batches of books meet their size
SAMPLE_BYTES = 20_000_000  # of text that is encoded and searched for near duplicates
BLOCK = 10_000  # lines per call of SentencePiece
LEAST_RUNS = 3  # for quartiles
BORDERS = (0, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.01)  # of similarities
SEEDS = 5  # random orders of the streams whose contamination is measured
SMALL_VOCABULARY = 8000  # of those streams
LINES = 1 << 16  # distinct lines of made-up text
LINE_WORDS = 20
WORDS = 200_000  # distinct words in LINES, at most; each document adds one of its own
FILE_DOCUMENTS = 25_000  # of a made-up file: about SHARD_BYTES
COPIES = 50
_ROWS = 500  # documents whose similarities to all others are computed at once


@functools.lru_cache(maxsize=1)
def line_pool() -> list[str]:
    """The lines that made-up documents consist of; short words are the frequent ones."""
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
    words = (
        "".join(word) for size in (1, 2, 3) for word in itertools.product(syllables, repeat=size)
    )
    vocabulary = list(itertools.islice(words, WORDS))
    share = 1 / np.arange(1, WORDS + 1)
    ranks = np.random.default_rng(0).choice(WORDS, (LINES, LINE_WORDS), p=share / share.sum())
    lines = []
    for row in ranks.tolist():
        lines.append(" ".join([vocabulary[rank] for rank in row]))
    return lines


@dataclass(frozen=True)
class MadeUpReader(Reader):
    """Computes the documents of a file NUMBER.txt.gz from NUMBER; the file itself is never read."""

    def read(self, shard: Shard, skipped: Any = None) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) of each document."""
        for segment in shard:
            file = int(Path(segment.path).name.partition(".")[0])
            rng = random.Random(file)
            for number in range(FILE_DOCUMENTS):
                place = file, number
                if file and not rng.randrange(COPIES):
                    place = rng.randrange(file), rng.randrange(FILE_DOCUMENTS)
                document_rng = random.Random(f"{place}")
                count = 1 + int(document_rng.expovariate(1 / LINE_WORDS))
                lines = document_rng.choices(line_pool(), k=count)
                text = "\n".join([f"{place[0]}x{place[1]}", *lines])
                yield segment.source, text, LINE_WORDS * len(lines) + 1


def made_up(gigabytes: float, folder: Path) -> Files:
    """Sparse files without content, a shard each."""
    files = []
    for number in range(max(2, round(gigabytes * 1e9 / SHARD_BYTES))):
        path = folder / f"{number}.txt.gz"
        with open(path, "wb") as file:
            file.truncate(SHARD_BYTES)
        files.append((("books", "web", "wiki")[number % 3], str(path)))
    return files


class MeasuredWork(Work):
    """Keeps the costs of each stage; the only worker is this process."""

    def __init__(self) -> None:
        super().__init__(1)
        self.costs: dict[str, tuple[float, float, float]] = {}
        """Seconds, CPU seconds and peak MB."""

    def run(self, stage: str, tasks: Sequence[Task], unit: str) -> None:
        """Run the stage and measure it."""
        reset_peak_memory()
        started = time.process_time()
        super().run(stage, tasks, unit)
        self.costs[stage] = self.seconds[stage], time.process_time() - started, peak_memory() / 1e6


def stages(files: Files, reader: Reader, repeats: int, out: Path) -> Rows:
    """A row per stage, on one core; the last stream stays in `out`."""
    size = 0
    words = Counter[str]()
    for shard in make_shards(files, reader):
        for source, text, count in reader.read(shard):
            size += len(text.encode()) + 1
            words[source] += count
    source, largest = words.most_common(1)[0]
    valid = min(500_000, largest // 20)
    unique = int(0.7 * (words.total() - valid))  # the rest may be duplicates
    split_words = unique // (MEGA_BATCHES + 1)
    splits = Splits(MEGA_BATCHES, split_words, split_words, valid, source)
    settings = StreamSettings(files, splits, 0, reader, VOCABULARY, {})
    runs = defaultdict(list)
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        shutil.rmtree(out, ignore_errors=True)
        work = MeasuredWork()
        with work:
            make_stream(settings, out, work)
        for stage, costs in work.costs.items():
            runs[stage].append(costs)
    rows: Rows = []
    for stage, measured in runs.items():
        seconds, cpu, peaks = zip(*measured, strict=True)
        row: dict[str, Any] = {"stage": stage, "MB": f"{size / 1e6:.0f}"}
        for name, values in (("s / 100 MB", seconds), ("CPU s / 100 MB", cpu)):
            shown = [1e8 / size * value for value in values]
            row[name] = spread(shown) if repeats > 1 else f"{shown[0]:.2f}"
        rows.append(row | {"peak MB": f"{max(peaks):.0f}"})
    return rows


def encoding(model: Path, lines: list[str], repeats: int) -> Rows:
    """One row: data_prep's encoder with an empty cache against SentencePiece's; CPU time of this
    process."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    cuts = [lines[start : start + BLOCK] for start in range(0, len(lines), BLOCK)]
    pairs = []
    for _ in tqdm(range(repeats), disable=None, unit="turn"):
        started = time.process_time()
        encoder = SentencePiece(model)
        ids = b"".join([encoder.encode(["\n".join(block)])[:-1].tobytes() for block in cuts])
        turned = time.process_time()
        peer_ids = [processor.encode(block, num_threads=1) for block in cuts]
        pairs.append((turned - started, time.process_time() - turned))
    # fairseq's ids are SentencePiece's plus 1, but for <unk>
    expected = (
        i + 1 if i else UNKNOWN for block in peer_ids for line in block for i in [*line, EOS - 1]
    )
    if ids != np.fromiter(expected, encoder.dtype).tobytes():
        raise AssertionError("the ids are not SentencePiece's")
    size = sum(len(line.encode()) + 1 for line in lines) / 1e6
    our_seconds = median([ours for ours, _ in pairs])
    peer_seconds = median([peer for _, peer in pairs])
    return [
        {
            "MB": f"{size:.1f}",
            "lines": len(lines),
            "data_prep, MB/s": f"{size / our_seconds:.2f}",
            "SentencePiece, MB/s": f"{size / peer_seconds:.2f}",
            "time, SentencePiece / data_prep": spread([peer / ours for ours, peer in pairs]),
        }
    ]


def highest_similarities(texts: list[bytes]) -> np.ndarray:
    """(documents,) exact highest Jaccard similarity of each document to an earlier one."""
    grams, owners = near_duplicates.n_grams_of(texts)
    _, columns = np.unique(grams, return_inverse=True)
    sets = sparse.csr_matrix((np.ones(len(grams), np.int32), (owners, columns)))
    sets.sum_duplicates()
    sets.data[:] = 1
    sizes = np.diff(sets.indptr)
    highest = np.zeros(len(texts))
    for start in range(0, len(texts), _ROWS):
        both = (sets[start : start + _ROWS] @ sets.T).tocoo()
        document = both.row + start
        peer = both.col
        similarity = both.data / (sizes[document] + sizes[peer] - both.data)
        is_earlier = peer < document
        np.maximum.at(highest, document[is_earlier], similarity[is_earlier])
    return highest


def dropped_keys(data: dict[bytes, bytes], folder: Path) -> np.ndarray:
    """The beginnings of the content keys of the near duplicates among texts, given by their content
    keys."""
    space = Workspace(folder, 0, Reader(), ())
    entries, near = (space.file(name, 0, "bin") for name in ("entries", "near"))
    with open_items(entries) as file:
        writer = near_duplicates.EntryWriter(file, {"web": 0})
        for key, text in data.items():
            writer.add(key, "web", text)
        writer.finish()
    near_duplicates.write_bands(space, 0, entries)
    near_duplicates.find_range(space, 0, 1, 1, (), 0)
    return np.array(mapped(near, near_duplicates.NEAR)["key"])


def dropped_by_similarity(texts: list[str], folder: Path) -> Rows:
    """A row for each interval of exact similarities: documents, and the share that is dropped."""
    data = {content_key(text.encode(), 0): text.encode() for text in texts}
    data = dict(sorted(data.items()))
    keys = np.array(list(data)).astype(near_duplicates.KEY)
    dropped = np.isin(keys, dropped_keys(data, folder))
    exact = highest_similarities(list(data.values()))
    rows: Rows = []
    for low, high in itertools.pairwise(BORDERS):
        within = (exact >= low) & (exact < high)
        share = f"{dropped[within].mean():.3f}" if within.any() else ""
        row = {"similarity": f"{low:.2f}-{min(high, 1):.2f}", "documents": int(within.sum())}
        rows.append(row | {"dropped": share})
    return rows


def contaminated(files: Files, words: int, folder: Path) -> Rows:
    """Contamination of the test set with keep and drop, of several random orders."""
    splits = Splits(MEGA_BATCHES, words * 6 // 40, words * 6 // 100, words // 100, files[-1][0])
    rows: Rows = []
    for drop in (False, True):
        shares = []
        for seed in range(SEEDS):
            settings = StreamSettings(
                files, splits, seed, Reader(), SMALL_VOCABULARY, {}, near_duplicates=drop
            )
            with Work(1) as work, Workers(1) as workers:
                stream = make_stream(settings, folder / f"{drop}{seed}", work)
                shares.append(contamination(stream, workers)["test"])
        row: dict[str, Any] = {"near duplicates": "drop" if drop else "keep"}
        grams, documents = zip(*shares, strict=True)
        for name, values in (("8-grams", grams), ("documents", documents)):
            row[name] = f"{np.mean(values):.1%} [{min(values):.1%}-{max(values):.1%}]"
        rows.append(row)
    return rows


def measure(repeats: int, corpus: Sequence[str] = (), gigabytes: float = 0) -> Iterator[Table]:
    """The tables of some text, by default installed documentation; or of made-up text the first
    one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if gigabytes:
            files = made_up(gigabytes, folder)
            title = f"data_prep on {gigabytes:g} GB of made-up text"
            yield Table(
                "data_prep_stages", title, stages(files, MadeUpReader(), 1, folder / "stream")
            )
            return
        if not corpus:
            corpus = [str(folder / "pydoc.jsonl")]
            left_out: Counter[str] = Counter()
            write(pydoc.documents("", left_out), corpus[0], left_out)
        files = named_files(list(corpus))
        reader = Reader(max_document_words=MAX_DOCUMENT_WORDS)
        rows = stages(files, reader, max(LEAST_RUNS, repeats // 2), folder / "stream")
        yield Table("data_prep_stages", "data_prep, one core", rows)
        texts = []
        size = 0
        words = 0
        for shard in make_shards(files, Reader()):
            for _, text, count in Reader().read(shard):
                words += count
                if size < SAMPLE_BYTES:
                    texts.append(text)
                    size += len(text)
        lines = [line for text in texts for line in text.split("\n")]
        rows = encoding(folder / "stream" / MODEL, lines, repeats)
        yield Table("data_prep_encoding", "Encoding lines, CPU seconds", rows)
        title = "share dropped, by exact similarity to an earlier document"
        yield Table("near_duplicates", title, dropped_by_similarity(texts, folder))
        rows = contaminated(files, words, folder)
        yield Table("near_duplicates_effect", "contamination of the test set", rows)
