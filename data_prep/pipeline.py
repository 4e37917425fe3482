"""The stages: scan, plan, shuffle, tokenizer, encode, finalise; a relaunch goes on where it stopped."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from alma.errors import UserError
from alma.files import atomic_write, locked, make_directory, sha256_file
from alma.stream import VERSION, FileInfo, Part, Stream, is_stream
from data_prep import documents, encode, plan, shuffle, tokenizer
from data_prep.documents import Reader
from data_prep.plan import Job, Wanted
from data_prep.work import Task, Work, sweep

WORK = ".work-"

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

    UserError: a bad corpus, or `out` is taken.
    """
    record = settings.record()
    if is_stream(out):
        return _finished(out, settings.seed, record)
    _require_free(out)
    with _job(settings, record, out) as job:
        corpus, parts, files = _run(job, settings, out, work)
        stream = Stream(
            directory=out,
            version=VERSION,
            seed=settings.seed,
            vocab_size=len(encode.load_encoder(job.work).pieces),
            megabatches=tuple(parts[:-2]),
            valid=parts[-1],
            test=parts[-2],
            settings=record,
            files=files,
            corpus=corpus,
        )
        stream.write()
    return stream


def append(settings: Settings, stream: Stream, work: Work) -> Stream:
    """Add mega-batches to a finished stream, of documents that are in none of its parts.

    Nothing of it is written again but stream.json. `settings.wanted.first` is the number of the first one;
    nothing is done when they are there. UserError: a bad corpus, or a stream without .keys.
    """
    record = settings.record()
    if any(_same(each, record) for each in stream.appended):
        with locked(stream.directory):
            _clean(stream.directory)
        return stream
    known = [stream.directory / f"{part.prefix}.keys" for part in stream.parts]
    if missing := [path for path in known if not path.is_file()]:
        raise UserError(
            f"{missing[0]}: missing, so which documents the stream has is not known; make the stream again"
        )
    with _job(settings, record, stream.directory) as job:
        corpus, parts, _ = _run(job, settings, stream.directory, work, known)
        stream = dataclasses.replace(
            stream,
            megabatches=(*stream.megabatches, *parts),
            appended=(*stream.appended, {**record, "corpus": corpus}),
        )
        stream.write()
    return stream


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether these are the settings of one call of `append`, which the second time starts further on."""
    return all(old.get(name) == value for name, value in new.items() if name != "first")


@contextmanager
def _job(settings: Settings, record: dict[str, Any], out: Path) -> Iterator[Job]:
    """The work of these settings, held for this process; what killed runs left is removed at the end."""
    if settings.tokenizer:
        encode.open_encoder(settings.tokenizer)  # bad files must fail now, not after hours of scanning
    constants = [VERSION, documents.UNIT_BYTES, plan.BUCKET_WORDS, sentencepiece.__version__]
    work = out / (WORK + _digest([settings.seed, record, constants]))
    work.mkdir(exist_ok=True)
    with locked(out):
        for name, given in settings.tokenizer.items():
            _copy(given, work / name)
        yield Job(work, settings.seed, settings.reader, settings.sources)
        _clean(out)


def _clean(out: Path) -> None:
    """Remove what runs have left; at their end, for jobs of a killed launch may still be writing before."""
    sweep(out, WORK + "*")
    sweep(out, ".*.tmp")


def _require_free(out: Path) -> None:
    """Refuse a directory that holds something else than an unfinished stream."""
    make_directory(out)
    if any(out.iterdir()) and not any(out.glob(WORK + "*")):
        raise UserError(f"{out}: not empty and no stream; choose another --out")


def _finished(out: Path, seed: int, record: dict[str, Any]) -> Stream:
    stream = Stream.load(out)
    old, new = ({"seed": s, **r} for s, r in ((stream.seed, stream.settings), (seed, record)))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if changed:
        raise UserError(
            f"{out}: holds a stream made with other settings ({', '.join(changed)}); choose another --out"
        )
    with locked(out):
        _clean(out)
    return stream


def _run(
    job: Job, settings: Settings, out: Path, work: Work, known: list[Path] | None = None
) -> tuple[dict[str, Any], list[Part], dict[str, FileInfo]]:
    """All stages. Returns the corpus's totals, the parts, and the dictionary's and tokenizer's files."""
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
    firsts = plan.first_documents(job, len(units))
    arguments = (job, settings.wanted, len(units), known or [])
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
    encoder = encode.load_encoder(job.work)
    names = settings.wanted.names
    tasks = []
    for number, (name, words) in enumerate(zip(names, planned.source_words.tolist(), strict=True)):
        sources = dict(zip(job.sources, words, strict=True))
        own = planned.buckets(number)
        tasks.append(
            Task(
                job.work / f"{name}.json",
                sum(words),
                (job, out, name, own, sources, encoder.dtype_code),
            )
        )
    work.run("finalise", encode.finalise_part, tasks, "word")
    files = ["dict.txt", *encoder.files]
    if not known:
        for name in encoder.files:
            _copy(job.work / name, out / name)
        with atomic_write(out / "dict.txt") as file:
            file.write(encoder.dictionary(encode.piece_counts(job, planned.buckets(0))))
    corpus = plan.corpus_summary(planned, settings.wanted)
    if skips := sorted(plan.skips(job, len(units))):
        first = [str(skip) for skip in skips[:_SKIPS]]
        corpus["skipped"] = {"summary": documents.skipped_summary(skips), "first": first}
    parts = [Part.from_dict(json.loads(task.done.read_text())) for task in tasks]
    return corpus, parts, {name: FileInfo.of(out / name) for name in files}


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
