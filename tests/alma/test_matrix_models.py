"""`alma matrix`: which models there are, until when they were trained, and what is refused."""

import json
import shlex
from pathlib import Path

import pytest

from slurm.matrix.cutoffs import cutoff_of, divide
from slurm.matrix.models import ModelOptions, find_models
from tests.alma.matrix_data import write_records
from tests.alma.monthly import Monthly

CARD = """\
| | |
|---|---|
| data | mega-batches 1 to 3 of 3, 2023-11 to 2024-01..2024-02, of the stream `s` |
| newest text that this model had seen before | 2023-05 |
"""


@pytest.mark.parametrize(
    ("name", "by", "date", "rest"),
    [
        ("news-1b-2024-03", "month", "2024-03", "news-1b"),
        ("2024-03-01", "month", "2024-03-01", ""),
        ("202403", "month", "2024-03", ""),
        ("m_20240301_b", "month", "2024-03-01", "m-b"),
        ("a-2024-Q2", "quarter", "2024-Q2", "a"),
        ("a-2024-W05", "week", "2024-W05", "a"),
        ("a-2024", "year", "2024", "a"),
        ("a-2024", "month", "", "a-2024"),
        ("step-12000", "month", "", "step-12000"),
        ("step-202413", "month", "", "step-202413"),
    ],
)
def test_the_date_in_a_name(name, by, date, rest):
    assert divide(name, by) == (date, rest)


@pytest.mark.parametrize(
    ("date", "by", "period"),
    [
        ("2024-03", "month", "2024-03"),
        ("2024-03-31", "month", "2024-03"),
        ("2024", "month", "2024-12"),  # text until its end
        ("2024-03", "year", "2024"),
        ("2024-03-31", "quarter", "2024-Q1"),
        ("2024-03", "5-years", "2020-2024"),
    ],
)
def test_a_cutoff_counts_as_all_of_its_period(date, by, period):
    assert cutoff_of("m-2019-01", date, by) == (period, "--cutoff")


