"""`python -m data_prep.inspect STREAM`: what is in a stream and whether its mega-batches are i.i.d.

With --samples also documents to read; with --verify instead: whether every file is whole.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import combinations, count
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from alma.errors import Parser, UserError, command, fail
from alma.processes import end_with_parent
from alma.report.tables import as_text
from alma.stream import Part, Stream
from data_prep import similarity, verify
from data_prep.install import leftovers
from data_prep.similarity import Counts

UNKNOWN = 3
SPECIALS = 4  # ids before the first unit of dict.txt
_PREFIX = 1_000_000  # tokens of each part that types are counted in
_SAMPLE = 300  # characters
_DEVIATIONS = 6  # i.i.d. parts of few, long documents reach 5, real streams 3.3
_FITTED = 1.3  # of pairs of megabatch_00, which units are fitted to: 1.23 with 20,000 units on 0.5M words
_SHARE_DEVIATIONS = 5

NOTES = """\
Tokens include the end of every line and document; median, 95% and longest are tokens of a document.
types/token: distinct units per token in the first {prefix:,} tokens of each part. unknown, bytes: share of
<unk> and of byte-fallback units in the tokens (-: the tokenizer has none). Sources: share of the words.
"""
QUESTION = """\
Are the mega-batches i.i.d.? Jensen-Shannon divergence of the units of two parts, over that of random
regroupings of the same documents (1 = i.i.d.; at the size of the smaller part; - = too few documents).
A tokenizer trained on megabatch_00 fits it better than the others, which lifts its pairs by up to 0.25;
valid, which often is of one source, does not count."""
Result = TypeVar("Result")


def open_pool(workers: int) -> Executor:
    """Processes, or for one worker a thread of this process."""
    if workers == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)


def run_all(
    pool: Executor,
    title: str,
    function: Callable[..., Result],
    tasks: Sequence[tuple[Any, ...]],
    weights: Sequence[int],
    unit: str = "B",
) -> list[Result]:
    """`function(*task)` of every task, in the order of tasks; progress counts their weights.

    UserError: the first that a task raised, or a worker that the system killed.
    """
    weight = dict(zip([pool.submit(function, *task) for task in tasks], weights, strict=True))
    with tqdm(desc=title, total=sum(weights), unit=unit, unit_scale=True, disable=None) as bar:
        try:
            for future in as_completed(weight):
                future.result()
                bar.update(weight[future])
        except BrokenProcessPool as error:
            raise UserError("a worker was killed (out of memory?); run again with fewer --workers") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in weight]


def describe(stream: Stream, pool: Executor, seed: int) -> str:
    """The table of parts, and the similarity of mega-batches with its verdict."""
    parts = stream.parts
    least = min(part.tokens for part in stream.megabatches)
    sizes = [min(least, part.tokens) for part in parts]
    cuts = np.unique([end for size in sizes for end in similarity.group_ends(size)])
    prefix = min(_PREFIX, *(part.tokens for part in parts))
    units = read_units(stream)
    tasks = [
        (stream.path(part), len(units) + SPECIALS, cuts, prefix, [seed % 2**64, number])
        for number, part in enumerate(parts)
    ]
    counts = run_all(pool, "count", similarity.count_part, tasks, [part.tokens for part in parts], "token")
    table = as_text(part_table(parts, counts, units, prefix))
    return "\n".join([table, NOTES.format(prefix=prefix), alike(stream, counts, sizes, cuts, pool)])


def read_units(stream: Stream) -> list[str]:
    """The units of dict.txt in the order of their ids, of which the first is 4."""
    path = stream.directory / "dict.txt"
    try:
        lines = path.read_text("utf-8").split("\n")[:-1]
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged ({error}); `--verify` lists all that is") from error
    return [line.removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in lines]


def part_table(
    parts: Sequence[Part], counts: Sequence[Counts], units: list[str], prefix: int
) -> list[list[str]]:
    """One row for each part."""
    single = [SPECIALS + i for i, unit in enumerate(units) if re.fullmatch("<0x[0-9A-F]{2}>", unit)]
    sources = sorted({name for part in parts for name in part.sources})
    header = ["", "words", "tokens", "tokens/word", "documents", "median", "95%", "longest", "types/token"]
    rows = [[*header, "unknown", "bytes", *sources]]
    for part, found in zip(parts, counts, strict=True):
        middle, high = np.percentile(found.lengths, [50, 95])
        total = found.total
        has_bytes = len(single) == 256  # as every model with byte fallback
        rows.append(
            [part.name, f"{part.words:,}", f"{part.tokens:,}", f"{part.tokens / part.words:.3f}"]
            + [f"{part.documents:,}", f"{middle:,.0f}", f"{high:,.0f}", f"{found.lengths.max():,}"]
            + [f"{found.types / prefix:.4f}", f"{total[UNKNOWN] / part.tokens:.3%}"]
            + [f"{total[single].sum() / part.tokens:.3%}" if has_bytes else "-"]
            + [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        )
    return rows


def alike(
    stream: Stream, counts: Sequence[Counts], sizes: Sequence[int], cuts: np.ndarray, pool: Executor
) -> str:
    """The matrix of similarity and a sentence on what it means."""
    parts = stream.parts
    pairs = list(combinations(range(len(parts)), 2))
    tasks = [(counts[i].units, counts[j].units, cuts, min(sizes[i], sizes[j])) for i, j in pairs]
    found = run_all(pool, "compare", similarity.compare, tasks, [1] * len(pairs), "pair")
    ratios = dict(zip(pairs, found, strict=True))
    short = [part.name.removeprefix("megabatch_") for part in parts]
    rows = [["", *short[:-1]]]
    for j, part in list(enumerate(parts))[1:]:
        cells = [ratios[i, j] for i in range(j)]
        rows.append([part.name, *(f"{cell[0]:.2f}" if cell else "-" for cell in cells)])
        rows[-1] += [""] * (len(short) - len(rows[-1]))
    judged = [i for i, part in enumerate(parts) if part is not stream.valid]
    known = {pair: found for pair, found in ratios.items() if found and set(pair) <= set(judged)}
    lines = [QUESTION, *(line.rstrip() for line in as_text(rows).splitlines())]
    lines.append(verdict([part.name for part in parts], known))
    lines.append(shares_verdict([parts[i] for i in judged], [counts[i] for i in judged]))
    return "\n".join(lines)


def verdict(names: Sequence[str], ratios: dict[tuple[int, int], tuple[float, float]]) -> str:
    """One sentence on the units, with the worst pair."""
    if not ratios:
        return "Units: cannot tell, for the parts have too few documents or too long ones."
    differ = {
        pair: (ratio, z)
        for pair, (ratio, z) in ratios.items()
        if z > _DEVIATIONS and (0 not in pair or ratio > _FITTED)
    }
    (i, j), (ratio, z) = max((differ or ratios).items(), key=lambda item: item[1][0])
    answer = f"NOT i.i.d., {len(differ)} of {len(ratios)} pairs differ" if differ else "as i.i.d."
    return f"Units: {answer}; worst are {names[i]} and {names[j]}, ratio {ratio:.2f} (z = {z:.1f})."


def shares_verdict(parts: Sequence[Part], counts: Sequence[Counts]) -> str:
    """One sentence on the shares of sources, with the worst."""
    sources = sorted({name for part in parts for name in part.sources})
    worst, where = 0.0, ""
    for name in sources:
        shares = [part.sources.get(name, 0) / part.words for part in parts]
        lengths = [found.lengths for found in counts]
        for part, share, z in zip(parts, shares, similarity.share_deviation(shares, lengths), strict=True):
            if abs(z) >= abs(worst):
                worst, where = z, f"{part.name} with {share:.1%} of {name}"
    if len(sources) == 1:
        return f"Sources: one, {sources[0]}."
    answer = "NOT i.i.d." if abs(worst) > _SHARE_DEVIATIONS else "as i.i.d."
    return f"Sources: {answer}; farthest from the others is {where}, by |z| of {abs(worst):.1f} or more."


def samples(stream: Stream, number: int, seed: int) -> str:
    """The beginnings of `number` random documents of each part, as text."""
    decode = decoder(stream)
    lines = []
    for index, part in enumerate(stream.parts):
        ids, ends = similarity.open_part(stream.path(part))
        rng = np.random.default_rng([seed % 2**64, index])
        for chosen in np.sort(rng.choice(len(ends), min(number, len(ends)), replace=False)).tolist():
            start, end = (int(ends[chosen - 1]) if chosen else 0), int(ends[chosen])
            shown = ids[start : min(end, start + 4 * _SAMPLE)]  # a character may take 4 tokens
            items = np.split(shown, np.flatnonzero(shown == verify.EOS) + 1)
            text = "\n".join(decode(item[item != verify.EOS].tolist()) for item in items).strip()
            text = text[:_SAMPLE] + (" ..." if len(text) > _SAMPLE else "")
            lines.append(f"\n{part.name}, document {chosen + 1:,} of {len(ends):,}, {end - start:,} tokens:")
            lines.append(textwrap.indent(text, "    "))
    return "\n".join(lines)


def decoder(stream: Stream) -> Callable[[list[int]], str]:
    """From ids of a line to its text, by the stream's own tokenizer. UserError: it has none."""
    model, encoder = stream.directory / "tokenizer.model", stream.directory / "encoder.json"
    try:
        if model.name in stream.files:
            import sentencepiece

            processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
            return lambda ids: str(processor.decode([i - 1 if i > UNKNOWN else 0 for i in ids]))
        if encoder.name in stream.files:
            return _gpt2_decoder(read_units(stream), json.loads(encoder.read_text("utf-8")))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{stream.directory}: damaged tokenizer ({error}); copy it again") from error
    raise UserError(f"{stream.directory}: stream.json names no tokenizer, so there is no --samples")


