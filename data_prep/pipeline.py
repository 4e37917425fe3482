"""The pipeline: runs the stages in STREAM/.work-DIGEST/ and installs the stream; a relaunch resumes."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sentencepiece

from alma.configs import differing
from alma.errors import UserError
from alma.files import LOCK, locked, make_directory, sha256_file
from alma.stream import VERSION, Part, Stream, is_stream
from data_prep import cut, documents, encode, install, plan, ranges, scan, shuffle, tokenizer
from data_prep.compressed import Skipped
from data_prep.cut import Wanted
from data_prep.near_duplicates import count_ranges, entry_files, find_range, write_bands
from data_prep.order import Dated, find_periods
from data_prep.work import Task, Work, Workspace, join_files, read_arrays, read_json

_LAYOUT = 10  # version of the work directory; increase it when files of older code cannot be used
_SKIPS, _SHOWN = 1000, 3  # skipped documents that stream.json lists, and that its summary has


@dataclass(frozen=True)
class StreamSettings:
    """All that the stream is a function of, besides the text."""

    files: list[tuple[str, str]]  # (source, path) of every corpus file
    wanted: Wanted
    seed: int
    reader: documents.Reader
    vocab_size: int | None  # tokens to train; None with a given `tokenizer`
    tokenizer: dict[str, str]
    """Paths of the files of a given tokenizer, by their names in the stream; empty: train one."""
    near_duplicates: bool = False  # whether near duplicates are dropped
    write_dropped: bool = False  # whether dropped.jsonl lists the duplicates
    write: str = "fairseq"  # what is written beside fairseq's files, a key of `encode.WRITTEN`

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, sorted by `Wanted.rank`."""
        return self.wanted.sources(source for source, _ in self.files)

    def record(self) -> dict[str, Any]:
        """The settings as stream.json keeps them; `input` is a hash of the files' names, sizes and times."""
        try:
            stats = [(source, path, os.stat(path)) for source, path in self.files]
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}; rerun when it is complete") from error
        identity = sorted((source, path, stat.st_size, stat.st_mtime_ns) for source, path, stat in stats)
        return {
            **self.wanted.record(),
            **self.reader.record(),
            "vocab_size": self.vocab_size,
            "tokenizer": {name: sha256_file(path) for name, path in self.tokenizer.items()} or None,
            "sources": list(self.sources),
            "input": _digest(identity),
            **({"near_duplicates": "drop"} if self.near_duplicates else {}),
            **({"write_dropped": True} if self.write_dropped else {}),
            **({"write": self.write} if self.write != "fairseq" else {}),
        }


def make_stream(settings: StreamSettings, out: Path, work: Work) -> Stream:
    """Make the stream in the directory `out`, or resume; returns at once if it is finished.

    UserError: a bad corpus or tokenizer, `out` has other files, or another process holds its lock.
    """
    record = settings.record()
    if settings.tokenizer:
        encode.open_encoder(settings.tokenizer)  # bad files must fail now, not after hours of scanning
    make_directory(out)
    ours = is_stream(out) or install.works(out) or any(out.glob(f".*{install.WORK}*.tmp"))
    if not ours and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out}: not empty and no stream; choose another --out")
    if not is_stream(out) or install.leftovers(out):  # else nothing is written: `out` may be read-only
        with locked(out):
            install.recover(out)
            if not is_stream(out):
                return _make(settings, record, out, work)
            install.remove_others(out)
    stream = Stream.load(out)
    made = {"seed": stream.seed, **stream.settings}
    if changed := sorted(differing([made, {"seed": settings.seed, **record}])):
        others = f"made with other settings ({', '.join(changed)})"
        raise UserError(f"{out}: holds a stream {others}; choose another --out")
    _say_finished(stream)
    return stream


def append(settings_for: Callable[[Stream], StreamSettings], out: Path, work: Work) -> Stream:
    """Add mega-batches of new documents to the finished stream in `out`; only stream.json is rewritten.

    `settings_for` gets the locked stream; `wanted.first` of its result is the number of the first new
    mega-batch. Returns at once if the same addition was made before. UserError: a bad corpus, a stream
    without .keys, or another process holds its lock.
    """
    if not install.works(out):
        Stream.load(out)  # a UserError before there is a lock file
    with locked(out):
        install.recover(out)
        stream = Stream.load(out)
        settings = settings_for(stream)
        record = settings.record()
        identity = {name: value for name, value in record.items() if name != "first"}
        if any(addition.items() >= identity.items() for addition in stream.appended):
            install.remove_others(out)
            _say_finished(stream)
            return stream
        for part in stream.parts:
            if not (path := out / f"{part.prefix}.keys").is_file():
                raise UserError(f"{path}: missing; the documents of the stream are unknown without it")
        if changed := install.wrong_size(stream.parts, out):
            raise UserError(f"{changed}: damaged; restore the file, or make the stream anew")
        return _make(settings, record, out, work, stream)