def test_a_date_is_that_of_the_flag_else_of_the_name_else_of_the_card(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    assert cutoff_of(str(tmp_path), None, "month") == ("2024-02", "its card")
    dated = tmp_path / "m-2023-12"
    dated.mkdir()
    (dated / "README.md").write_text(CARD)
    assert cutoff_of(str(dated), None, "month") == ("2023-12", "its name")
    assert cutoff_of(str(dated), "2022-01", "month") == ("2022-01", "--cutoff")


def test_a_run_is_the_models_of_its_stages(tmp_path):
    run = tmp_path / "sm"
    Monthly(run, metric="perplexity").months(3).arrive()
    for stage in range(3):
        folder = run / f"stage_{stage:02}"
        folder.mkdir(exist_ok=True)
        (folder / "trained.json").write_text('{"checkpoint": "weights"}')
        (folder / "weights").write_text("")
        (folder / "result.json").write_text('{"training": [{}]}')
    options = ModelOptions("month", {}, {}, by_command=True)
    models = find_models([str(run)], options)
    assert [model.name for model in models] == [f"{run}/stage_{n:02}" for n in range(3)]
    assert [model.members for model in models] == [
        (str((run / f"stage_{n:02}" / "weights").resolve()),) for n in range(3)
    ]
    assert {model.group for model in models} == {"sm"}
    periods = json.loads((run / "results.jsonl").read_text().splitlines()[-1])["extra"]
    assert [model.cutoff.period for model in models] == periods["matrix_periods"][:3]
    single = find_models([f"{run}/stage_01", f"{run}/stage_02/weights"], options)
    assert [model.cutoff for model in single] == [model.cutoff for model in models[1:]]
    assert [model.members for model in single] == [model.members for model in models[1:]]


TWO = "a-2024-01 a-2024-02 --data news.jsonl --by month"
WRONG = {
    "a b-2024-02 --data news.jsonl --by month --command true": (
        "a: no date in its name or on a card: give --cutoff a=2024-03"
    ),
    "x-2023-01-2024-02 b-2024-02 --data news.jsonl --by month --command true": (
        "2023-01 and 2024-02 are in its name: which one?"
    ),
    f"{TWO} --command true --cutoff a-2024-01=soon": "--cutoff a-2024-01=soon: no date: write it",
    f"{TWO} --command true --cutoff a-2024-03=2024": "--cutoff a-2024-03=2024: no such model",
    f"{TWO} --command true --cutoff a-2024-01": "--cutoff a-2024-01: give MODEL=DATE",
    f"{TWO} --command true --cutoff a-2024-01=2024-02": (
        "a-2024-01 and a-2024-02 are both trained until 2024-02: leave out one"
    ),
    "a-2024-01 b-2024-02 --data news.jsonl --by month --command true": (
        "a-2024-01: the only model of its group, a: give models of several dates"
    ),
    "a-2024-01 a-2024-01 --data news.jsonl --by month --command true": "given twice",
    f"{TWO} --command no-such-program": "--command 'no-such-program': no such program",
    f'{TWO} --command "\'"': "check its quotes",
    f"{TWO} --metric accuracy": "--metric: folders of Hugging Face have bits a byte",
    f"{TWO} --command true --metric seed": "--metric 'seed': give the name of a metric",
    f"{TWO} --command true --metric accuracy --text-key body": (
        "--text-key: with --metric no text is read: leave it out"
    ),
    f"{TWO} --command true --block-size 8": "--block-size: not with --command",
    f"{TWO} --command true --from soon": "--from 'soon': no date",
    f"{TWO} --command true --out m.txt": "give m.txt.csv",
    f"{TWO} --command true --out no/m.csv": "its folder does not exist",
    f"{TWO} --command true --wait": "--wait: only with --cluster slurm",
    TWO: "a-2024-01: no such folder: give a folder of save_pretrained",
    "hf-2024-01 hf-2024-02 --data news.jsonl --by month": "hf-2024-01: no weights",
    "a-2024-01 a-2024-02 --data none.jsonl --by month --command true": "no such file",
    "a-2024-01 a-2024-02 --data plain.txt --by month --command true": "have no dates",
    "a-2024-01 a-2024-02 --data one.jsonl --by month --command true": (
        "all records are of 2024-05, and none is in another period"
    ),
    "a-2024-01 a-2024-02 --data bad.jsonl --by month --command true": "malformed JSON",
    "a-2024-01 a-2024-02 --data notext.jsonl --by month --command true": (
        "no field `text` that holds a string"
    ),
    f"{TWO} --command true --date-key day": "16 documents without a date",
    f"{TWO} --command true --dry-run --date-key day": "16 documents without a date",
    f"{TWO} --command true --text-key body": "or give --metric with what your program returns",
    f"{TWO} --text-key body --dry-run --command true --cutoff a-2024-01=2024-07": (
        "no field `body` that holds a string"
    ),
    "a-2024-07 a-2024-06 --data news.jsonl --by month --command true --dry-run": (
        "no period of the data is after 2024-06, until which the first model was trained, a-2024-06"
    ),
    "a-2024-07 a-2024-06 --data news.jsonl --by month --command true": (
        "give newer data or older models"
    ),
    "'a\n-2024-01' a-2024-02 --data news.jsonl --by month --command true": (
        r"MODEL 'a\n-2024-01': a name of printable characters alone: rename it"
    ),
    f"{TWO} --command true --group 'a-2024-01=a\n'": "--group 'a\\n': a name of printable",
    "a-2024-01 a-2024-02 --data bad.csv --by month --command true": (
        "bad.csv: 1 values, where line 1 names 2 columns at line 3; fix or remove it"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_ends_in_one_line_before_anything_is_made(words, matrix_place, matrix):
    write_records(matrix_place / "one.jsonl", [{"date": "2024-05-01", "text": "x"}])
    write_records(matrix_place / "notext.jsonl", [{"date": "2024-05-01", "body": "x"}])
    (matrix_place / "bad.jsonl").write_text("{")
    (matrix_place / "bad.csv").write_text("date,text\n2024-01-01,x\n2024-02-01\n")
    (matrix_place / "plain.txt").write_text("words\n")
    for name in ("hf-2024-01", "hf-2024-02"):
        (matrix_place / name).mkdir()
        (matrix_place / name / "config.json").write_text("{}")
    before = sorted(matrix_place.rglob("*"))
    code, out, err = matrix(*shlex.split(words))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert WRONG[words] in err
    assert sorted(matrix_place.rglob("*")) == before


def test_a_dry_run_shows_the_models_and_makes_nothing(matrix_place, matrix):
    Path("b").mkdir()
    (Path("b") / "README.md").write_text(CARD)
    words = "a-2024-01 b --data news.jsonl --by month --command true --dry-run --group a-2024-01=b"
    code, out, _ = matrix(*words.split(), "--group", "b=b")
    assert code == 0
    assert "4 periods, 2024-01 to 2024-04: 16 records" in out
    assert "b: 2 models, 2 of them tested on later periods: `alma advise` needs 3 models" in out
    assert "a-2024-01        2024-01  its name  b                  3" in out
    assert "b                2024-02  its card  b                  2" in out
    assert not Path("matrix.cells").exists()


def test_a_group_is_a_name_without_date_and_extension(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"sales-2024-01.json": "sales", "sales-2024-02.tar.gz": "sales"}
    names |= {"m.v2-2024-01": "m.v2", "m.v2-2024-02": "m.v2"}
    for name in names:
        Path(name).touch()
    names |= {"x-2024-01.v3": "x-v3", "x-2024-02.v3": "x-v3"}  # no files
    models = find_models(list(names), ModelOptions("month", {}, {}, by_command=True))
    assert {model.name: model.group for model in models} == names
