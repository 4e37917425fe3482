"""The stages: scan, plan, shuffle, tokenizer, encode, finalise; a relaunch goes on where it stopped."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from alma.configs import differing
from alma.errors import UserError
from alma.files import LOCK, atomic_write, locked, make_directory, sha256_file
from alma.stream import VERSION, FileInfo, Part, Stream, is_stream
from data_prep import advice, documents, encode, install, plan, shuffle, tokenizer
from data_prep.documents import Reader
from data_prep.plan import Job, Wanted
from data_prep.work import Task, Work

_LAYOUT = 2  # of the work directory: counted up when what another version left there cannot be used
_SKIPS = 1000  # that stream.json lists


@dataclass(frozen=True)
class Settings:
    """All that the stream is a function of, besides the text."""

    files: list[tuple[str, str]]
    """(source, path) of every corpus file."""
    wanted: Wanted
    seed: int
    reader: Reader
    vocab_size: int | None
    """Units to train; None with a given `tokenizer`."""
    tokenizer: dict[str, str]
    """Paths of the given tokenizer's files, by their names in the stream; empty: train one."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources in alphabetical order."""
        return tuple(sorted({source for source, _ in self.files}))

    def record(self) -> dict[str, Any]:
        """The settings as stream.json keeps them; `input` stands for the files' names, sizes and times."""
        try:
            stats = [(source, path, os.stat(path)) for source, path in self.files]
        except OSError as error:
            raise UserError(
                f"{error.filename}: {error.strerror}; run again when the input is complete"
            ) from error
        identity = sorted((source, path, stat.st_size, stat.st_mtime_ns) for source, path, stat in stats)
        return {
            **asdict(self.wanted),
            **asdict(self.reader),
            "vocab_size": self.vocab_size,
            "tokenizer": {name: sha256_file(path) for name, path in self.tokenizer.items()} or None,
            "sources": list(self.sources),
            "input": _digest(identity),
        }


def make_stream(settings: Settings, out: Path, work: Work) -> Stream:
    """Make the stream in the directory `out`, or go on making it; nothing is done when it is finished.

    UserError: a bad corpus or tokenizer, `out` is taken, or another process is at work there.
    """
    record = settings.record()
    if settings.tokenizer:
        encode.open_encoder(settings.tokenizer)  # bad files must fail now, not after hours of scanning
    _require_free(out)
    if is_stream(out) and not install.leftovers(out):  # nothing to write, so `out` may be read-only
        return _finished(out, settings.seed, record)
    with locked(out):
        if not is_stream(out):
            return _make(settings, record, out, work)
        stream = _finished(out, settings.seed, record)
        install.clean(out)
        return stream


def append(settings_for: Callable[[Stream], Settings], out: Path, work: Work) -> Stream:
    """Add mega-batches to the finished stream in `out`, of documents that are in none of its parts.

    Existing files stay untouched, except stream.json. `settings_for` is given the stream once it is locked,
    `wanted.first` of its result is the number of the first new mega-batch; nothing is done when this addition
    was made before. UserError: a bad corpus, a stream without .keys, or another process is at work there.
    """
    Stream.load(out)  # a UserError before there is a lock
    with locked(out):
        stream = Stream.load(out)
        settings = settings_for(stream)
        record = settings.record()
        if not any(_same(each, record) for each in stream.appended):
            if missing := [path for path in _keys(stream) if not path.is_file()]:
                raise UserError(
                    f"{missing[0]}: missing, so which documents the stream has is not known; make the "
                    "stream again"
                )
            return _make(settings, record, out, work, stream)
        _nothing_to_do(out)
        install.clean(out)
        return stream


