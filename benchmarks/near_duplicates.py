"""`--near-duplicates drop` on real text: documents dropped against exact similarities, contamination, cost.

The first table compares the documents dropped with exact Jaccard similarities of all pairs. The second
makes streams with keep and drop, and measures the contamination of their test sets. With --gigabytes, the
third makes that much text of edited copies of the corpus, and measures each stage with keep and drop.
"""

import itertools
import os
import random
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
_EDITS = (0.002, 0.01, 0.05, 0.5)  # shares of words replaced in copies


def corpus_texts(path: Path) -> dict[bytes, bytes]:
    """Distinct documents of a file by their keys, in the order of the keys."""
    reader = Reader()
    found = {}
    for shard in documents.make_shards([("text", str(path))], reader):
        for _, text, _ in reader.read(shard):
            data = text.encode()
            found[content_key(data, 0)[: near_duplicates.DOCUMENT_BYTES]] = data
    return dict(sorted(found.items()))


def highest_similarities(texts: list[bytes]) -> np.ndarray:
    """(documents,) exact highest Jaccard similarity of each document to an earlier one."""
    grams, owners = near_duplicates.n_grams_of(texts)
    _, columns = np.unique(grams, return_inverse=True)
    sets = sparse.csr_matrix((np.ones(len(grams), np.int32), (owners, columns)))
    sets.sum_duplicates()
    sets.data[:] = 1
    sizes = np.diff(sets.indptr)
    found = np.zeros(len(texts))
    for start in range(0, len(texts), _ROWS):
        both = (sets[start : start + _ROWS] @ sets.T).tocoo()
        one, other = both.row + start, both.col
        similarity = both.data / (sizes[one] + sizes[other] - both.data)
        np.maximum.at(found, one[other < one], similarity[other < one])
    return found


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
        found = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder, Work(1) as work, Workers(1) as workers:
                made = stream([("text", str(path))], words, drop, Path(folder, "out"), work, seed)
                found.append(next(iter(contamination.contamination(made, workers) or ())))
        row: dict[str, Any] = {"text": path.name, "near duplicates": "drop" if drop else "keep"}
        row["dropped"] = made.corpus.get("near_duplicate_documents", 0)
        seen = {"8-grams": [each.seen for each in found]}
        seen["documents"] = [each.seen_documents for each in found]
        for name, shares in seen.items():
            row[name] = f"{np.mean(shares):.1%} [{min(shares):.1%}-{max(shares):.1%}]"
        rows.append(row)
    return rows


def write_copies(texts: list[bytes], size: float, folder: Path) -> tuple[list[tuple[str, str]], int]:
    """Files with about `size` bytes of edited copies, and their words."""
    rng = random.Random(0)
    files: list[tuple[str, str]] = []
    words = done = 0

    def edited() -> bytes:
        found = rng.choice(texts).split(b" ")
        for _ in range(int(len(found) * rng.choice(_EDITS))):
            found[rng.randrange(len(found))] = b"%x" % rng.getrandbits(24)
        return b" ".join(found)

    while done < size:
        path = folder / f"{len(files):03d}.txt"
        with open(path, "wb") as file:
            while file.tell() < min(100e6, size - done):
                text = edited()
                words += len(text.split())
                file.write(text + b"\n\n")
            done += file.tell()
        files.append(("text", str(path)))
    return files, words


def cost(paths: list[Path], gigabytes: float, workers: int) -> Rows:
    """A row for each stage: seconds, CPU seconds and peak memory of a process, with keep and drop."""
    texts = [text for path in paths for text in corpus_texts(path).values()]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files, words = write_copies(texts, gigabytes * 1e9, Path(folder))
        for drop in (False, True):
            with Work(workers) as work:
                # a tenth of the words, because near duplicates are most of the text
                made = stream(files, words // 10, drop, Path(folder, f"out{drop}"), work)
                for stage, usage in work.usage.items():
                    row: dict[str, Any] = {"near duplicates": "drop" if drop else "keep", "stage": stage}
                    row |= {"seconds": f"{work.seconds[stage]:.1f}", "CPU": f"{usage.cpu:.1f}"}
                    row |= {"peak MB": f"{usage.peak / 1e6:.0f}", "load": f"{os.getloadavg()[0]:.1f}"}
                    rows.append(row)
            print({key: value for key, value in made.corpus.items() if isinstance(value, int)})
    return rows


def main(arguments: list[str]) -> None:
    """`python -m benchmarks near_duplicates` with these arguments."""
    parser = Parser(prog="python -m benchmarks near_duplicates", description=__doc__)
    add = parser.add_argument
    add("corpus", nargs="+", type=Path, metavar="FILE", help="text; up to about 200 MB a file")
    add("--gigabytes", type=float, default=0, metavar="G", help="size of the edited copies (default: none)")
    add("--workers", type=int, default=1, metavar="K", help="processes for them (default: 1)")
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the CSV")
    args = parser.parse_args(arguments)
    make_directory(args.results)
    rows = [row for path in args.corpus for row in quality(path)]
    title = "share dropped, by exact similarity to an earlier document"
    show(args.results, Table("near_duplicates", title, rows))
    rows = [row for path in args.corpus for row in effect(path)]
    show(args.results, Table("near_duplicates_effect", "contamination of the test set", rows))
    if args.gigabytes:
        rows = cost(args.corpus, args.gigabytes, args.workers)
        show(args.results, Table("near_duplicates_cost", f"{args.gigabytes:g} GB of edited copies", rows))
