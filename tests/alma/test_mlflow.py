"""A real MLflow, on a SQLite file and on a folder: runs in, decisions out, nothing twice."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from alma.report.__main__ import main as report_main
from alma.report.advice.__main__ import main as advise_main
from alma.report.advice.trackers.store import connected

from .synthetic import ROOT, call_advise, drifting, error_of, image_run, report, run_here
from .test_mlflow_layouts import CELLS, MONTHS, TESTED, accuracy

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

STORES = ("sqlite", "folder")
ANSWER = "Every month, 12 trainings a year"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """A folder as a store, no telemetry; the environment is restored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


def log_periods(client, experiment):
    """Layout 1, a run for each model and period."""
    for i, j in CELLS:
        tags = {"trained_until": MONTHS[i], "tested_on": MONTHS[j]}
        new = client.create_run(experiment, tags=tags)
        client.log_metric(new.info.run_id, "accuracy", accuracy(i, j))
        client.set_terminated(new.info.run_id)


def log_models(client, experiment):
    """Layout 2, a run for each model, and runs that do not count."""
    for i in range(0, 12, 3):
        new = client.create_run(experiment, run_name=f"model {i}")
        client.log_param(new.info.run_id, "trained_until", MONTHS[i])
        for j in TESTED:
            client.log_metric(new.info.run_id, f"accuracy/{MONTHS[j]}", accuracy(i, j))
        client.set_terminated(new.info.run_id)
    for status in "FAILED", "FINISHED", "FINISHED":
        new = client.create_run(experiment)
        client.log_metric(new.info.run_id, "loss", 1.0)
        client.set_terminated(new.info.run_id, status)
    client.delete_run(new.info.run_id)


def log_nested(client, experiment):
    """Layout 1 below a run for each model."""
    for i in range(0, 12, 3):
        above = client.create_run(experiment, tags={"trained_until": MONTHS[i]})
        client.set_terminated(above.info.run_id)
        for j in TESTED:
            tags = {"tested_on": MONTHS[j], "mlflow.parentRunId": above.info.run_id}
            new = client.create_run(experiment, tags=tags)
            client.log_metric(new.info.run_id, "accuracy", accuracy(i, j))
            client.set_terminated(new.info.run_id)


@pytest.fixture(scope="module", params=STORES)
def store(request, tmp_path_factory):
    """The URI of a store with an experiment for each layout."""
    folder = tmp_path_factory.mktemp(request.param)
    uri = {"sqlite": f"sqlite:///{folder / 'mlflow.db'}", "folder": str(folder / "mlruns")}[
        request.param
    ]
    client = connected(uri, "--mlflow", creates=True)
    for log in log_periods, log_models, log_nested:
        place = (folder / log.__name__).as_uri()
        log(client, client.create_experiment(log.__name__, artifact_location=place))
    return uri


def advise(store, experiment, *arguments):
    """`alma advise --mlflow` on the accuracy."""
    words = ("--mlflow", experiment, "--metric", "accuracy", "--tracking-uri", store)
    return call_advise(*words, *arguments)


def numbers_of(record):
    """An advice without the name of its group."""
    (group,) = record["groups"]
    return {name: value for name, value in group.items() if name != "label"}


@pytest.mark.parametrize("experiment", ["log_periods", "log_models", "log_nested"])
def test_the_advice_is_that_of_the_file(store, experiment, tmp_path):
    table = tmp_path / "churn.csv"
    rows = [f"{MONTHS[i]},{MONTHS[j]},{accuracy(i, j)!r}" for i, j in CELLS]
    table.write_text("\n".join(["trained_until,tested_on,accuracy", *rows]) + "\n")
    of_file = call_advise("--matrix", table, "--out", tmp_path / "file")
    of_store = advise(store, experiment, "--out", tmp_path / "store")
    assert ANSWER in of_store.stdout, of_store
    assert numbers_of(of_store.record) == numbers_of(of_file.record)
    if experiment == "log_models":
        for line in ("1 run without accuracy", "1 run failed", "1 run deleted"):
            assert f"left out: {line}\n" in of_store.stdout
    if experiment == "log_nested":
        assert "16 runs nested: what they lack is taken from" in of_store.stdout


