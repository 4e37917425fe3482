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
from data_prep.near_duplicates import BANDS, KEY, ROWS, THRESHOLD, N
from data_prep.options import named_files
from data_prep.scan import content_key

LEAST, MOST, FEW, MORE = 50, 400, 0.01, 0.05  # words of a document; share of the words


def documents(
    corpus: list[str], count: int
) -> tuple[list[str], dict[float, list[tuple[int, int]]]]:
    """`count` texts, then copies; the numbers of a text and its copy, by the share of words that
    differ."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    files, rng = named_files(corpus), random.Random(0)
    for shard in make_shards(files, Reader()):
        for source, text, _ in Reader().read(shard):
            enough = len(found[source]) >= count // len({name for name, _ in files})
            if not enough and len(words := re.findall(r"\w+", text.lower())) >= LEAST:
                found[source][" ".join(words[:MOST])] = None
    texts = list(itertools.chain(*found.values()))
    pairs: dict[float, list[tuple[int, int]]] = {FEW: [], MORE: []}
    for place, number in enumerate(rng.sample(range(len(texts)), len(texts) * 15 // 100)):
        share, words = MORE if place % 3 == 2 else FEW, texts[number].split()
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
    found, pairs, out = (str(folder / name) for name in ("signatures", "pairs", "out"))
    step = minhash.MinhashDedupSignature(found, config, type("Words", (WordTokenizer,), split)())
    step.run(Document(text, str(number)) for number, text in enumerate(texts))
    for rank in range(bands):
        minhash.MinhashDedupBuckets(found, pairs, config=config).run(rank=rank, world_size=bands)
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
    exact = [
        highest_similarities([text.encode() for text in texts[::step]])[::step] for step in (1, -1)
    ]
    tools = {f"alma data, {BANDS} x {ROWS}": by_alma}
    for bands, rows in ((BANDS, ROWS), (14, 8)):
        tools[f"datatrove, {bands} x {rows}"] = functools.partial(by_datatrove, bands, rows)
    for flags in (f"--b {BANDS} --r {ROWS}", f"--threshold {THRESHOLD}"):
        tools[f"text_dedup, {flags}"] = functools.partial(by_text_dedup, flags)
    for name in [name for name in list(tools)[1:] if not find_spec(name.split(",")[0])]:
        print(f"{name}: not installed")
        del tools[name]
    found: dict[str, list[list[float]]] = defaultdict(list)
    for turn, (name, tool) in itertools.product(range(4), tools.items()):
        with tempfile.TemporaryDirectory() as folder:
            before = os.times()
            dropped = tool(texts if turn else texts[:99] * 2, Path(folder))  # at first it imports
            row = [np.subtract(os.times(), before)[[0, 2]].sum()]
        row += [np.mean([bool({*pair} & dropped) for pair in each]) for each in pairs.values()]
        found[name] += (
            [[*row, np.mean(np.maximum(*exact)[[*dropped]] >= THRESHOLD)]] if turn else []
        )
    made: Rows = []
    for name, values in found.items():
        ratios = [
            row[0] / own[0] for row, own in zip(values, next(iter(found.values())), strict=True)
        ]
        _, few, more, right = np.mean(values, axis=0).round(3)
        shown = {"tool, bands x hashes": name, "CPU s": spread([row[0] for row in values])}
        shown |= {"relative": spread(ratios), f"found at {FEW:.0%}": few, f"at {MORE:.0%}": more}
        made.append(shown | {f"precision at {THRESHOLD}": right})
    return made


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
