"""`python -m benchmarks retraining_forecast`: sealed before the periods come, scored afterwards."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from alma.errors import UserError
from benchmarks.retraining import sealed_forecast
from benchmarks.retraining.sealed_forecast import Level, Schedule, read_matrix
from benchmarks.retraining.sealed_score import read_forecast
from benchmarks.retraining.streams import write_matrix
from benchmarks.retraining.time_axis import TimeAxis, axis_of
from benchmarks.retraining_forecast import main

MONTHS = [f"{2020 + month // 12}-{month % 12 + 1:02}" for month in range(36)]
SLOPE = 0.5


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A matrix of 36 months whose models lose half a point a month of age, before and after."""
    at = np.arange(36)
    random = np.random.default_rng(0)
    values = 20 + SLOPE * np.abs(at - at[:, None]) + 0.01 * random.normal(size=(36, 36))
    path = tmp_path / "whole.csv"
    write_matrix(path, "error (%)", MONTHS, values)
    return path


@pytest.fixture
def known(whole: Path) -> Path:
    """The part of the matrix that is known at the end of 2021."""
    lines = whole.read_text().splitlines()
    kept = [line for line in lines[1:] if "2022" not in line]
    path = whole.with_name("known.csv")
    path.write_text("\n".join([lines[0], *kept]) + "\n")
    return path