def state_of(store, name):
    """What an experiment has of each run."""
    client = connected(store, "--mlflow")
    runs = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    return {run.info.run_id: run.to_dictionary() for run in runs}


def test_reading_writes_nothing_and_the_flag_writes_one_run(store, tmp_path):
    before = state_of(store, "log_periods")
    advise(store, "log_periods")
    assert state_of(store, "log_periods") == before
    for price in "3", "3":
        done = advise(store, "log_periods", "--log-decision", "--price", price)
        assert "alma.decision in the run" in done.stdout, done
    advise(store, "log_periods", "--log-decision")
    after = state_of(store, "log_periods")
    (run_id,) = after.keys() - before.keys()
    tags = after[run_id]["data"]["tags"]
    assert tags["alma.decision"] == "every month"
    assert tags["alma.answer"].startswith(ANSWER)
    assert tags["alma.next_training"] == "2023-11"
    client = connected(store, "--mlflow")
    names = {file.path for file in client.list_artifacts(run_id)}
    assert names == {"advice.json", "advice.md", "brief.html"}
    path = client.download_artifacts(run_id, "advice.json", str(tmp_path))
    with open(path) as file:
        assert json.load(file)["groups"][0]["advice"] == "every month"
    assert {name: after[name] for name in before} == before
    again = advise(store, "log_periods")
    assert ANSWER in again.stdout
    assert "left out: 1 run written by ALMA" in again.stdout


@pytest.fixture
def runs(tmp_path):
    """Records of two learners on a stream that drifts."""
    for name, factor in ("a", 1.0), ("b", 1.3):
        values = [factor * 0.3 / t for t in range(1, 9)]
        new = image_run(tmp_path / "runs" / name, values, seed=0, size=8 if name == "a" else 16)
        drifting(new, lambda t, j, factor=factor: factor * (0.1 + 0.01 * abs(t - j)))
    return tmp_path / "runs"


def test_a_report_is_logged_once(store, runs, tmp_path):
    """Files of a SQLite store lie beside it, not where the process runs."""
    words = (runs, "--mlflow", store, "--experiment", "digits")
    first = report(*words, cwd=tmp_path)
    assert "MLflow, experiment digits: records 2 new" in first.stdout, first
    before = state_of(store, "digits")
    assert "records 2 unchanged" in report(*words, cwd=tmp_path).stdout
    client = connected(store, "--mlflow")
    after = state_of(store, "digits")
    assert after.keys() == before.keys()
    assert len(after) == 3
    by_kind = {}
    for run in after.values():
        by_kind.setdefault(run["data"]["tags"]["alma.kind"], []).append(run)
    (of_report,) = by_kind["report"]
    tags = of_report["data"]["tags"]
    assert tags["alma.choice"].startswith("sm")
    assert tags["alma.decision"].startswith(f"Use {tags['alma.choice']}")
    files = {file.path for file in client.list_artifacts(of_report["info"]["run_id"])}
    assert files == {"report.html", "advice.json", "advice.md", "brief.html"}
    folder = Path(store.removeprefix("sqlite:///")).parent
    assert str(folder) in of_report["info"]["artifact_uri"]
    (small,) = [run for run in by_kind["record"] if run["data"]["params"]["hidden"] == "8"]
    assert small["data"]["params"]["learner"] == "sm"
    for key, expected in {"CER": 0.3 * sum(1 / t for t in range(1, 9)), "Mem": 9 * 80}.items():
        points = client.get_metric_history(small["info"]["run_id"], key)
        assert [point.step for point in points] == list(range(9)), key
        assert points[-1].value == pytest.approx(expected)
    last = {
        point.step: point.value
        for point in client.get_metric_history(small["info"]["run_id"], "error_on/megabatch-8")
    }
    assert last[8] == pytest.approx(0.1)