def _keys(stream: Stream) -> list[Path]:
    """The files that tell which documents the stream has."""
    return [stream.directory / f"{part.prefix}.keys" for part in stream.parts]


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether these are the settings of one call of `append`, which the second time starts further on."""
    return all(old.get(name) == value for name, value in new.items() if name != "first")


def _require_free(out: Path) -> None:
    """Refuse a directory that holds something else than a stream, finished or not."""
    make_directory(out)
    ours = is_stream(out) or install.works(out)
    if not ours and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out}: not empty and no stream; choose another --out")


def _finished(out: Path, seed: int, record: dict[str, Any]) -> Stream:
    """The stream in `out`. UserError: it was made with other settings."""
    stream = Stream.load(out)
    if changed := sorted(differing([{"seed": stream.seed, **stream.settings}, {"seed": seed, **record}])):
        raise UserError(
            f"{out}: holds a stream made with other settings ({', '.join(changed)}); choose another --out"
        )
    _nothing_to_do(out)
    return stream


def _nothing_to_do(out: Path) -> None:
    print(f"{out}: was finished before with the same settings; nothing to do", file=sys.stderr)


def _make(
    settings: Settings, record: dict[str, Any], out: Path, work: Work, before: Stream | None = None
) -> Stream:
    """Make a new stream, or an addition to `before`, in the work directory; then install it."""
    job = _job(settings, record, out, before.parts if before else ())
    if is_stream(job.finished):  # killed while it was installed
        return install.install(job.work, out)
    corpus, parts = _run(job, settings, work, _keys(before) if before else [])
    if before:
        stream = dataclasses.replace(
            before,
            directory=job.finished,
            megabatches=(*before.megabatches, *parts),
            appended=(*before.appended, {**record, "corpus": corpus}),
        )
    else:
        stream = Stream(
            directory=job.finished,
            version=VERSION,
            seed=settings.seed,
            vocab_size=len(encode.load_encoder(job.work).pieces),
            megabatches=tuple(parts[:-2]),
            valid=parts[-1],
            test=parts[-2],
            settings=record,
            files=_units(job),
            corpus=corpus,
        )
    stream.write()
    return install.install(job.work, out)


def _job(settings: Settings, record: dict[str, Any], out: Path, before: Sequence[Part]) -> Job:
    """The work of these settings, in a directory of its own; `before`: the parts that the stream has."""
    had = [info.sha256 for part in before for info in part.files.values()]
    constants = [VERSION, _LAYOUT, documents.UNIT_BYTES, plan.BUCKET_WORDS, sentencepiece.__version__, had]
    work = out / (install.WORK + _digest([settings.seed, record, constants]))
    work.mkdir(exist_ok=True)
    for name, given in settings.tokenizer.items():
        _copy(given, work / name)
    return Job(work, settings.seed, settings.reader, settings.sources)


def _run(job: Job, settings: Settings, work: Work, known: list[Path]) -> tuple[dict[str, Any], list[Part]]:
    """All stages; the corpus's totals and the parts. `known`: .keys files of the documents that it has."""
    units = documents.make_units(settings.files, settings.reader, documents.UNIT_BYTES)
    sizes = [sum(segment.end - segment.start for segment in unit) for unit in units]
    work.run(
        "scan",
        plan.scan_unit,
        [
            Task(job.file("scan", number, "bin"), size, (job, number, unit))
            for number, (unit, size) in enumerate(zip(units, sizes, strict=True))
        ],
        "B",
    )
    totals = plan.source_totals(job, len(units))
    if warnings := advice.books(settings.files, settings.reader, dict(zip(job.sources, totals, strict=True))):
        print(*warnings, sep="\n", file=sys.stderr)
    firsts = plan.first_documents(job, len(units))
    arguments = (job, settings.wanted, len(units), known)
    work.run("plan", plan.plan_corpus, [Task(job.work / plan.PLAN, firsts[-1], arguments)], "document")
    planned = plan.load_plan(job)
    work.run(
        "shuffle",
        shuffle.shuffle_unit,
        [
            Task(
                job.file("spill", number, "npy"), size, (job, number, unit, first, len(planned.bucket_split))
            )
            for number, (unit, size, first) in enumerate(zip(units, sizes, firsts[:-1], strict=True))
        ],
        "B",
    )
    shuffle.check_shuffle(job, planned, len(units))
    if settings.vocab_size is not None:
        # of the first mega-batch alone: nothing is known of later ones when it comes
        task = Task(job.work / tokenizer.MODEL, 1, (job, planned.buckets(0), len(units), settings.vocab_size))
        work.run("tokenizer", _train_tokenizer, [task], "model")
    work.run(
        "encode",
        encode.encode_bucket,
        [
            Task(job.file("bucket", bucket, "npz"), int(words), (job, bucket, len(units)))
            for bucket, words in enumerate(planned.bucket_words)
        ],
        "word",
    )
    encode.check_encode(job, planned)
    code = encode.load_encoder(job.work).dtype_code
    tasks = []
    for number, (name, words) in enumerate(
        zip(settings.wanted.names, planned.source_words.tolist(), strict=True)
    ):
        sources = dict(zip(job.sources, words, strict=True))
        own = planned.buckets(number)
        tasks.append(Task(job.work / f"{name}.json", sum(words), (job, name, own, sources, code)))
    work.run("finalise", encode.finalise_part, tasks, "word")
    corpus = plan.corpus_summary(planned, settings.wanted)
    if skips := sorted(plan.skips(job, len(units))):
        first = [str(skip) for skip in skips[:_SKIPS]]
        corpus["skipped"] = {"summary": documents.skipped_summary(skips), "first": first}
    if warnings:
        corpus["warnings"] = warnings
    return corpus, [Part.from_dict(json.loads(task.done.read_text())) for task in tasks]


def _units(job: Job) -> dict[str, FileInfo]:
    """Write the dictionary and the tokenizer's files among the finished ones."""
    encoder = encode.load_encoder(job.work)
    for name in encoder.files:
        _copy(job.work / name, job.finished / name)
    counts = encode.piece_counts(job, plan.load_plan(job).buckets(0))
    with atomic_write(job.finished / "dict.txt") as file:
        file.write(encoder.dictionary(counts))
    return {name: FileInfo.of(job.finished / name) for name in ("dict.txt", *encoder.files)}


def _train_tokenizer(job: Job, buckets: list[int], units: int, vocab_size: int) -> None:
    """Train on the documents of these buckets, in their order."""
    texts = (text for bucket in buckets for text in shuffle.bucket_texts(job, bucket, units))
    model = tokenizer.train(texts, vocab_size)
    with atomic_write(job.work / tokenizer.MODEL, "wb") as file:
        file.write(model)


def _copy(source: str | Path, target: Path) -> None:
    with atomic_write(target, "wb") as file:
        file.write(Path(source).read_bytes())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
