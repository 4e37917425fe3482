"""`alma matrix --command`: the user's program tests models; kills, and what has changed."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alma.report.advice.__main__ import main as advise
from slurm.matrix.measure import key_of
from tests.alma.matrix_data import records, write_records
from tests.conftest import ROOT

MODELS = ("m-2024-01", "m-2024-02", "m-2024-03")
PROGRAM = f"{sys.executable} eval.py"
DATA = ("--data", "news.jsonl", "--by", "month")


def rows(file: str = "matrix.csv") -> list[dict[str, str]]:
    """The lines of the matrix."""
    return list(csv.DictReader(Path(file).open()))


def measured() -> list[str]:
    """What the program has measured, in its order."""
    return Path("measured.txt").read_text().splitlines()


def test_values_of_a_metric_are_those_of_the_program(matrix_place, matrix, capsys, monkeypatch):
    words = (*MODELS, *DATA, "--command", PROGRAM, "--metric", "MAPE")
    code, out, err = matrix(*words)
    assert code == 0, err
    assert "m-2024-02: trained until 2024-02 (its name), 4 periods, 16 examples" in err
    assert [line["trained_until"] for line in rows()[::4]] == ["2024-01", "2024-02", "2024-03"]
    assert [line["tested_on"] for line in rows()[:4]] == [f"2024-0{m}" for m in range(1, 5)]
    for line in rows():
        model = f"m-{line['trained_until']}"
        level = sum(map(ord, model)) % 7
        expected = 1 + level / 10 + 4 * int(line["tested_on"][-1]) / 100
        assert float(line["MAPE"]) == pytest.approx(expected)
        assert line["model"] == "m"
    assert "alma advise --matrix matrix.csv" in out
    monkeypatch.setattr("sys.argv", ["alma advise", "--matrix", "matrix.csv", "--every", "1,3"])
    advise()
    assert "month" in capsys.readouterr().out


def test_losses_become_bits_a_byte(matrix_place, matrix):
    code, _, err = matrix(*MODELS, *DATA, "--command", PROGRAM)
    assert code == 0, err
    for line in rows():
        month = line["tested_on"]
        texts = [record["text"] for record in records() if record["date"].startswith(month)]
        nats = 1 + sum(map(ord, f"m-{line['trained_until']}")) % 7 / 10 + 4 * int(month[-1]) / 100
        bits = nats * len(texts) / 0.6931471805599453 / sum(len(text.encode()) for text in texts)
        assert float(line["bits_per_byte"]) == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("saves_parts", [True, False])
def test_killed_five_times_the_matrix_is_the_same(matrix_place, matrix, saves_parts):
    program = f"{PROGRAM} --parts" if saves_parts else PROGRAM
    words = [*MODELS, *DATA, "--command", program, "--metric", "MAPE"]
    assert matrix(*words, "--out", "undisturbed.csv")[0] == 0
    Path("measured.txt").unlink()
    kills = [[0, "before"], [1, "after"], [4, "finished"], [6, "before"], [12, "finished"]]
    if not saves_parts:  # the evaluation of a model that is killed is lost, no other
        kills = [[0, "before"], [4, "finished"], [4, "before"], [8, "finished"], [12, "finished"]]
    Path("kills.json").write_text(json.dumps(kills))
    command = [sys.executable, "-m", "alma", "matrix", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    codes = []
    while len(codes) < 8 and 0 not in codes:
        codes.append(subprocess.run(command, env=environment, capture_output=True).returncode)
    assert codes == [-9] * 5 + [0]
    assert json.loads(Path("kills.json").read_text()) == []
    assert Path("matrix.csv").read_text() == Path("undisturbed.csv").read_text()
    assert sorted(measured()) == sorted(set(measured()))
    assert len(measured()) == 12


def test_an_answer_of_which_a_kill_left_one_cell_is_used(matrix_place, matrix):
    words = [*MODELS, *DATA, "--command", PROGRAM, "--metric", "MAPE"]
    assert matrix(*words, "--out", "undisturbed.csv")[0] == 0
    Path("measured.txt").unlink()
    Path("kills.json").write_text(json.dumps([[4, "finished"]]))
    command = [sys.executable, "-m", "alma", "matrix", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -9
    (store,) = Path("matrix.cells").glob("m-2024-01-*")
    (cell,) = Path("undisturbed.cells", store.name).glob("2024-02-*.json")
    shutil.copy(cell, store)
    assert matrix(*words)[0] == 0
    assert len(measured()) == 12
    assert Path("matrix.csv").read_text() == Path("undisturbed.csv").read_text()


def test_only_what_has_changed_is_measured_anew(matrix_place, matrix):
    for name in MODELS:
        Path(name).write_text(name)
    words = (*MODELS, *DATA, "--command", PROGRAM, "--metric", "MAPE")
    assert matrix(*words)[0] == 0
    assert len(measured()) == 12
    assert matrix(*words)[0] == 0
    assert len(measured()) == 12

    write_records(matrix_place / "news.jsonl", records(5))  # a month is added
    assert matrix(*words)[0] == 0
    assert [line.rpartition(" ")[2] for line in measured()[12:]] == ["2024-05"] * 3

    lines = records(5)
    lines[-1]["label"] = 9  # a record of January
    write_records(matrix_place / "news.jsonl", lines)
    assert matrix(*words)[0] == 0
    assert [line.rpartition(" ")[2] for line in measured()[15:]] == ["2024-01"] * 3
    assert len(list(Path("matrix.cells").glob("data-*"))) == 1

    Path(MODELS[1]).write_text("trained again")
    assert matrix(*words)[0] == 0
    assert [Path(line.split()[0]).name for line in measured()[18:]] == [MODELS[1]] * 5

    Path("eval.py").write_text(Path("eval.py").read_text() + "\n# another program\n")
    assert matrix(*words)[0] == 0
    assert len(measured()) == 23 + 15

    assert matrix(*words[:-1], "RMSE", "--out", "matrix.csv")[0] == 0
    assert len(measured()) == 23 + 15 + 15


def test_a_program_that_fails_leaves_what_it_measured(matrix_place, matrix):
    stop = """    if part.name == "2024-03":
        sys.exit("error: no such gauge")
    die("before")
