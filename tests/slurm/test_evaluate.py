"""--evaluate: scores in the rows and in reports;
a program that fails leaves everything to go on from."""

import json
import sys

import pytest
from launcher import make

from alma.errors import UserError
from alma.records import Run
from slurm.lm.record import read_scores

GOOD = "import sys; print('words'); print('{\"cloze_error\": %s, \"n\": 3}' % len(sys.argv))"


def program(folder, code):
    path = folder / "score.py"
    path.write_text(code)
    return f"{sys.executable} {path}"


def scores(run):
    return [row["extra"].get("scores") for row in Run.read(run.out).rows]


def test_scores_are_in_the_rows_also_while_the_learner_waits(tmp_path):
    run = make(tmp_path / "x", learner="ens")
    run.run("--evaluate", program(tmp_path, GOOD), "--waiting-time", "2", "--members", "2")
    score = {"cloze_error": 3, "n": 3}  # the program and two checkpoints
    assert scores(run) == [None, None, score, score, score]
    assert json.loads((run.out / "stage_01/scores.json").read_text()) == score


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "--evaluate of evaluation of stage 0"),
        ("raise ValueError('no such task')", "no such task"),
        ("print('{\"a\": 1}'); print('bye')", "is no JSON object of numbers"),
        ("import time; time.sleep(60)", "--evaluate of evaluation of stage 0"),
    ],
)
def test_a_program_that_fails_is_one_line_and_the_rerun_goes_on(tmp_path, code, message):
    run = make(tmp_path / "x")
    words = program(tmp_path, code)
    if "sleep" in code:
        words = f"timeout 0.5 {words}"
    _, err = run.run("--stages", "1", "--evaluate", words, code=2 if "JSON" in message else 1)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in err
    assert scores(run) == [None]
    trained = (run.out / "stage_00/train.log").read_text()
    run.run("--stages", "1", "--evaluate", program(tmp_path, GOOD))
    assert scores(run) == [None, {"cloze_error": 2, "n": 3}]
    assert (run.out / "stage_00/train.log").read_text() == trained


@pytest.mark.parametrize(
    "line", ["", "{}", "[1]", '{"a": [1]}', '{"a": "1"}', '{"a": NaN}', '{"a": 1e999}']
)
def test_a_line_that_is_no_object_of_numbers(tmp_path, line):
    with pytest.raises(
        UserError, match="scores.log: its last line is no JSON object of numbers such as"
    ):
        read_scores(line.encode(), tmp_path / "scores.log")
