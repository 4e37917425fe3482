"""`--near-duplicates drop` on real text: documents dropped against exact similarities, contamination, cost.

The first table compares the documents dropped with exact Jaccard similarities of all pairs. The second
makes streams with keep and drop, and measures the contamination of their test sets.
"""

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from alma.errors import Parser
from alma.files import make_directory
from alma.workers import Workers
from benchmarks.timing import Rows, Table, show
from data_prep import contamination, documents, near_duplicates, pipeline
from data_prep.cut import Wanted
from data_prep.documents import Reader
from data_prep.pipeline import StreamSettings
from data_prep.scan import content_key
from data_prep.work import Work, Workspace, mapped

BORDERS = (0, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.01)
SEEDS = 5  # random orders, of which the mean and the range of the contamination are shown
_ROWS = 500  # documents whose similarities to all others are computed at once


def corpus_texts(path: Path) -> dict[bytes, bytes]:
    """Distinct documents of a file by their keys, in the order of the keys."""
    reader, texts = Reader(), {}
    for shard in documents.make_shards([("text", str(path))], reader):
        for _, text, _ in reader.read(shard):
            data = text.encode()
            texts[content_key(data, 0)[: near_duplicates.DOCUMENT_BYTES]] = data
    return dict(sorted(texts.items()))


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
        one, other = both.row + start, both.col
        similarity = both.data / (sizes[one] + sizes[other] - both.data)
        np.maximum.at(highest, one[other < one], similarity[other < one])
    return highest


def dropped_documents(texts: dict[bytes, bytes]) -> tuple[np.ndarray, float, float]:
    """(documents,) whether each is dropped; MB/s of the hashes; seconds of the rest."""
    with tempfile.TemporaryDirectory() as folder:
        space = Workspace(Path(folder), 0, Reader(), ())
        entries, bands, near = (space.file(name, 0, "bin") for name in ("entries", "bands", "near"))
        started = time.process_time()
        with near_duplicates.writing_entries(entries) as writer:
            for key, text in texts.items():
                writer.add(text, key, 0)
        hashed = time.process_time()
        near_duplicates.write_bands(entries, bands)
        near_duplicates.find_range(space, 0, 1, 1, (), 0)
        ended = time.process_time()
        keys = np.array(list(texts), near_duplicates.KEY)
        dropped = np.isin(keys, mapped(near, near_duplicates.NEAR)["key"])
    return dropped, sum(map(len, texts.values())) / 1e6 / (hashed - started), ended - hashed


def quality(path: Path) -> Rows:
    """A row for each interval of exact similarities."""
    texts = corpus_texts(path)
    dropped, speed, seconds = dropped_documents(texts)
    exact = highest_similarities(list(texts.values()))
    true = exact >= near_duplicates.THRESHOLD
    print(
        f"{path.name}: {len(texts):,} distinct documents, {true.sum():,} near duplicates, {dropped.sum():,} "
        f"dropped: precision {(true & dropped).sum() / max(dropped.sum(), 1):.3f}, recall "
        f"{(true & dropped).sum() / max(true.sum(), 1):.3f}; hashes {speed:.0f} MB/s, pairs {seconds:.2f} s"
    )
    rows = []
    for low, high in itertools.pairwise(BORDERS):
        within = (exact >= low) & (exact < high)
        share = f"{dropped[within].mean():.3f}" if within.any() else ""
        row = {"text": path.name, "similarity": f"{low:.2f}-{min(high, 1):.2f}"}
        rows.append(row | {"documents": int(within.sum()), "dropped": share})
    return rows


def stream(files: list[tuple[str, str]], words: int, drop: bool, out: Path, work: Work, seed: int = 0) -> Any:
    """A stream of two thirds of the words, in four mega-batches and a test set."""
    wanted = Wanted(4, words * 6 // 40, words * 6 // 100, words // 100, files[-1][0])
    settings = StreamSettings(files, wanted, seed, Reader(), 8000, {}, near_duplicates=drop)
    return pipeline.make_stream(settings, out, work)


def effect(path: Path) -> Rows:
    """Contamination of the test set with keep and drop, of several random orders."""
    words = sum(len(text.split()) for text in corpus_texts(path).values())
    rows = []
    for drop in (False, True):
        shares = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder, Work(1) as work, Workers(1) as workers:
                made = stream([("text", str(path))], words, drop, Path(folder, "out"), work, seed)
                shares.append(next(iter(contamination.contamination(made, workers) or ())))
        row: dict[str, Any] = {"text": path.name, "near duplicates": "drop" if drop else "keep"}
        row["dropped"] = made.corpus.get("near_duplicate_documents", 0)
        for name, field in (("8-grams", "seen"), ("documents", "seen_documents")):
            values = [getattr(share, field) for share in shares]
            row[name] = f"{np.mean(values):.1%} [{min(values):.1%}-{max(values):.1%}]"
        rows.append(row)
    return rows


def main(arguments: list[str]) -> None:
    """`python -m benchmarks near_duplicates` with these arguments."""
    parser = Parser(prog="python -m benchmarks near_duplicates", description=__doc__)
    add = parser.add_argument
    add("corpus", nargs="+", type=Path, metavar="FILE", help="text; up to about 200 MB a file")
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the CSV")
    args = parser.parse_args(arguments)
    make_directory(args.results)
    rows = [row for path in args.corpus for row in quality(path)]
    title = "share dropped, by exact similarity to an earlier document"
    show(args.results, Table("near_duplicates", title, rows))
    rows = [row for path in args.corpus for row in effect(path)]
    show(args.results, Table("near_duplicates_effect", "contamination of the test set", rows))