def test_a_record_that_went_on_is_updated_wherever_it_lies(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = runs / "a" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:6]))
    words = ("--mlflow", "mlruns")
    report(runs / "a", *words, cwd=tmp_path)
    moved = runs.rename(tmp_path / "moved") / "a"
    (moved / "results.jsonl").write_text("".join(lines))
    assert "records 1 updated" in report(moved, *words, cwd=tmp_path).stdout
    records = [
        run for run in state_of("mlruns", "alma").values() if "alma.run_id" in run["data"]["tags"]
    ]
    assert len(records) == 1
    assert records[0]["data"]["tags"]["alma.directory"] == str(moved)
    history = connected("mlruns", "x").get_metric_history(records[0]["info"]["run_id"], "error")
    assert [point.step for point in history] == list(range(9))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mlflow nothing --metric accuracy", "no such experiment; choose from"),
        ("--mlflow log_model --metric accuracy", "no such experiment; did you mean log_models?"),
        ("--mlflow log_models --metric accurracy", "no finished run has it; did you mean accuracy"),
        ("--mlflow log_models", "--mlflow needs --metric NAME"),
        ("--mlflow log_models --metric accuracy --lower-is-better", "higher is better for"),
        ("--mlflow log_models --metric accuracy --matrix a.csv", "takes the place of runs and"),
        ("--mlflow Default --metric accuracy", "the experiment has no finished run to read"),
        ("--mlflow log_models --metric accuracy --period-tag step", "no run says on which period"),
        ("--mlflow log_periods --metric accuracy --period-tag fold", "no run says on which period"),
    ],
)
def test_what_cannot_be_read_is_one_line(store, words, message):
    assert message in error_of(call_advise(*words.split(), "--tracking-uri", store))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("sqlite:///nothing.db", "nothing.db does not exist"),
        ("nowhere", "no MLflow store at nowhere: nowhere does not exist"),
        ("http://127.0.0.1:9", "MLflow at http://127.0.0.1:9: "),
        ("ftp://host", "MLflow at ftp://host: "),
        ("", "argument --tracking-uri: empty"),
        ("sqlite:///text.db", "MLflow at sqlite:///text.db: "),
        ("text.db", "text.db is a file: give sqlite:///text.db"),
    ],
)
def test_a_store_that_does_not_answer_is_one_line(uri, message, tmp_path):
    (tmp_path / "text.db").write_text("no database\n" * 99)
    words = ("--mlflow", "a", "--metric", "accuracy", "--tracking-uri", uri)
    assert message in error_of(run_here(advise_main, words, tmp_path))
    assert os.listdir(tmp_path) == ["text.db"]


def test_a_turned_metric_is_asked_for(tmp_path):
    client = connected(str(tmp_path / "mlruns"), "x", creates=True)
    experiment = client.create_experiment("turned")
    for i, j in CELLS:
        tags = {"trained_until": MONTHS[i], "tested_on": MONTHS[j]}
        new = client.create_run(experiment, tags=tags)
        client.log_metric(new.info.run_id, "accuracy", 1 - accuracy(i, j))
        client.set_terminated(new.info.run_id)
    done = advise(str(tmp_path / "mlruns"), "turned")
    assert "is higher accuracy better, as was read?" in error_of(done)


def test_flags_without_a_store(runs):
    assert "--log-decision needs --mlflow" in error_of(call_advise(runs, "--log-decision"))
    assert "--experiment needs --mlflow" in error_of(report(runs, "--experiment", "a"))
    refused = report(runs, "--mlflow", "m", "--metric", "bits-per-byte")
    assert "leave out --metric" in error_of(refused)


def test_the_page_of_trackers(runs, tmp_path, monkeypatch):
    """Its first example and its commands, with a folder in place of SQLite, which is slower."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/trackers.md").read_text().replace("sqlite:///mlflow.db", "mlruns")
    example = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (runs / "a").rename(tmp_path / "digits")
    commands = re.findall(r"^alma (advise|report) (.+)$", page, re.MULTILINE)
    assert len(commands) == 3
    for name, words in commands:
        main = {"advise": advise_main, "report": report_main}[name]
        done = run_here(main, words.replace("runs/digits", "digits").split(), tmp_path)
        assert done.returncode == 0, done