@pytest.fixture
def simple_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of 20 +- .1 in place of the fit of statsmodels, which is optional."""
    levels = [Level(20.0, 0.1)] * 12
    monkeypatch.setattr(sealed_forecast, "_levels", lambda retraining, periods: levels[:periods])


def written(matrix: Path, name: str = "forecast.json", **flags: str) -> Path:
    """A forecast of the matrix."""
    path = matrix.parent / name
    arguments = ["write", str(path), "--matrix", str(matrix), "--price", flags.get("price", "3")]
    if "until" in flags:
        arguments += ["--until", flags["until"]]
    main(arguments)
    return path


def scored(forecast: Path, matrix: Path) -> dict:
    """The score of a forecast."""
    out = forecast.with_suffix(".score")
    main(["score", str(forecast), "--matrix", str(matrix), "--out", str(out)])
    return json.loads(out.read_text())


@pytest.mark.usefixtures("simple_levels")
def test_a_forecast_is_scored_when_the_periods_have_come(
    known: Path, whole: Path, capsys: pytest.CaptureFixture[str]
):
    """At .5 a month and a price of 3, 2 or 3 trainings a year cost least."""
    forecast = written(known)
    content = json.loads(forecast.read_text())
    assert content["sha256"] in capsys.readouterr().out
    assert content["periods"] == MONTHS[24:]
    plan, every, never = content["rules"]
    assert 2 <= plan["trainings"] <= 3
    assert every["trained_until"] == MONTHS[23:35]
    assert set(never["trained_until"]) == {"2021-12"}
    score = scored(forecast, whole)
    assert [rule["periods"] for rule in score["rules"]] == [12, 12, 12]
    assert score["rules"][2]["cost"] == pytest.approx(12 * 20 + SLOPE * 78, abs=0.2)
    assert score["rules"][1]["cost"] == pytest.approx(12 * (20 + SLOPE) + 11 * 3, abs=0.2)
    assert score["rules"][2]["held"] == 12
    assert score["rules"][2]["off_by"] < 0.2 < score["rules"][2]["as_last_time_off_by"]
    saved = score["savings"]["never"]
    assert saved["saving"] == pytest.approx(saved["forecast"][0], abs=0.2)
    assert "| never | 0 | 12 of 12 |" in capsys.readouterr().out


@pytest.mark.usefixtures("simple_levels")
def test_only_the_history_is_seen(known: Path, whole: Path):
    """What comes after --until does not change the forecast, and it may be in the file."""
    early = json.loads(written(known).read_text())
    late = json.loads(written(whole, "late.json", until="2021-12").read_text())
    for key in ("rules", "savings", "sha256_of_history", "periods", "last_loss"):
        assert early[key] == late[key]


@pytest.mark.usefixtures("simple_levels")
def test_an_edited_forecast_or_history_is_refused(known: Path, whole: Path):
    forecast = written(known)
    text = forecast.read_text()
    edited = forecast.with_name("edited.json")
    edited.write_text(text.replace('"price": 3.0', '"price": 2.0'))
    assert edited.read_text() != text
    with pytest.raises(UserError, match="edited since it was written"):
        scored(edited, whole)
    assert not edited.with_suffix(".score").exists()
    lines = whole.read_text().splitlines()
    changed = whole.with_name("changed.csv")
    old = next(line for line in lines if line.startswith("2021-11,2021-12,"))
    changed.write_text("\n".join(lines).replace(old, "2021-11,2021-12,20.7") + "\n")
    with pytest.raises(UserError, match="from 2020-01 to 2021-12 are not those"):
        scored(forecast, changed)
    reordered = whole.with_name("reordered.csv")
    reordered.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    assert scored(forecast, reordered)["rules"][0]["periods"] == 12
    other = forecast.with_name("other.json")
    for content in ("{}", "no JSON", "[1]"):
        other.write_text(content)
        with pytest.raises(UserError, match="not a forecast of"):
            scored(other, whole)


@pytest.mark.usefixtures("simple_levels")
def test_nothing_is_overwritten_and_nothing_half_written(
    known: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    forecast = written(known)
    text = forecast.read_text()
    with pytest.raises(UserError, match="never overwritten"):
        written(known, price="5")
    assert forecast.read_text() == text
    scored(forecast, whole)
    with pytest.raises(UserError, match="never overwritten"):
        scored(forecast, whole)
    files = sorted(known.parent.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(sealed_forecast, "refuse_to_overwrite", lambda path: None)
        written(known, price="5")  # another process made the file in between
    assert forecast.read_text() == text

    def full_disk(content: dict) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(sealed_forecast, "_as_text", full_disk)
    with pytest.raises(OSError, match="disk full"):
        written(known, "second.json")
    assert sorted(known.parent.iterdir()) == files


@pytest.mark.usefixtures("simple_levels")
def test_periods_that_have_not_come(known: Path, whole: Path):
    """Without any new period there is no score; with some, no cost."""
    forecast = written(known)
    with pytest.raises(UserError, match="no loss of the periods to come, 2022-01 to 2022-12"):
        scored(forecast, known)
    lines = whole.read_text().splitlines()
    dates = [line.split(",")[:2] for line in lines]
    kept = [line for line, cell in zip(lines, dates, strict=True) if max(cell) < "2022-04"]
    some = whole.with_name("some.csv")
    some.write_text("\n".join([lines[0], *kept]) + "\n")
    score = scored(forecast, some)
    assert score["rules"][2]["periods"] == 3
    assert score["rules"][2]["cost"] is None
    assert score["savings"]["never"]["saving"] is None


def test_bad_input(known: Path):
    with pytest.raises(UserError, match="--price 0: give a number above 0"):
        written(known, price="0")
    with pytest.raises(UserError, match="--until 2022-03: no model was tested"):
        written(known, until="2022-03")
    with pytest.raises(UserError, match="March: no month"):
        written(known, until="March")
    with pytest.raises(UserError, match="no folder"):
        written(known, "missing/forecast.json")
    assert not known.with_name("forecast.json").exists()


@pytest.mark.parametrize("name", ["git-areas", "beige-book", "co2"])
def test_committed_forecasts_are_as_they_were_written(name: str):
    """Their scores name them, and no period of the history is among those to come."""
    folder = Path(sealed_forecast.__file__).parent / "sealed"
    forecast = read_forecast(folder / f"{name}.json")
    score = json.loads((folder / f"{name}.score.json").read_text())
    assert score["forecast"] == forecast["sha256"]
    assert forecast["written"] < score["scored"]
    assert forecast["last_of_history"] not in forecast["periods"]
    assert len(forecast["periods"]) == 24


def test_models_of_a_schedule():
    """Trainings at the ends of periods 2 and 5; or now, if the present model is older."""
    assert Schedule("plan", 2, 3).models(6) == [None, None, 2, 2, 2, 5]
    assert Schedule("plan", 0, 2).models(3) == [0, 0, 2]
    assert Schedule("never", 3, 1).models(3) == [None, None, None]


@pytest.mark.parametrize(
    ("kind", "label", "later"),
    [
        ("month", "2021-12", "2022-01"),
        ("quarter", "2021-Q4", "2022-Q1"),
        ("week", "2020-W53", "2021-W01"),
        ("day", "2020-02-28", "2020-02-29"),
        ("", "7", "8"),
    ],
)
def test_labels_of_periods_to_come(kind: str, label: str, later: str):
    axis = TimeAxis(kind)
    assert axis.label(axis.number(label)) == label
    assert axis.label(axis.number(label) + 1) == later


def test_the_axis_is_that_of_the_file(known: Path):
    assert axis_of([known]) == TimeAxis("month")
    assert read_matrix([known]).axis.kind == "month"


def test_the_level_is_near_the_newest_losses(known: Path):
    """Of a wandering level the newest losses count, and intervals widen."""
    pytest.importorskip("statsmodels")
    at = np.arange(24)
    random = np.random.default_rng(1)
    level = 20 + np.cumsum(random.normal(size=24))
    write_matrix(known, "error (%)", MONTHS[:24], level + 0.2 * np.abs(at - at[:, None]))
    content = json.loads(written(known).read_text())
    first, *_, last = content["rules"][1]["losses"]
    assert first[0] == pytest.approx(level[-1] + 0.2, abs=1)
    assert last[2] - last[1] > 1.5 * (first[2] - first[1])
    assert all(math.isfinite(number) for loss in content["rules"][0]["losses"] for number in loss)
