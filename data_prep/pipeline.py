"""The stages: scan, plan, shuffle, tokenizer, encode, finalise; a relaunch goes on where it stopped."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from alma.errors import UserError
from alma.files import atomic_write, locked, make_directory, sha256_file
from alma.stream import VERSION, FileInfo, Part, Stream, is_stream
from data_prep import documents, encode, plan, shuffle, tokenizer
from data_prep.documents import Reader, Unit
from data_prep.plan import Job, Plan, Wanted
from data_prep.work import Task, Work, sweep

WORK = ".work-"


@dataclass(frozen=True)
class Settings:
    """All that the stream is a function of, besides the text."""

    files: list[tuple[str, str]]
    """(source, path) of every corpus file."""
    wanted: Wanted
    seed: int
    reader: Reader
    vocab_size: int | None
    """Units to train; None with `tokenizer`, the path of a given model."""
    tokenizer: str | None

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources in alphabetical order."""
        return tuple(sorted({source for source, _ in self.files}))

    def record(self) -> dict[str, Any]:
        """The settings as stream.json keeps them; `input` stands for the files' names, sizes and times."""
        stats = [(source, path, os.stat(path)) for source, path in self.files]
        identity = sorted((source, path, stat.st_size, stat.st_mtime_ns) for source, path, stat in stats)
        return {
            **asdict(self.wanted),
            **asdict(self.reader),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer and sha256_file(self.tokenizer),
            "sources": list(self.sources),
            "input": _digest(identity),
        }


def make_stream(settings: Settings, out: Path, workers: int) -> tuple[Stream, dict[str, float]]:
    """Make the stream in the directory `out`, or finish it; returns it and the seconds of each stage.

    No seconds are returned when it was finished before. UserError: a bad corpus, or `out` is taken.
    """
    record = settings.record()
    if is_stream(out):
        return _finished(out, settings.seed, record), {}
    _require_free(out)
    if settings.tokenizer:
        tokenizer.Encoder(Path(settings.tokenizer))  # a bad model must fail now, not after hours of scanning
    units = documents.make_units(settings.files, settings.reader, documents.UNIT_BYTES)
    constants = [VERSION, documents.UNIT_BYTES, plan.BUCKET_WORDS, sentencepiece.__version__]
    work_directory = out / (WORK + _digest([settings.seed, record, constants]))
    work_directory.mkdir(exist_ok=True)
    with locked(out), Work(workers) as work:
        sweep(out, ".*.tmp")
        job = Job(work_directory, settings.seed, settings.reader, settings.sources)
        stream = _run(job, settings, units, out, work, record)
        stream.write()
        sweep(out, WORK + "*")
    return stream, work.seconds


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
    sweep(out, WORK + "*")
    return stream


def _run(
    job: Job, settings: Settings, units: list[Unit], out: Path, work: Work, record: dict[str, Any]
) -> Stream:
    sizes = [sum(segment.end - segment.start for segment in unit) for unit in units]
    work.run(
        "scan",
        plan.scan_unit,
        [
            Task(job.file("scan", number, "npy"), size, (job, number, unit))
            for number, (unit, size) in enumerate(zip(units, sizes, strict=True))
        ],
        "B",
    )
    with work.stage("plan"):
        planned, corpus, firsts = _plan(job, settings, len(units))
    work.run(
        "shuffle",
        shuffle.shuffle_unit,
        [
            Task(job.file("spill", number, "npy"), size, (job, number, unit, first))
            for number, (unit, size, first) in enumerate(zip(units, sizes, firsts, strict=True))
        ],
        "B",
    )
    shuffle.check_shuffle(job, planned, len(units))
    with work.stage("tokenizer"):
        _tokenizer(job, settings, planned, len(units))
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
    return _finalise(job, settings, planned, out, work, record, corpus)


def _plan(job: Job, settings: Settings, units: int) -> tuple[Plan, dict[str, Any], list[int]]:
    """The plan, the corpus's totals, and the number of the first document of each unit."""
    scans = [np.load(job.file("scan", number, "npy")) for number in range(units)]
    records = np.concatenate([np.zeros(0, plan.RECORD), *scans])
    if not len(records):
        raise UserError("the corpus has no documents: every file is empty or blank")
    planned = plan.make_plan(records, settings.wanted, job.sources)
    with atomic_write(job.work / "bucket.npy", "wb") as file:
        np.save(file, planned.bucket)
    firsts = np.cumsum([0, *map(len, scans)])[:-1].tolist()
    return planned, plan.corpus_summary(records, planned, settings.wanted), firsts


def _tokenizer(job: Job, settings: Settings, planned: Plan, units: int) -> None:
    """Train on the first mega-batch alone, in its hash order, or take the given model."""
    path = job.work / "tokenizer.model"
    if path.exists():
        return
    if settings.tokenizer:
        model = Path(settings.tokenizer).read_bytes()
    else:
        buckets = np.flatnonzero(planned.bucket_split == 0).tolist()
        texts = (text for bucket in buckets for text in shuffle.bucket_texts(job, bucket, units))
        assert settings.vocab_size is not None
        model = tokenizer.train(texts, settings.vocab_size)
    with atomic_write(path, "wb") as file:
        file.write(model)


def _finalise(
    job: Job,
    settings: Settings,
    planned: Plan,
    out: Path,
    work: Work,
    record: dict[str, Any],
    corpus: dict[str, Any],
) -> Stream:
    encoder = encode.load_encoder(job.work / "tokenizer.model")
    names = settings.wanted.names
    buckets = [np.flatnonzero(planned.bucket_split == number).tolist() for number in range(len(names))]
    tasks = []
    for name, own, words in zip(names, buckets, planned.source_words.tolist(), strict=True):
        sources = dict(zip(job.sources, words, strict=True))
        tasks.append(
            Task(job.work / f"{name}.json", sum(words), (job, out, name, own, sources, encoder.dtype_code))
        )
    work.run("finalise", encode.finalise_part, tasks, "word")
    with atomic_write(out / "tokenizer.model", "wb") as file:
        file.write((job.work / "tokenizer.model").read_bytes())
    with atomic_write(out / "dict.txt") as file:
        file.write(encoder.dictionary(encode.piece_counts(job, buckets[0])))
    parts = [Part.from_dict(json.loads(task.done.read_text())) for task in tasks]
    return Stream(
        directory=out,
        version=VERSION,
        seed=settings.seed,
        vocab_size=len(encoder.pieces),
        megabatches=tuple(parts[:-2]),
        valid=parts[-1],
        test=parts[-2],
        settings=record,
        files={name: FileInfo.of(out / name) for name in ("dict.txt", "tokenizer.model")},
        corpus=corpus,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
