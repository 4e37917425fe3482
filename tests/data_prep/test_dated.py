"""`--by`: periods of the documents' dates are the mega-batches."""

import json
import random
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alma.dates import Dates, label, number_of
from alma.errors import UserError
from alma.stream import Stream
from data_prep import dated as periods
from data_prep import documents, plan
from data_prep.dated import Dated, merged
from data_prep.documents import Reader
from data_prep.scan import RECORD, scan_shard
from data_prep.work import Workspace, mapped

from .conftest import FEW, LETTERS, edited, make_documents
from .corpus_files import warc
from .test_ordered import APPEND, SIZES
from .test_pipeline import digests, past, relaunch, texts

YEARS = ("2020", "2021", "2023", "2024")


def write_dated(path: Path, dated: list[tuple[object, str]], **fields: object) -> Path:
    """JSON lines of (date, text); no date: None."""
    lines = [
        json.dumps({"text": text} | ({} if day is None else {"date": day}) | fields)
        for day, text in dated
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def days_of(year: str, number: int) -> list[str]:
    """Days of a year in some order, with times and zones."""
    rng = random.Random(int(year))
    zones = ["", "T03:00:00+02:00", "T22:00Z", " 12:00:00.5"]
    days = [date(int(year), 1, 2) + timedelta(days=rng.randrange(363)) for _ in range(number)]
    return [f"{day}{rng.choice(zones)}" for day in days]


@pytest.fixture
def news() -> list[tuple[str, str]]:
    """Documents of four years, in no order; later years repeat documents of earlier ones."""
    documents: list[tuple[str, str]] = []
    old: list[str] = []
    for number, year in enumerate(YEARS):
        new = [text.translate(LETTERS) for text in make_documents(60 + number, 90)]
        documents += zip(days_of(year, 200), [*new, *old[:20], *new[:5]], strict=False)
        old = new + old[:20]
    random.Random(0).shuffle(documents)
    return documents


@pytest.fixture
def dated(prepare):
    """Run the command with --by."""

    def call(*arguments, out, by="year", **flags):
        return prepare(*arguments, "--by", by, out=out, **SIZES | flags)

    return call


def years_of(news: list[tuple[str, str]]) -> dict[str, str]:
    """The first year of each text."""
    periods: dict[str, str] = {}
    for day, text in news:
        periods[text] = min(day[:4], periods.get(text, "9999"))
    return periods


def test_the_parts_and_what_is_in_them(news, dated, tmp_path):
    out = dated(write_dated(tmp_path / "news.jsonl", news), out=tmp_path / "out", words=None)
    stream = Stream.load(out)
    assert [part.period for part in stream.megabatches] == list(YEARS)
    assert [part.period for part in stream.held_out] == list(YEARS)
    assert [part.period for part in stream.held_out_valid] == list(YEARS)
    first = years_of(news)
    documents = {}
    for part in (*stream.megabatches, *stream.held_out, *stream.held_out_valid):
        part_texts = texts(out, part.prefix)
        assert {first[text] for text in part_texts} == {part.period}
        assert list(part.sources) == ["news"]
        documents |= dict.fromkeys(part_texts, part.name)
    assert documents.keys() == first.keys(), "each text once, in the first year that has it"
    record = json.loads((out / "stream.json").read_bytes())
    assert record["megabatches"][2]["period"] == "2023"
    assert "period" not in record["test"]
    assert record["corpus"]["dates"] == {"left_out": {}}
    assert record["settings"]["dates"]["by"] == "year"


@given(st.randoms(use_true_random=False), st.sampled_from(["month", "quarter", "2-years"]))
@settings(FEW)
def test_no_text_of_the_future_and_no_piece_in_two_parts(dated, tmp_path_factory, rng, by):
    folder = tmp_path_factory.mktemp("dated")
    streams = [
        text.translate(LETTERS).split("\n") for text in make_documents(rng.randrange(99), 240, 4)
    ]
    docs = []
    for lines in streams:
        first_word = lines[0].split()[0]
        docs.append("\n".join(f"{first_word} {line}" for line in lines))
    start = date(2023, 11, 1)
    news = [(str(start + timedelta(days=rng.randrange(120))), text) for text in docs]
    news += [
        (str(start + timedelta(days=rng.randrange(120))), text) for text in rng.sample(docs, 40)
    ]
    sizes = {"words": None, "eval_words": 60, "valid_words": 50, "max_document_words": 12}
    out = dated(
        write_dated(folder / "a.jsonl", news), "--merge-small", out=folder / "out", by=by, **sizes
    )
    stream = Stream.load(out)
    days: dict[str, date] = {}
    for day, text in news:
        days[text.split()[0]] = min(date.fromisoformat(day), days.get(text.split()[0], date.max))
    where: dict[str, str] = {}
    for part in (*stream.megabatches, *stream.held_out, *stream.held_out_valid):
        ends = part.period.split("..")
        for document in {
            line.split()[0] for piece in texts(out, part.prefix) for line in piece.split("\n")
        }:
            assert where.setdefault(document, part.name) == part.name
            assert ends[0] <= label(by, number_of(by, days[document])) <= ends[-1]
    assert len(where) > 200


def test_append_gives_what_a_new_stream_would_have(news, dated, prepare, tmp_path):
    news += [(day, edited(text, 2, 1).translate(LETTERS)) for day, text in news[:60]]
    random.Random(1).shuffle(news)
    near = "drop"
    whole = dated(
        write_dated(tmp_path / "all.jsonl", news), out=tmp_path / "whole", near_duplicates=near
    )
    early = [document for document in news if document[0] < "2023"]
    out = dated(
        write_dated(tmp_path / "early.jsonl", early), out=tmp_path / "out", near_duplicates=near
    )
    before = Stream.load(out)
    rest_file = write_dated(tmp_path / "rest.jsonl", [*news[::-1], ("2019", "too late")])
    prepare(rest_file, "--append", out=out, **APPEND)
    stream = Stream.load(out)
    assert past(out) == past(whole)
    assert [part.period for part in stream.megabatches] == list(YEARS)
    assert stream.megabatches[:2] == before.megabatches
    assert (before.test_megabatches, stream.test_megabatches) == (2, 2)  # `test` stays as it is
    assert Stream.load(whole).test_megabatches == len(YEARS)
    late = len(early) + 1
    assert stream.appended[0]["corpus"]["dates"] == {"left_out": {"late": late}}
    longest = digests(out)
    prepare(rest_file, "--append", out=out, **APPEND)
    assert digests(out) == longest, "the same again changes nothing"


@pytest.mark.thorough
def test_killed_anywhere_and_run_again(news, dated, prepare, tmp_path, monkeypatch):
    """All stages: dates, bands, keys and those of every stream;
    at any moment it is a stream or none."""
    monkeypatch.setattr(documents, "SHARD_BYTES", 12000)
    monkeypatch.setattr(plan, "BUCKET_BYTES", 6000)
    early = write_dated(
        tmp_path / "early.jsonl", [document for document in news if document[0] < "2023"]
    )
    late = write_dated(
        tmp_path / "late.jsonl", [document for document in news if document[0] > "2023"]
    )
    whole = dated(early, out=tmp_path / "whole", near_duplicates="drop")
    early_digests = digests(whole)
    prepare(late, "--append", out=whole, **APPEND)
    out = tmp_path / "out"
    new = (
        "--by year --words 700 --eval-words 200 --valid-words 100 --vocab-size 80 "
        "--near-duplicates drop"
    )
    relaunch(str(early), *new.split(), "--workers", "1", "--out", str(out))
    assert digests(out) == early_digests
    relaunch(
        str(late), "--append", "--workers", "1", "--out", str(out), between=lambda: Stream.load(out)
    )
    assert digests(out) == digests(whole)


@pytest.mark.parametrize("shard_bytes", [2000, documents.SHARD_BYTES])
def test_bounds_undated_text_and_nested_dates(
    news, dated, tmp_path, capsys, monkeypatch, shard_bytes
):
    monkeypatch.setattr(documents, "SHARD_BYTES", shard_bytes)
    lines = [{"meta": {"day": day}, "text": text} for day, text in news]
    lines += [
        {"meta": {"day": "soon"}, "text": "a"},
        {"meta": 3, "text": "b"},
        {"text": " ", "meta": {}},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (tmp_path / "b.txt").write_text("no date\n\nnone here", "utf-8")
    flags = {"date_key": "meta.day", "from": "2021", "until": "2023-12-31", "undated": "skip"}
    out = dated(path, tmp_path / "b.txt", out=tmp_path / "out", **flags)
    stream = Stream.load(out)
    assert [part.period for part in stream.megabatches] == ["2021", "2023"]
    before = sum(day.startswith("2020") for day, _ in news)
    after = sum(day.startswith("2024") for day, _ in news)
    counts = {"undated": 3, "unreadable": 1, "before": before, "after": after}
    assert stream.corpus["dates"]["left_out"] == counts
    text = capsys.readouterr().out
    assert (
        f"left out by date, documents: 3 undated, 1 unreadable, {before} before, {after} after"
        in text
    )


def test_numbers_are_dates_as_the_format_says(news, dated, prepare, tmp_path):
    """Also in an addition, which keeps the format."""
    whole = dated(write_dated(tmp_path / "news.jsonl", news), out=tmp_path / "whole")
    numbers = [(int(day[:10].replace("-", "")), text) for day, text in news]
    early = [number for number in numbers if number[0] < 20240000]
    late = [number for number in numbers if number[0] >= 20240000]
    early_file = write_dated(tmp_path / "early/news.jsonl", early)
    out = dated(early_file, out=tmp_path / "out", date_format="%Y%m%d")
    assert [part.period for part in Stream.load(out).megabatches] == ["2020", "2021", "2023"]
    prepare(write_dated(tmp_path / "late/news.jsonl", late), "--append", out=out, **APPEND)
    assert past(out) == past(whole)


def test_small_periods_are_merged(news, dated, tmp_path, inspected):
    """The next joins a small one; the last joins the one before."""
    news = [document for document in news if not document[0].startswith("2023")]
    news += [("2019-05-05", "one small document"), ("2025", "and another")]
    path = write_dated(tmp_path / "a.jsonl", news)
    out = dated(path, "--merge-small", out=tmp_path / "out", words=None)
    assert [part.period for part in Stream.load(out).megabatches] == [
        "2019..2020",
        "2021",
        "2024..2025",
    ]
    sized = Stream.load(dated(path, "--merge-small", out=tmp_path / "sized", words=300))
    words = [part.words for part in sized.megabatches]
    assert sized.corpus["spread"] == (max(words) - min(words)) / 300
    code, text, _ = inspected(out)
    assert code == 0
    assert ["megabatch_02", "2024..2025"] in [line.split()[:2] for line in text.splitlines()]
    assert inspected(out, "--verify")[0] == 0


@pytest.mark.parametrize("near", ["keep", "drop"])
def test_duplicates_do_not_make_a_period_large(news, dated, prepare, tmp_path, near, capsys):
    """But with near duplicates, which are found after the merge."""
    news = [(f"{int(day[:4]) - 21}{day[4:]}", text) for day, text in news]  # 1999, 2000, 2002, 2003
    copies = [(f"2001-{day[5:]}", text) for day, text in news if day[:4] == "2000"]
    path = write_dated(tmp_path / "a.jsonl", [*copies, *news])
    if near == "drop":
        with pytest.raises(SystemExit):
            dated(path, "--merge-small", out=tmp_path / "out", words=None, near_duplicates=near)
        assert "megabatch_02 (2001) has 0; merge periods" in capsys.readouterr().err
        return
    out = dated(path, "--merge-small", out=tmp_path / "out", words=None)
    stream = Stream.load(out)
    assert [part.period for part in stream.megabatches] == ["1999", "2000", "2001..2002", "2003"]
    first = years_of(news)
    for part in (*stream.megabatches, *stream.held_out, *stream.held_out_valid):
        assert {first[text] for text in texts(out, part.prefix)} == {part.period[-4:]}
    late = write_dated(
        tmp_path / "b.jsonl", [("2004", text) for _, text in news] + [("2005", "new")]
    )
    with pytest.raises(SystemExit):
        prepare(late, "--append", out=out, **APPEND)
    assert "megabatch_04 (2004..2005) has 1; " in capsys.readouterr().err, "the stream has the rest"


def test_too_many_periods_are_counted_after_the_merge(monkeypatch):
    monkeypatch.setattr(periods, "MOST", 3)
    words = {f"{year}/a": 4 for year in range(2020, 2024)}
    for small in (False, True):
        splits = Dated(0, 1, 2, 2, None, merge_small=small)
        if small:
            assert len(splits.with_periods("year", words, False).order) == 4
            assert splits.with_periods("year", words, True).periods == ["2020..2021", "2022..2023"]
        splits = Dated(0, 1, 1, 1, None, merge_small=small)
        with pytest.raises(
            UserError, match="4 periods, of which a stream has at most 3; choose longer ones"
        ):
            splits.with_periods("year", words, small)


@pytest.mark.parametrize(
    ("first", "merge_small", "remedy"),
    [
        (0, False, "merge periods with --merge-small"),
        (4, False, "leave their text out, or make the stream anew with --merge-small"),
        (4, True, "append them together with the text of the next period"),
    ],
)
def test_the_remedy_for_a_small_period_is_one_that_the_command_takes(first, merge_small, remedy):
    splits = Dated(1, 1, 2, 2, None, first=first, merge_small=merge_small)
    assert splits.remedy.startswith(remedy)


def test_the_rule_of_merging():
    sizes = {1: 3, 2: 3, 4: 9, 5: 1, 6: 5, 7: 2}
    assert merged(sizes, 6) == [[1, 2], [4], [5, 6, 7]]
    assert merged({1: 3, 2: 1}, 6) == [[1, 2]]
    assert merged({1: 6, 2: 6}, 6) == [[1], [2]]


def test_dates_of_wet_and_parquet(news, dated, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = dated(write_dated(tmp_path / "news.jsonl", news), out=tmp_path / "whole")
    records = []
    for day, text in news:
        header, _, rest = warc("conversion", text.encode()).partition(b"\r\n")
        records.append(header + b"\r\nWARC-Date: " + day.encode() + b"\r\n" + rest)
    (tmp_path / "news.wet").write_bytes(b"".join(records))
    assert digests(dated(tmp_path / "news.wet", out=tmp_path / "wet")) == digests(whole)
    days = pyarrow.array([datetime.fromisoformat(day[:10]) for day, _ in news])
    when = days.cast(pyarrow.timestamp("ns", "Etc/GMT+2"))
    columns = {"when": when, "text": [text for _, text in news]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "news.parquet", row_group_size=50)
    out = dated(tmp_path / "news.parquet", out=tmp_path / "parquet", date_key="when")
    assert digests(out) == digests(whole)


def test_a_file_that_changes_between_the_dates_and_the_scan(tmp_path):
    path = write_dated(tmp_path / "a.jsonl", [("2021", "text")])
    space = Workspace(tmp_path, 0, Reader(dates=Dates("year")), ("2020/a",))
    (shard,) = documents.make_shards([("a", str(path))], space.reader)
    with pytest.raises(UserError, match=r"a.jsonl: changed since it was scanned"):
        scan_shard(space, 0, shard)


def test_more_pairs_of_period_and_source_than_two_bytes_count(tmp_path):
    path = write_dated(tmp_path / "a.jsonl", [("9999", "the last")])
    pairs = (*(f"{2020 + number // 100}/{number}" for number in range(70_000)), "9999/a")
    space = Workspace(tmp_path, 0, Reader(dates=Dates("year")), pairs)
    (shard,) = documents.make_shards([("a", str(path))], space.reader)
    scan_shard(space, 0, shard)
    assert mapped(space.file("scan", 0, "bin"), RECORD)["source"].tolist() == [70_000]