"""
    text = Path("eval.py").read_text()
    Path("eval.py").write_text(text.replace('    die("before")\n', stop))
    words = (*MODELS, *DATA, "--command", f"{PROGRAM} --parts", "--metric", "MAPE")
    code, _, err = matrix(*words)
    assert code == 1
    assert "m-2024-01: exit code 1" in err
    assert not Path("matrix.csv").exists()
    assert len(list(Path("matrix.cells").glob("m-2024-01-*/2024-0*.json"))) == 2


def test_the_error_has_what_the_program_printed_last(matrix_place, matrix):
    words = (*MODELS, *DATA, "--command", f"{sys.executable} evl.py", "--metric", "MAPE")
    code, _, err = matrix(*words)
    assert code == 1
    assert "m-2024-01: exit code 2: " in err
    assert "evl.py': [Errno 2] No such file or directory; log: matrix.cells/" in err


def test_csv_gives_the_matrix_of_json_lines(matrix_place, matrix):
    words = (*MODELS, "--by", "month", "--command", PROGRAM)
    assert matrix(*words, "--data", "news.jsonl", "--out", "lines.csv")[0] == 0
    text = Path("eval.py").read_text()
    Path("eval.py").write_text(text.replace('record["label"]', 'int(record["label"])'))
    with open("news.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["date", "text", "label"])
        writer.writeheader()
        writer.writerows(records())
    code, _, err = matrix(*words, "--data", "news.csv")
    assert code == 0, err
    assert Path("matrix.csv").read_text() == Path("lines.csv").read_text()


def test_records_without_a_usable_date_or_text_are_counted(matrix_place, matrix):
    lines = [*records(), {"date": None, "text": "x"}, {"date": "soon", "text": "x"}]
    lines.append({"date": "2024-01-01", "text": " "})
    lines.append({"date": "2023-07", "text": "before"})
    write_records(matrix_place / "news.jsonl", lines)
    words = (*MODELS, *DATA, "--command", PROGRAM, "--from", "2024")
    code, _, err = matrix(*words)
    assert code == 2
    assert "1 documents without a date" in err
    assert "1 documents with an unreadable date" in err
    assert not Path("matrix.cells").exists()
    _, _, err = matrix(*words, "--undated", "skip")
    assert "16 records; left out: 1 undated, 1 unreadable, 1 before, 1 without text" in err


def test_a_script_counts_however_it_is_named(tmp_path):
    script = tmp_path / "eval.sh"
    config = tmp_path / "config"
    keys = set()
    for version in "1", "2":
        script.write_text(f"#!/bin/sh\n{version}\n")
        keys.add(key_of((str(script),)))
        config.write_text(version)
        keys.add(key_of(("python", f"--config={config}")))
    assert len(keys) == 4
    assert key_of(("python", "eval")) == key_of((sys.executable, "eval"))


def test_a_program_that_changes_meanwhile_leaves_no_cell(matrix_place, matrix):
    """Its cells would be of two programs."""
    right = Path("eval.py").read_text()
    edit = "Path(__file__).write_text(Path(__file__).read_text() + '# edited\\n')\n"
    waits = "import time\nprint('saved', flush=True)\ntime.sleep(0.5)\n"  # its cells are kept
    Path("eval.py").write_text(f"{right}\n{waits}{edit}")
    words = (*MODELS, *DATA, "--command", f"{PROGRAM} --parts", "--metric", "MAPE")
    code, _, err = matrix(*words)
    assert code == 2
    assert "eval.py --parts: has changed since the launch: type the command again" in err
    assert not list(Path("matrix.cells").glob("m-*/2024-*.json"))
    Path("eval.py").write_text(right)
    assert matrix(*words)[0] == 0
    assert len(rows()) == 12