def _say_finished(stream: Stream) -> None:
    print(f"{stream.directory}: already finished with the same settings; nothing to do", file=sys.stderr)


def _make(
    settings: StreamSettings, record: dict[str, Any], out: Path, work: Work, before: Stream | None = None
) -> Stream:
    """Make a new stream, or an addition to `before`, in the work directory; then install it."""
    had = before.parts if before else ()
    known = [info.sha256 for part in had for info in part.files.values()]
    constants = [VERSION, _LAYOUT, documents.SHARD_BYTES, plan.BUCKET_BYTES, sentencepiece.__version__, known]
    directory = out / (install.WORK + _digest([settings.seed, record, constants]))
    install.remove_others(out, directory)
    directory.mkdir(exist_ok=True)
    for name, given in settings.tokenizer.items():
        join_files(directory / name, [given])
    space = Workspace(directory, settings.seed, settings.reader, settings.sources)
    corpus, parts = _run(space, settings, work, had, out)
    roles = ("megabatch_", "test_", "valid_")
    batches, test, valid = (tuple(part for part in parts if part.name.startswith(role)) for role in roles)
    if before:
        stream = replace(before, appended=(*before.appended, {**record, "corpus": corpus}))
    else:
        by_name = {part.name: part for part in parts}
        stream = Stream(
            directory=space.finished,
            version=VERSION,
            seed=settings.seed,
            vocab_size=len(encode.load_encoder(space.directory).tokens),
            megabatches=(),
            valid=by_name["valid"],
            test=by_name["test"],
            settings=record,
            files=encode.finalise_vocabulary(space),
            corpus=corpus,
        )
    stream = replace(
        stream,
        directory=space.finished,
        megabatches=stream.megabatches + batches,
        held_out=stream.held_out + test,
        held_out_valid=stream.held_out_valid + valid,
    )
    stream.write()
    return install.install(space.directory, out)


def _run(
    space: Workspace, settings: StreamSettings, work: Work, before: Sequence[Part], out: Path
) -> tuple[dict[str, Any], list[Part]]:
    """Run the stages; totals of the corpus, and the splits. `before`: parts that `out` has."""
    shards = [
        (sum(segment.end - segment.start for segment in shard), shard)
        for shard in documents.make_shards(settings.files, settings.reader, documents.SHARD_BYTES)
    ]
    dates = None
    if isinstance(settings.wanted, Dated):
        dated, dates = find_periods(space, settings.wanted, work, shards, settings.near_duplicates)
        settings = replace(settings, wanted=dated)
        space = replace(space, sources=settings.sources)
    wanted, drop = settings.wanted, settings.near_duplicates
    arrivals = wanted.first + wanted.arrivals(space.sources)
    work.each("scan", scan.scan_shard, space, "scan.bin", shards, "B", arrivals if drop else None)
    near = None
    if drop:
        past = [out / name for part in before for name in part.files if name.endswith(encode.NEAR)]
        entries = entry_files(space, len(shards), past)
        sizes = [(path.stat().st_size, path) for path in entries]
        work.each("bands", write_bands, space, "bands.bin", sizes, "B")
        near = count_ranges(entries), wanted.first
        shared = (near[0], len(shards), past, wanted.first)
        work.each("near", find_range, space, "near.bin", [(1,)] * near[0], "range", *shared)
    keys = [out / f"{part.prefix}.keys" for part in before]
    count = sort_documents(space, wanted, work, len(shards), keys, near)
    read = settings.reader.dates
    if read and isinstance(wanted, Dated) and wanted.merge_small and not drop:
        sums = (read_arrays(space.file("sums", number, "npz"), "first")["first"] for number in range(count))
        words = np.sum([own[1] for own in sums], axis=0).tolist()  # of a duplicate: in its first period
        wanted = wanted.with_periods(read.by, dict(zip(space.sources, words, strict=True)), True)
        settings = replace(settings, wanted=wanted)
    planned = plan_buckets(space, wanted, work, count)
    ranged = [(1,)] * count
    of_range = count, len(shards), wanted
    if drop:
        work.each("hashes", plan.keep_entries, space, "past.bin", ranged, "range", *of_range)
    if settings.write_dropped:
        work.each("copies", plan.write_copies, space, "copies.jsonl", ranged, "range", *of_range)
    work.each("shuffle", shuffle.shuffle_shard, space, "spill.npy", shards, "B", wanted, count)
    if settings.vocab_size is not None:
        # Only of the first mega-batch: the others have not arrived when the model is first trained.
        arguments = (space, planned.buckets(0), len(shards), settings.vocab_size)
        task = Task(space.directory / tokenizer.MODEL, 1, arguments)
        work.run("tokenizer", tokenizer.train_tokenizer, [task], "model")
    periods = [wanted.period(wanted.names[split]) for split in planned.bucket_split.tolist()]
    buckets = list(zip(planned.bucket_words.tolist(), periods, strict=True))
    to_encode = (len(shards), settings.write)
    work.each("encode", encode.encode_bucket, space, "bucket.npz", buckets, "word", *to_encode)
    encode.check_encode(space, planned)
    code = encode.load_encoder(space.directory).dtype_code
    tasks: list[Task] = []
    for name, numbers in wanted.parts.items():
        words = planned.source_words[numbers].sum(0).tolist()
        own = [bucket for number in numbers for bucket in planned.buckets(number)]
        kept = None
        if drop and len(tasks) + wanted.first in arrivals:  # mega-batches are the first parts
            kept = count, len(tasks) + wanted.first
        final = (space, name, own, space.by_name(words), code, kept, settings.write)
        tasks.append(Task(space.directory / f"{name}.json", sum(words), final))
    work.run("finalise", encode.finalise_part, tasks, "word")
    parts = [msgspec.convert(read_json(task.done), Part) for task in tasks]
    parts = [replace(part, period=wanted.period(part.name)) for part in parts]
    if settings.write_dropped:
        parts[0] = plan.add_copies(space, parts[0], count, wanted.first)
    corpus = _corpus_record(space, settings, planned, len(shards))
    return corpus | ({"dates": dates} if dates else {}), parts