def _gpt2_decoder(units: list[str], ids: dict[str, int]) -> Callable[[list[int]], str]:
    """dict.txt names GPT-2's ids; its units spell bytes, each as a character that prints."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printing)
    byte_of = {chr(byte): byte for byte in printing} | {chr(c): b for c, b in zip(count(256), others)}
    spelling = {str(i): bytes(byte_of.get(c, 63) for c in unit) for unit, i in ids.items()}
    return lambda line: b"".join(
        spelling[units[i - SPECIALS]] if i >= SPECIALS else b"?" for i in line
    ).decode(errors="replace")


def check(stream: Stream, pool: Executor) -> None:
    """Print a line for each problem and exit with code 2, or print what was verified."""
    start = time.monotonic()
    files = dict(stream.files)
    for part in stream.parts:
        files |= part.files
    jobs = [(stream.directory / name, info) for name, info in files.items()]
    sizes = [info.size for info in files.values()]
    problems = [line for found in run_all(pool, "files", verify.file_problems, jobs, sizes) for line in found]
    problems += verify.dictionary_problems(stream.directory / "dict.txt", stream.vocab_size)
    parts = [(stream.path(part), part, stream.vocab_size + SPECIALS) for part in stream.parts]
    tokens = [part.tokens for part in stream.parts]
    for found in run_all(pool, "parts", verify.part_problems, parts, tokens, "token"):
        problems += found
    problems += verify.key_problems(stream)
    for path in leftovers(stream.directory):
        print(f"warning: {path}: left by an interrupted run; remove it if none is going on", file=sys.stderr)
    for problem in problems:
        print(problem)
    if problems:
        sys.stdout.flush()
        what = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        fail(
            f"{stream.directory}: {what}; copy the stream again from where it was made, or make it "
            "again with `python -m data_prep`"
        )
    seconds = time.monotonic() - start
    print(f"verified {len(files)} files, {sum(sizes) / 1e9:.3g} GB in {seconds:.1f} s")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m data_prep.inspect",
        description="Describe a stream and tell whether its mega-batches are i.i.d.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("stream", metavar="STREAM", help="directory that `python -m data_prep` made")
    either = made.add_mutually_exclusive_group().add_argument
    either("--verify", action="store_true", help="instead check every file; exit code 2 if one is damaged")
    either("--samples", type=_positive, default=0, metavar="N", help="also print N documents of each part")
    add("--seed", type=int, default=0, metavar="S", help="of samples and regroupings (default: 0)")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=_positive, default=cores, metavar="K", help=f"processes (default: {cores})")
    return made


@command
def main() -> None:
    """Describe or verify the stream."""
    options = parser().parse_args()
    stream = Stream.load(options.stream)
    with open_pool(options.workers) as pool:
        if options.verify:
            check(stream, pool)
            return
        print(describe(stream, pool, options.seed))
    if options.samples:
        print(samples(stream, options.samples, options.seed))


if __name__ == "__main__":
    main()
