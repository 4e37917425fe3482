"""Near duplicates: `alma data` beside datatrove and text-dedup, in one process: CPU seconds (user),
errors.

A tenth of the documents gets a copy in which FEW of the words are replaced, a twentieth one with
MORE. All take sets of word 5-grams; the text is lower-case words between spaces, so that these sets
are the same.
"""

import functools
import itertools
import json
import os
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from alma.errors import Parser
from alma.files import make_directory
from benchmarks.data_prep import dropped_keys, highest_similarities
from benchmarks.timing import Rows, Table, show, spread
from data_prep.documents import Reader, make_shards
from data_prep.inputs import named_files
from data_prep.near_duplicates import BANDS, KEY, ROWS, THRESHOLD, N
from data_prep.scan import content_key

LEAST = 50  # words of a document
MOST = 400
FEW = 0.01  # share of the words
MORE = 0.05


def documents(
    corpus: list[str], count: int
) -> tuple[list[str], dict[float, list[tuple[int, int]]]]:
    """`count` texts, then copies; the numbers of a text and its copy, by the share of words that
    differ."""
    texts_of_source: dict[str, dict[str, None]] = defaultdict(dict)
    files = named_files(corpus)
    rng = random.Random(0)
    count_of_source = count // len({name for name, _ in files})
    for shard in make_shards(files, Reader()):
        for source, text, _ in Reader().read(shard):
            if len(texts_of_source[source]) >= count_of_source:
                continue
            words = re.findall(r"\w+", text.lower())
            if len(words) >= LEAST:
                texts_of_source[source][" ".join(words[:MOST])] = None
    texts = list(itertools.chain(*texts_of_source.values()))
    pairs: dict[float, list[tuple[int, int]]] = {FEW: [], MORE: []}
    for place, number in enumerate(rng.sample(range(len(texts)), len(texts) * 15 // 100)):
        share = MORE if place % 3 == 2 else FEW
        words = texts[number].split()
        for at in rng.sample(range(len(words)), max(1, round(share * len(words)))):
            words[at] = f"replaced{place}x{at}"
        pairs[share].append((number, len(texts)))
        texts.append(" ".join(words))
    return texts, pairs


def by_alma(texts: list[str], folder: Path) -> set[int]:
    """The numbers of the texts that are dropped."""
    data = {content_key(text.encode(), 0): text.encode() for text in texts}
    near = np.isin(np.array(list(data)).astype(KEY), dropped_keys(data, folder))
    return set(np.flatnonzero(near).tolist())


def by_datatrove(bands: int, rows: int, texts: list[str], folder: Path) -> set[int]:
    """As `by_alma`; words by str.split, as its own tokenizer for English would be most of the
    time."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.word_tokenizers import WordTokenizer

    split = {
        "word_tokenize": lambda _, text: text.split(),
        "sent_tokenize": None,
        "span_tokenize": None,
    }
    config = minhash.MinhashConfig(N, bands, rows)
    signatures, pairs, out = (str(folder / name) for name in ("signatures", "pairs", "out"))
    tokenizer = type("Words", (WordTokenizer,), split)()
    step = minhash.MinhashDedupSignature(signatures, config, tokenizer)
    step.run(Document(text, str(number)) for number, text in enumerate(texts))
    for rank in range(bands):
        minhash.MinhashDedupBuckets(signatures, pairs, config=config).run(
            rank=rank, world_size=bands
        )
    minhash.MinhashDedupCluster(pairs, out, config=config).run()
    return set(np.fromfile(f"{out}/000000.remove", "<u4").tolist())


def by_text_dedup(flags: str, texts: list[str], folder: Path) -> set[int]:
    """As `by_alma`; with its faster hash function."""
    from datasets import load_from_disk
    from text_dedup.minhash import main as deduplicate

    rows = (json.dumps({"id": number, "text": text}) for number, text in enumerate(texts))
    (folder / "texts.jsonl").write_text("\n".join(rows))
    words = (
        f"--path json --data_files {folder}/texts.jsonl --split train --column text --num_proc 1"
    )
    words += f" --cache_dir {folder}/cache --output {folder}/out --hash_func xxh3"
    words += f" --ngram {N} --num_perm {BANDS * ROWS} {flags}"
    deduplicate(words.split(), standalone_mode=False)
    return set(range(len(texts))) - set(load_from_disk(f"{folder}/out")["id"])


def measure(texts: list[str], pairs: dict[float, list[tuple[int, int]]]) -> Rows:
    """A row for each tool that is installed."""
    encoded = [text.encode() for text in texts]
    to_earlier = highest_similarities(encoded)
    to_later = highest_similarities(encoded[::-1])[::-1]
    is_near = np.maximum(to_earlier, to_later) >= THRESHOLD
    tools = {f"alma data, {BANDS} x {ROWS}": by_alma}
    for bands, rows in ((BANDS, ROWS), (14, 8)):
        tools[f"datatrove, {bands} x {rows}"] = functools.partial(by_datatrove, bands, rows)
    for flags in (f"--b {BANDS} --r {ROWS}", f"--threshold {THRESHOLD}"):
        tools[f"text_dedup, {flags}"] = functools.partial(by_text_dedup, flags)
    for name in [name for name in list(tools)[1:] if not find_spec(name.split(",")[0])]:
        print(f"{name}: not installed")
        del tools[name]
    figures: dict[str, list[list[float]]] = defaultdict(list)
    for turn, (name, tool) in itertools.product(range(4), tools.items()):
        with tempfile.TemporaryDirectory() as folder:
            before = os.times()
            dropped = tool(texts if turn else texts[:99] * 2, Path(folder))  # at first it imports
            row = [np.subtract(os.times(), before)[[0, 2]].sum()]
        if turn == 0:
            continue
        for copies in pairs.values():
            row.append(np.mean([bool({*pair} & dropped) for pair in copies]))
        row.append(np.mean(is_near[[*dropped]]))
        figures[name].append(row)
    our_seconds = [row[0] for row in next(iter(figures.values()))]
    table: Rows = []
    for name, values in figures.items():
        tool_seconds = [row[0] for row in values]
        ratios = [theirs / ours for theirs, ours in zip(tool_seconds, our_seconds, strict=True)]
        _, few_share, more_share, precision = np.mean(values, axis=0).round(3)
        table.append(
            {
                "tool, bands x hashes": name,
                "CPU s": spread(tool_seconds),
                "relative": spread(ratios),
                f"found at {FEW:.0%}": few_share,
                f"at {MORE:.0%}": more_share,
                f"precision at {THRESHOLD}": precision,
            }
        )
    return table


def main(words: Sequence[str]) -> None:
    """Entry point of `python -m benchmarks near_duplicates`."""
    parser = Parser(prog="python -m benchmarks near_duplicates", description=__doc__)
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="CORPUS", help="as for `alma data`"
    )
    parser.add_argument("--documents", type=int, default=5000, metavar="N", help="default: 5000")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    args = parser.parse_args(words)
    make_directory(args.out)
    texts, pairs = documents(args.text, args.documents)
    show(
        args.out, Table("near_duplicate_tools", f"{len(texts):,} documents", measure(texts, pairs))
    )