def sort_documents(
    space: Workspace,
    wanted: Wanted,
    work: Work,
    shards: int,
    known: list[Path],
    near: tuple[int, int] | None = None,
) -> int:
    """Run the stages keys and sort; the number of ranges. `near`: see `sort_range`.

    UserError: an empty corpus.
    """
    if known:
        keys = [(path.stat().st_size, path) for path in known]
        work.each("keys", scan.scan_keys, space, "keys.bin", keys, "B")
    files = (shards, len(known))
    count = ranges.count_ranges(space, files)
    valid = space.sources.index(wanted.valid_source) if wanted.valid_source else None
    arguments = (count, files, wanted.arrivals(space.sources), valid, near)
    work.each("sort", ranges.sort_range, space, "sums.npz", [(1,)] * count, "range", *arguments)
    return count


def plan_buckets(space: Workspace, wanted: Wanted, work: Work, count: int) -> plan.CorpusPlan:
    """Run the stages cut and plan on `count` sorted ranges. UserError: see `Wanted.cut`."""
    work.run("cut", cut.cut_corpus, [Task(space.directory / cut.CUT, 1, (space, wanted, count))], "corpus")
    work.each("plan", plan.plan_range, space, "parts.npz", [(1,)] * count, "range", wanted)
    return plan.collect_plan(space, wanted, count)


def _corpus_record(
    space: Workspace, settings: StreamSettings, planned: plan.CorpusPlan, shards: int
) -> dict[str, Any]:
    """The corpus in stream.json. `spread`: (max - min) / `wanted.words`, not of mega-batches taken whole."""
    wanted = settings.wanted
    names = ("documents", "words", "duplicate_documents", "duplicate_words")
    numbers = [*planned.read.tolist(), *planned.duplicates.tolist()]
    corpus: dict[str, Any] = dict(zip(names, numbers, strict=True))
    if settings.near_duplicates:
        near = ("near_duplicate_documents", "near_duplicate_words")
        corpus |= zip(near, planned.near.tolist(), strict=True)
    corpus["surplus_words"] = numbers[1] - numbers[3] - int(planned.source_words.sum())
    if wanted.words:
        words = planned.source_words.sum(1)[: wanted.mega_batches]
        corpus["spread"] = float((words.max() - words.min()) / wanted.words)
    corpus["longest_document"] = planned.longest
    paths = [space.file("skipped", number, "json") for number in range(shards)]
    if skips := sorted(Skipped(*fields) for path in paths if path.exists() for fields in read_json(path)):
        listed = list(map(str, skips[:_SKIPS]))
        skips = sorted(set(skips))
        reasons = Counter(skip.reason.split(" (")[0] for skip in skips)
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        shown = ", ".join([*map(str, skips[:_SHOWN]), *["..."] * (len(skips) > _SHOWN)])
        corpus["skipped"] = {"summary": f"skipped bad input: {counts}; {shown}", "first": listed}
    return corpus


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
