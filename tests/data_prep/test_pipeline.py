"""The stream depends only on documents and settings, not on files, workers and interruptions."""

import contextlib
import errno
import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data.indexed_dataset import MMapIndexedDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from alma.files import LOCK
from alma.stream import Stream
from data_prep import (
    documents,
    encode,
    near_duplicates,
    plan,
    ranges,
    scan,
    shuffle,
    stages,
    work,
)

from .conftest import FEW, make_documents


@pytest.fixture
def small_shards(monkeypatch):
    """Many shards, runs, ranges and buckets, as a large corpus has."""
    monkeypatch.setattr(documents, "SHARD_BYTES", 3000)
    monkeypatch.setattr(plan, "BUCKET_BYTES", 2400)
    monkeypatch.setattr(shuffle, "RUN_BYTES", 1000)
    monkeypatch.setattr(ranges, "RANGE_DOCUMENTS", 70)
    monkeypatch.setattr(scan, "RUN_DOCUMENTS", 9)


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of every file of a finished stream except stream.json, checked against it."""
    stream = Stream.load(out)
    stream.check(stream.parts)
    listed = {
        name: info.sha256 for item in [stream, *stream.parts] for name, info in item.files.items()
    }
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files - {LOCK} == {*listed, "stream.json"}, "something was left behind"
    return listed


def past(out: Path) -> dict[str, str]:
    """Checksums of the files of an ordered stream that no later document may change."""
    return {
        name: sha for name, sha in digests(out).items() if not name.startswith(("test.", "valid."))
    }


def texts(out: Path, prefix: str) -> list[str]:
    """The documents of a part, decoded."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    documents = []
    lines = []
    for item in MMapIndexedDataset(str(out / prefix)):
        ids = item.tolist()
        assert ids[-1] == 2
        if len(ids) == 1:
            documents.append("\n".join(lines))
            lines = []
        else:
            lines.append(processor.decode([i - 1 if i > 3 else 0 for i in ids[:-1]]))
    assert not lines
    return documents


IID = {"words": 2000, "eval_words": 1500, "valid_words": 600, "vocab_size": 60}
ORDERED = IID | {"mega_batches": None, "words": None, "eval_words": 600, "valid_words": 300}
KINDS = {
    "iid, near duplicates, pieces": IID | {"near_duplicates": "drop", "max_document_words": 20},
    "ordered, near duplicates, surplus": ORDERED | {"near_duplicates": "drop", "words": 1200},
}


@pytest.mark.parametrize(
    "kind",
    [
        "iid, near duplicates, pieces",
        pytest.param("ordered, near duplicates, surplus", marks=pytest.mark.thorough),
    ],
)
@given(data=st.data())
@settings(FEW, max_examples=1)
def test_splitting_names_order_and_workers_do_not_matter(
    near, prepare, tmp_path_factory, kind, data
):
    folder = tmp_path_factory.mktemp("split")
    flag = ["--ordered"] if "ordered" in kind else []
    whole = digests(prepare(*near, *flag, out=folder / "whole", **KINDS[kind]))
    corpus = []
    for source in near:
        name, _, path = source.partition("=")
        blocks = data.draw(st.permutations(Path(path).read_text("utf-8").split("\n\n")))
        (folder / name).mkdir()
        for number, file in enumerate(data.draw(st.permutations("xyz"))):
            text = "\n\n".join(blocks[number::3]).encode()
            pack, suffix = data.draw(st.sampled_from([(bytes, "txt"), (gzip.compress, "txt.gz")]))
            (folder / name / f"{file}.{suffix}").write_bytes(pack(text))
        corpus.append(f"{name}={folder / name}")
    with pytest.MonkeyPatch.context() as patch:
        for module, name, low, high in (
            (documents, "SHARD_BYTES", 3000, 9000),
            (plan, "BUCKET_BYTES", 500, 3000),
            (shuffle, "RUN_BYTES", 1000, 1000),
            (scan, "RUN_DOCUMENTS", 7, 200),
            (ranges, "RANGE_DOCUMENTS", 40, 300),
            (near_duplicates, "RANGE_BANDS", 900, 900),
            (near_duplicates, "_RUN", 16, 16),
        ):
            patch.setattr(module, name, data.draw(st.integers(low, high)))
        assert digests(prepare(*corpus, *flag, out=folder / "small", **KINDS[kind])) == whole
    workers = prepare(*corpus, *flag, out=folder / "workers", workers=2, **KINDS[kind])
    assert digests(workers) == whole


