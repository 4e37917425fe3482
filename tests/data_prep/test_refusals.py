"""Bad input gives one line on stderr and exit code 2, before anything is written;
all problems at once."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from alma.stream import Stream
from data_prep import __main__ as cli
from data_prep import inspect

from .conftest import LETTERS, make, make_documents, outcome, run
from .corpus_files import PACKERS

TEXT = b"one two three\n\nfour five six\n\nseven eight nine ten\n"
GOOD = b'{"text": "one two"}\n'
SIZES = "--mega-batches 1 --words 3 --valid-words 3 --vocab-size 25 --workers 1"
IID = f"{SIZES} --words 300 --valid-words 99"
ARCHIVES = (".gz", ".zst", ".bz2", ".xz")
ORDERED = "--words 700 --eval-words 200 --valid-words 100 --vocab-size 60 --workers 1"
BY = f"news.jsonl --by year {ORDERED}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with files of all kinds, and three streams: `iid`, `ordered` and `dated`."""
    folder = tmp_path_factory.mktemp("refusals")
    texts = []
    for seed in range(3):
        texts.append([text.translate(LETTERS) for text in make_documents(seed, 200)])
    days = ["2020-02-03", "2021-05-06", "2023-07-08"]
    news = [
        {"text": text, "date": day}
        for day, period_texts in zip(days, texts, strict=True)
        for text in period_texts
    ]
    files = {
        "a.txt": TEXT,
        "blank.txt": b" \n\n\t\n",
        "empty.txt": b"",
        "folder/a.pdf": b"x",
        "home/notes": b"mine",
        "bad.txt.gz": gzip.compress(TEXT + b"\nok \xff\xfe bad\n"),
        "bad.jsonl": GOOD + b"\n" + GOOD + b'{"text": "a\n' + GOOD,
        "body.jsonl": GOOD + b"\n" + GOOD + b'{"body": "a"}\n' + GOOD,
        "bad.model": b"nothing",
        "news.jsonl": "\n".join(map(json.dumps, news)).encode(),
        "days.jsonl": b'{"text": "a b", "date": 20210304}\n{"text": "c", "date": "202103"}\n',
        "coarse.jsonl": b'{"text": "a b", "date": "2021"}\n{"text": "c", "date": "44 BC"}\n'
        b'{"text": "d"}',
        **{
            f"{2023 + n}.txt": "\n\n".join(period_texts).encode()
            for n, period_texts in enumerate(texts)
        },
        **{f"cut.txt{end}": PACKERS[end](TEXT * 50)[:-3] for end in ARCHIVES},
        **{f"no.txt{end}": b"no archive at all" for end in ARCHIVES},
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "none").mkdir()
    run(
        cli.main,
        f"{folder}/2023.txt",
        *SIZES.split(),
        "--words",
        300,
        "--valid-words=99",
        "--out",
        folder / "iid",
    )
    years = (folder / "2023.txt", folder / "2024.txt")
    run(cli.main, *years, "--ordered", *ORDERED.split(), "--out", folder / "ordered")
    run(cli.main, folder / "news.jsonl", *BY.split()[1:], "--until=2021", "--out", folder / "dated")
    return folder


