"""The pipeline: run the STAGES in the work directory STREAM/.work-DIGEST/, then install the stream.

DIGEST is a hash of the settings, so the same command resumes a killed run.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentencepiece

from alma.configs import differing
from alma.errors import UserError
from alma.files import LOCK, locked, make_directory
from alma.stream import VERSION, Part, Stream, is_stream
from data_prep import documents, install, plan
from data_prep.build import Build
from data_prep.compressed import Skipped
from data_prep.encode import load_encoder, open_encoder
from data_prep.finalise import NEAR, finalise_vocabulary
from data_prep.settings import StreamSettings, digest
from data_prep.stages import STAGES
from data_prep.work import Work, Workspace, join_files, read_json

_LAYOUT = 10  # version of the work directory; increase it when files of older code cannot be used
_LISTED = 1000  # most skipped documents that stream.json lists
_SHOWN = 3  # most skipped documents that the summary shows


def make_stream(settings: StreamSettings, out: Path, work: Work) -> Stream:
    """Make the stream in the directory `out`, or resume; returns at once if it is finished.

    UserError: a bad corpus or tokenizer, `out` has other files, or another process holds its lock.
    """
    record = settings.record()
    if settings.tokenizer:
        open_encoder(settings.tokenizer)  # bad files must fail now, not after hours of scanning
    make_directory(out)
    _require_ours(out)
    if not is_stream(out) or install.leftovers(out):  # a finished stream may be read-only
        with locked(out):
            install.recover(out)
            if not is_stream(out):
                return _make(settings, record, out, work)
            install.remove_others(out)
    stream = Stream.load(out)
    stream_settings = {"seed": stream.seed, **stream.settings}
    changed = sorted(differing([stream_settings, {"seed": settings.seed, **record}]))
    if changed:
        problem = f"holds a stream made with other settings ({', '.join(changed)})"
        raise UserError(f"{out}: {problem}; choose another --out")
    _say_finished(stream)
    return stream


def _require_ours(out: Path) -> None:
    """Raise a UserError unless the directory is empty, or a stream, finished or not."""
    remains = any(out.glob(f".*{install.WORK}*.tmp"))
    if is_stream(out) or install.works(out) or remains:
        return
    if any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out}: not empty and no stream; choose another --out")


def append(settings_for: Callable[[Stream], StreamSettings], out: Path, work: Work) -> Stream:
    """Add mega-batches of new documents to the finished stream in `out`.

    Of its files only stream.json is rewritten. Returns at once if the same addition was made
    before. `settings_for` gets the locked stream and returns the settings of the addition, whose
    `splits.first` is the number of the first new mega-batch. Raises UserError if the corpus is bad,
    the stream has no .keys, or another process holds its lock.
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
            path = out / f"{part.prefix}.keys"
            if not path.is_file():
                problem = "the documents of the stream are unknown without it"
                raise UserError(f"{path}: missing; {problem}")
        changed = install.wrong_size(stream.parts, out)
        if changed:
            raise UserError(f"{changed}: damaged; restore the file, or make the stream anew")
        return _make(settings, record, out, work, stream)


def _say_finished(stream: Stream) -> None:
    message = "already finished with the same settings; nothing to do"
    print(f"{stream.directory}: {message}", file=sys.stderr)


def _make(
    settings: StreamSettings,
    record: dict[str, Any],
    out: Path,
    work: Work,
    grown: Stream | None = None,
) -> Stream:
    """Make a stream, or an addition to `grown`, in the work directory; then install it.

    `record`: that of the settings.
    """
    past_parts = grown.parts if grown else ()
    directory = out / (install.WORK + _work_digest(settings, record, past_parts))
    install.remove_others(out, directory)
    directory.mkdir(exist_ok=True)
    for name, path in settings.tokenizer.items():
        join_files(directory / name, [path])
    past_files = [name for part in past_parts for name in part.files]
    build = Build(
        settings=settings,
        space=Workspace(directory, settings.seed, settings.reader, settings.sources),
        shards=documents.make_shards(settings.files, settings.reader, documents.SHARD_BYTES),
        past_keys=[out / f"{part.prefix}.keys" for part in past_parts],
        past_entries=[out / name for name in past_files if name.endswith(NEAR)],
    )
    for stage in STAGES:
        if stage.is_needed(build):
            stage.run(build, work)
    stream = _grown_stream(grown, build, record) if grown else _new_stream(build, record)
    _with_parts(stream, build).write()
    return install.install(directory, out)