def test_every_document_is_in_one_part(corpus, prepare, tmp_path, small_shards):
    out = prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "out")
    stream = Stream.load(out)
    alpha = make_documents(1, 300)
    web = make_documents(2, 200)
    seen: list[str] = []
    for part in [*stream.megabatches, stream.valid, stream.test]:
        part_texts = texts(out, part.prefix)
        words = [len(text.split()) for text in part_texts]
        assert (part.documents, part.words) == (len(part_texts), sum(words))
        assert part.bytes == sum(len(text.encode()) + 1 for text in part_texts)
        assert part.items == sum(text.count("\n") + 2 for text in part_texts)
        assert part.tokens == sum(len(item) for item in MMapIndexedDataset(stream.path(part)))
        credited = sum(
            count for text, count in zip(part_texts, words, strict=True) if text in web[10:]
        )
        if part.name != "valid":
            assert part.sources == {"alpha": part.words - credited, "web": credited}
            assert abs(part.words - 1500) <= max(len(text.split()) for text in alpha + web)
        seen += part_texts
    assert len(set(seen)) == len(seen)
    assert set(seen) <= {*alpha, *web}
    assert set(texts(out, "valid")) <= set(web[10:]), (
        "a shared document counts for the first source"
    )
    assert stream.corpus["duplicate_documents"] == 40
    assert stream.corpus["surplus_words"] == sum(len(t.split()) for t in alpha + web) - sum(
        part.words for part in [*stream.megabatches, stream.valid, stream.test]
    )


COMMAND = """
import os, signal, sys
import alma.files
from data_prep import __main__, documents, plan, ranges
left = int(sys.argv.pop(1))
def fatal(function):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
alma.files.os.replace = fatal(os.replace)
documents.SHARD_BYTES = 12000
plan.BUCKET_BYTES = 6000
ranges.RANGE_DOCUMENTS = 300
__main__.main()
"""


def relaunch(*line: str, between: Callable[[], object] = bool) -> None:
    """Run the command, killed after a few renames, until it ends; calls `between` after each
    run."""
    codes = []
    while not codes or codes[-1]:
        assert len(codes) < 25, "no progress between kills"
        allowed = "50" if len(codes) % 2 else "25"
        codes.append(subprocess.run([sys.executable, "-c", COMMAND, allowed, *line]).returncode)
        between()
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 2


def test_killed_at_random_moments(corpus, prepare, tmp_path, monkeypatch):
    """With two workers; a relaunch that finishes has made the stream of an uninterrupted run."""
    monkeypatch.setattr(documents, "SHARD_BYTES", 12000)
    monkeypatch.setattr(plan, "BUCKET_BYTES", 6000)
    whole = digests(prepare(corpus, out=tmp_path / "whole"))
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "1000000",
        str(corpus),
        "--workers",
        "2",
        "--out",
        str(out),
    ]
    command += "--mega-batches 3 --words 1500 --valid-words 300 --vocab-size 120".split()
    rng = random.Random(0)
    for kills in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _wait(lambda: list(out.glob(".work-*/*")) or process.poll() is not None)  # noqa: B023
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.3) if kills < 4 else None)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
    assert digests(out) == whole


def _wait(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_a_full_disk_leaves_nothing_half_written(corpus, prepare, tmp_path, monkeypatch, capsys):
    whole = digests(prepare(corpus, out=tmp_path / "whole"))
    out = tmp_path / "out"
    left = 7

    def fsync(descriptor):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(SystemExit) as error:
            prepare(corpus, out=out)
    assert error.value.code == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(out.rglob("*.tmp"))
    assert digests(prepare(corpus, out=out)) == whole


def test_lost_documents_are_noticed(corpus, prepare, tmp_path, monkeypatch, capsys):
    texts = encode.bucket_texts

    def lossy(*arguments):
        return list(texts(*arguments))[:-1]

    monkeypatch.setattr(encode, "bucket_texts", lossy)
    with pytest.raises(SystemExit):
        prepare(corpus, out=tmp_path / "out")
    assert "differs from the plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("ba", "be", 1),
        lambda text: text.rpartition("\n\n")[0],
    ],
    ids=["edited", "shorter"],
)
def test_a_file_that_changes_meanwhile_is_noticed(
    corpus, prepare, tmp_path, monkeypatch, capsys, change
):
    cut = stages.cut.cut_corpus

    def meddle(**arguments):
        path = corpus / "web.txt"
        path.write_text(change(path.read_text("utf-8")), "utf-8")
        cut(**arguments)

    monkeypatch.setattr(stages.cut, "cut_corpus", meddle)
    with pytest.raises(SystemExit):
        prepare(corpus, out=tmp_path / "out")
    assert "web.txt: changed since it was scanned" in capsys.readouterr().err