LATE = (
    "missing",
    "longer",
    "needed",
    "duplicates",
    "--vocab-size",
    "period",
    "at byte",
    "date",
    "damaged",
)
"""Words of what is found when the text is read; all else is found before --out exists."""
REFUSED = [
    # files
    (f"a.txt bad.txt.gz {SIZES}",
     "bad.txt.gz: not UTF-8 at byte 55; fix or remove it, or leave it out"),
    (f"bad.jsonl {SIZES}",
     f"bad.jsonl: malformed JSON .* at byte {2 * len(GOOD) + 1}; fix or remove it, or"),
    (f"body.jsonl {SIZES}", "body.jsonl: no field `text` that holds a string .--text-key"),
    *((f"cut.txt{end} {SIZES}", rf"cut.txt{end}: damaged or truncated") for end in ARCHIVES),
    (f"empty.txt {SIZES}", "no documents"),
    (f"empty.txt {SIZES} --near-duplicates drop", "no documents"),
    (f"absent.txt {SIZES}", "absent.txt: no such file"),
    (f"none {SIZES}", "an empty directory"),
    (f"folder {SIZES}", "a.pdf: unknown kind of file"),
    (f"one=a.txt two=[a].txt {SIZES}", "a.txt: is in both one and two"),
    (f"=x {SIZES}", "expected PATH or NAME=PATH"),
    # sizes, and what they need
    (f"a.txt {SIZES} --words 100",
     "10 words in 3 documents after dropping 0 dup.*: 193 words are missing"),
    (f"a.txt {SIZES} --words 1.5", "not a positive whole number"),
    (f"a.txt {SIZES} --vocab-size 5000", "--vocab-size 5,000 is too large"),
    (f"a.txt {SIZES} --vocab-size 2", "--vocab-size 2 is too small"),
    # flags
    (f"a.txt {SIZES} --valid-source other", "no such source; choose from a"),
    (f"a.txt {SIZES} --documents a=page", "invalid choice: 'a=page'"),
    (f"a.txt {SIZES} --documents b=file", "--documents b=: no such source; choose from a"),
    (f"a.txt {SIZES} --partition cpu --mem-gb 4",
     "--partition, --mem-gb: only with --cluster slurm"),
    (f"a.txt {SIZES} --merge-small --date-key day", "--date-key, --merge-small: only with --by"),
    # tokenizers
    ("a.txt --mega-batches 1 --words 3 --valid-words 3",
     "give one of --vocab-size, --tokenizer, --bpe"),
    ("a.txt --mega-batches 1 --words 3 --valid-words 3 --tokenizer x.model",
     "x.model: no such file"),
    ("a.txt --mega-batches 1 --words 3 --valid-words 3 --tokenizer bad.model",
     "not a SentencePiece model"),
    ("a.txt --mega-batches 1 --words 3 --valid-words 3 --bpe gpt2", "all three or none"),
    (f"a.txt {SIZES} --gpt2-vocab-bpe a.txt", "all three or none"),
    # --out
    (f"a.txt {SIZES} --out home", "not empty and no stream"),
    (f"a.txt {SIZES} --out a.txt", "cannot become one"),
    (f"2023.txt {IID} --out iid --seed 3", r"made with other settings \(seed\)"),
    # ordered
    (f"2023.txt 2025.txt --ordered {ORDERED} --mega-batches 2",
     "--mega-batches: not of an ordered"),
    ("2023.txt --ordered --eval-words 9 --vocab-size 60", "give --valid-words"),
    (f"2023.txt 2025.txt --ordered {ORDERED} --words 50000",
     r"megabatch_01 \(2025\) has .*; add text"),
    (f"2023+=2023.txt --ordered {ORDERED}",
     r"2023\+=: the first source begins a mega-batch; write 2023="),
    (f"x=2023.txt y=2024.txt x=2025.txt --ordered {ORDERED}",
     "x: in two mega-batches; give each a name"),
    # dated
    (f"{BY} --by month --date-key day",
     "600 documents without a date .first: .*: no date at byte 0"),
    (f"days.jsonl {BY[11:]}",
     "2 documents with an unreadable date .*: 20210304 at .*--date-format"),
    (f"{BY} --date-format hours", "invalid choice: 'hours' .* a pattern such as %Y%m%d"),
    (f"a.txt {SIZES} --date-format seconds", "--date-format: only with --by"),
    (f"{BY} --by day", "argument --by: invalid choice: 'day'"),
    (f"{BY} --from 2020-02-30", "--from '2020-02-30': no date; write it as 2023"),
    (f"{BY} --from 2020 --until 2019", "--from 2020 is after --until 2019"),
    (f"{BY} --until 2019", "no document is in a period of the stream: left out 600 after"),
    (f"{BY} --words 50000",
     r"3 of 3 mega-batches have fewer than the 50,300 words of their parts \(200"),
    (f"{BY} --mega-batches 3",
     "--mega-batches: not of an ordered stream: its mega-batches are periods"),
    (f"{BY} --ordered", "--ordered: not with --by"),
    (f"coarse.jsonl {BY} --by month",
     "1 documents without a date .*1 documents with an unreadable date "
     r"\(first: .*coarse.jsonl: '44 BC' at byte \d+\); "
     r"1 documents whose date is not within one period"),
    # appended
    ("2024.txt --append --out iid --vocab-size 120", "--vocab-size: not with --append"),
    ("2024.txt --append --out iid --max-document-words 20",
     "stream was made with no --max-document-words"),
    ("2024.txt --append --out iid --near-duplicates drop",
     "the stream was made with keep; leave it out"),
    ("2024.txt --append --out iid --ordered", "was made without it; leave it out"),
    ("2024.txt --append --out iid --by year", "was made without --by; leave them out"),
    ("2024.txt --append --out nowhere", "no finished stream here"),
    ("2025.txt --append --out ordered --mega-batches 1",
     "--mega-batches: not of an ordered stream"),
    ("2025.txt --append --out ordered --words 50000", r"megabatch_02 \(2025\) has"),
    ("news.jsonl --append --out dated --by year", "--by: not with --append to a stream by year"),
    ("news.jsonl --append --out dated --from 2023",
     "--from: not with --append to a stream by year"),
]  # fmt: skip


def contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and ".work-" not in str(path)
    }


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_one_line_and_nothing_is_made(place, tmp_path, capsys, monkeypatch, line, message):
    monkeypatch.chdir(place)
    before = contents(place)
    out = tmp_path / "out"
    words = [*line.split(), *(() if "--out" in line else ("--out", out))]
    code, printed, err = outcome(lambda: run(cli.main, *words), capsys)
    assert (code, printed) == (2, "")
    lines = [line for line in err.splitlines() if not line.endswith("removed")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines[0]
    assert contents(place) == before
    assert not (out / "stream.json").exists()
    if not any(word in lines[0] for word in (*LATE, "no documents")):
        assert not out.exists() or not list(out.iterdir()), "found out too late"


def test_all_problems_are_reported_at_once(tmp_path, capsys):
    absent = tmp_path / "absent.txt"
    second = tmp_path / "other.txt"
    flags = (
        f"--documents c=file --valid-source d --out {tmp_path}/out --bpe gpt2 "
        "--gpt2-encoder-json e.json"
    )
    code, _, err = outcome(lambda: run(cli.main, absent, f"b={second}", *flags.split()), capsys)
    assert code == 2
    assert err == (
        f"error: {absent}: no such file or directory; {second}: no such file or directory; "
        "--documents c=: no such source; choose from absent, b; "
        "--valid-source d: no such source; choose from absent, b; "
        "give --mega-batches, --words, --valid-words; --gpt2-encoder-json e.json: no such file; "
        "--bpe gpt2, --gpt2-encoder-json FILE and --gpt2-vocab-bpe FILE go together: "
        "all three or none\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "flags", "needs"),
    [
        ("pyarrow", "x.parquet", "x.parquet: needs pyarrow"),
        ("rensa", "a.txt --near-duplicates drop", "needs rensa"),
    ],
)
def test_a_missing_package_is_named_at_once(
    place, tmp_path, monkeypatch, capsys, name, flags, needs
):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(place)
    (place / "x.parquet").write_bytes(b"PAR1")
    words = [*flags.split(), *SIZES.split(), "--out", tmp_path / "out"]
    code, _, err = outcome(lambda: run(cli.main, *words), capsys)
    assert code == 2
    assert needs in err
    assert "; pip install 'alma-macroscale[corpus]'" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("valid.keys", None, "missing; the documents of the stream are unknown without it"),
        ("valid.keys", 24, "damaged; restore the file"),
        ("megabatch_00/train.bin", 24, "damaged; restore the file"),
    ],
)
def test_append_needs_whole_files(place, tmp_path, capsys, name, size, message):
    subprocess.run(["cp", "-a", place / "iid", tmp_path / "out"], check=True)
    if size is None:
        (tmp_path / "out" / name).unlink()
    else:
        os.truncate(tmp_path / "out" / name, size)
    code, _, err = outcome(
        lambda: run(cli.main, place / "2024.txt", "--append", "--out", tmp_path / "out"), capsys
    )
    assert code == 2
    assert f"{name}: {message}" in err


def test_other_input_is_another_stream(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    sizes = {"mega_batches": 1, "words": 3, "valid_words": 3, "vocab_size": 10}
    out = make(path, out=tmp_path / "out", **sizes)
    before = (out / "stream.json").read_bytes()
    path.write_bytes(TEXT + b"\nmore\n")
    with pytest.raises(SystemExit):
        make(path, out=out, **sizes)
    assert "made with other settings (input)" in capsys.readouterr().err
    assert (out / "stream.json").read_bytes() == before
    assert Stream.load(out).parts


def test_errors_in_workers_are_one_line_too(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("data_prep.documents.SHARD_BYTES", 1)
    sources = [f"{n}={place}/no.txt{end}" for n, end in enumerate((".gz", ".xz"))]
    words = [*sources, *SIZES.split(), "--workers=2", "--out", tmp_path / "out"]
    code, _, err = outcome(lambda: run(cli.main, *words), capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "damaged or truncated" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nowhere", "nowhere: no finished stream here"),
        ("", "the following arguments are required: STREAM"),
        ("nowhere --workers 0", "'0' is not a positive whole number"),
    ],
)
def test_wrong_arguments_of_inspect(tmp_path, monkeypatch, capsys, line, message):
    monkeypatch.chdir(tmp_path)
    code, text, error = outcome(lambda: run(inspect.main, *line.split()), capsys)
    assert (code, text) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