def _work_digest(
    settings: StreamSettings, record: dict[str, Any], past_parts: Sequence[Part]
) -> str:
    """The digest in the name of the work directory, of everything on which its files depend."""
    past_hashes = [info.sha256 for part in past_parts for info in part.files.values()]
    constants = [
        VERSION,
        _LAYOUT,
        documents.SHARD_BYTES,
        plan.BUCKET_BYTES,
        sentencepiece.__version__,
        past_hashes,
    ]
    return digest([settings.seed, record, constants])


def _new_stream(build: Build, record: dict[str, Any]) -> Stream:
    """The record of a new stream, without its mega-batches and held-out parts."""
    parts = {part.name: part for part in build.parts}
    return Stream(
        directory=build.space.finished,
        version=VERSION,
        seed=build.settings.seed,
        vocab_size=len(load_encoder(build.space.directory).tokens),
        megabatches=(),
        valid=parts["valid"],
        test=parts["test"],
        settings=record,
        end_token=build.settings.end_token,
        files=finalise_vocabulary(build.space),
        corpus=_corpus_record(build),
    )


def _grown_stream(stream: Stream, build: Build, record: dict[str, Any]) -> Stream:
    """The stream with the record of an addition, still without the new parts."""
    addition = {**record, "corpus": _corpus_record(build)}
    return replace(stream, appended=(*stream.appended, addition))


def _with_parts(stream: Stream, build: Build) -> Stream:
    """The stream with the mega-batches and held-out parts of the build."""

    def parts_of(role: str) -> tuple[Part, ...]:
        return tuple(part for part in build.parts if part.name.startswith(f"{role}_"))

    return replace(
        stream,
        directory=build.space.finished,
        megabatches=stream.megabatches + parts_of("megabatch"),
        held_out=stream.held_out + parts_of("test"),
        held_out_valid=stream.held_out_valid + parts_of("valid"),
    )


def _corpus_record(build: Build) -> dict[str, Any]:
    """The record of the corpus in stream.json.

    Its `spread` is (largest - smallest) / `words` over the mega-batches' sizes in words; it is left
    out if mega-batches take all their documents.
    """
    corpus_plan = build.plan
    documents_read, words_read = corpus_plan.read.tolist()
    duplicate_documents, duplicate_words = corpus_plan.duplicates.tolist()
    corpus: dict[str, Any] = {
        "documents": documents_read,
        "words": words_read,
        "duplicate_documents": duplicate_documents,
        "duplicate_words": duplicate_words,
    }
    if build.settings.near_duplicates:
        near_documents, near_words = corpus_plan.near.tolist()
        corpus["near_duplicate_documents"] = near_documents
        corpus["near_duplicate_words"] = near_words
    split_words = corpus_plan.source_words.sum(1)
    corpus["surplus_words"] = words_read - duplicate_words - int(split_words.sum())
    if build.splits.words:
        batch_words = split_words[: build.splits.mega_batches]
        corpus["spread"] = float((batch_words.max() - batch_words.min()) / build.splits.words)
    corpus["longest_document"] = corpus_plan.longest
    skips = _skipped(build)
    if skips:
        corpus["skipped"] = {
            "summary": _skipped_summary(skips),
            "first": list(map(str, skips[:_LISTED])),
        }
    if build.without_period is not None:
        corpus["dates"] = {"left_out": build.without_period}
    return corpus


def _skipped(build: Build) -> list[Skipped]:
    """The bad input of all shards, sorted; input that several shards read is in it repeatedly."""
    skips = []
    for number in range(len(build.shards)):
        path = build.space.file("skipped", number, "json")
        if path.exists():
            skips += [Skipped(*fields) for fields in read_json(path)]
    return sorted(skips)


def _skipped_summary(skips: Sequence[Skipped]) -> str:
    """A line that counts bad input by its reason, and shows the first."""
    distinct = sorted(set(skips))
    reasons = Counter(skip.reason.split(" (")[0] for skip in distinct)
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    shown = ", ".join(map(str, distinct[:_SHOWN]))
    if len(distinct) > _SHOWN:
        shown += ", ..."
    return f"skipped bad input: {counts}; {shown}"