def test_empty_documents_are_ignored(corpus, prepare, tmp_path):
    whole = digests(prepare(corpus, out=tmp_path / "whole"))
    (corpus / "empty.txt").write_text("")
    (corpus / "blank.jsonl").write_text('{"text": ""}\n\n{"text": " \\n\\t "}\n')
    (corpus / "alpha.txt").write_text(
        "\n\n \n\n" + (corpus / "alpha.txt").read_text("utf-8") + "\n\n\t\n", "utf-8"
    )
    assert digests(prepare(corpus, out=tmp_path / "out")) == whole


def test_bad_input_is_left_out_of_all_stages_and_counted(corpus, prepare, tmp_path, capsys):
    """The stream has the good documents; stream.json and the terminal report the others."""
    sources = (f"text={corpus}", f"lines={tmp_path / 'more.jsonl'}")
    good = [json.dumps({"text": text}) for text in make_documents(5, 20)]
    (tmp_path / "more.jsonl").write_text("\n".join(good), "utf-8")
    whole = digests(prepare(*sources, out=tmp_path / "whole"))
    bad = '{"text": "\\ud800"}\n{"text": \n'
    (tmp_path / "more.jsonl").write_text("\n".join([*good[:7], bad + good[7], *good[8:]]), "utf-8")
    capsys.readouterr()
    out = prepare(*sources, out=tmp_path / "out", on_bad_input="skip", workers=2)
    assert digests(out) == whole
    offset = len("\n".join(good[:7])) + 1
    skipped = Stream.load(out).corpus["skipped"]
    assert len(skipped["first"]) == 2
    assert "more.jsonl: malformed JSON" in skipped["first"][0]
    assert skipped["first"][0].endswith(f"at byte {offset}")
    assert "skipped bad input: 2 malformed JSON" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        prepare(*sources, out=tmp_path / "error")
    assert f"at byte {offset}" in capsys.readouterr().err


def test_text_without_spaces_between_words_is_a_warning(prepare, tmp_path, capsys):
    rng = random.Random(0)
    words = ["".join(map(chr, rng.choices(range(0x4E00, 0x4E80), k=80))) for _ in range(600)]
    (tmp_path / "a.txt").write_text("\n\n".join(map(" ".join, itertools.pairwise(words))), "utf-8")
    sizes = {"words": 200, "valid_words": 60, "vocab_size": 150, "mega_batches": 1}
    out = prepare(tmp_path / "a.txt", out=tmp_path / "out", **sizes)
    part = max(Stream.load(out).parts, key=lambda part: part.tokens / part.words)
    ratio = part.tokens / part.words
    assert ratio > 70
    warning = f"warning: {part.name} has {ratio:.0f} tokens a word. "
    remedy = f"for 1,000,000 tokens ask for {1e6 / ratio:.0f} words"
    assert re.search(f"{warning}.*{remedy}", capsys.readouterr().out)


@pytest.mark.parametrize("seed", [-(2**63), 2**63, 10**30])
def test_any_seed(corpus, prepare, tmp_path, capsys, seed):
    out = prepare(corpus, out=tmp_path / "out", seed=seed)
    assert Stream.load(out).seed == seed
    prepare(corpus, out=out, seed=seed)
    captured = capsys.readouterr()
    assert "already finished" in captured.err
    assert "warning" not in captured.out, "words of about three tokens are usual"


def test_each_seed_has_an_order_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(make_documents(1, 40)), "utf-8")
    reader = documents.Reader()
    shard, *_ = documents.make_shards([("a", str(tmp_path / "a.txt"))], reader)
    orders = set()
    for seed in range(-4, 4):
        space = work.Workspace(tmp_path, seed, reader, ("a",))
        orders.add(tuple(text for _, _, text, _ in sorted(scan.keyed_texts(space, shard))))
    assert len(orders) == 8
