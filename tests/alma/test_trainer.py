"""`StageTask.finish`: losses of single documents, and answers whose documents are wrong."""

import dataclasses
import json

import numpy as np
import pytest

from alma.errors import UserError
from alma.stream import write_index
from alma.trainer import StageTask, TextPart


@pytest.fixture
def task(tmp_path) -> StageTask:
    """The evaluation of a part of two documents with 6 and 5 tokens."""
    index = tmp_path / "test_00.idx"
    write_index(index, np.array([3, 2, 1, 4, 1]), 8)
    part = TextPart("test_00", "2024-01", 6, 30, 11, (str(index),), documents=2)
    return StageTask(
        action="evaluate",
        out=str(tmp_path),
        stream="stream",
        dictionary=10,
        learner="sm",
        stage=0,
        t=1,
        megabatches=1,
        waiting_time=1,
        valid=(),
        evaluate=(part,),
        seeds=(1,),
    )


def test_losses_of_documents_are_files_beside_the_answer(task, tmp_path):
    nll = np.linspace(1, 2, 11)
    rows = task.evaluate[0].document_losses(nll)
    assert rows.tolist() == [[pytest.approx(7.5), 6.0], [pytest.approx(9.0), 5.0]]
    task.finish({"test_00": (nll.mean(), 11)}, {"test_00": rows}, parameters=1)
    record = json.loads((tmp_path / "trained.json").read_text())
    assert record["documents"] == {"test_00": "test_00.documents.npy"}
    answer = task.checked(record)
    assert np.array_equal(np.load(tmp_path / answer.documents["test_00"]), rows)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[16.5, 11.0]], "1 documents, and test_00 has 2"),
        ([[7.5, 6.0], [9.0, 6.0]], "12 tokens, and losses of 11"),
        ([[7.5, 6.0], [9.1, 5.0]], "documents add up to 16.600 nats, and losses to 16.500"),
        ([[7.5, 6.0], [-9.0, 5.0]], "not an array of losses and counts of documents"),
        ([[7.5, 6.0], [float("nan"), 5.0]], "not an array of losses and counts of documents"),
        ([7.5, 9.0], "not an array of losses and counts of documents"),
    ],
)
def test_documents_that_contradict_the_loss_are_one_line(task, capsys, rows, problem):
    with pytest.raises(SystemExit):
        task.finish({"test_00": (1.5, 11)}, {"test_00": np.array(rows)}, parameters=1)
    assert problem in capsys.readouterr().err


def test_documents_of_another_part_or_without_a_file(task, capsys):
    rows = np.array([[7.5, 6.0], [9.0, 5.0]])
    with pytest.raises(SystemExit):
        task.finish({"test_00": (1.5, 11)}, {"test": rows}, parameters=1)
    assert "documents of test, which is no part of this task" in capsys.readouterr().err
    record = {"parameters": 1, "losses": {"test_00": [1.5, 11]}, "documents": {"test_00": "x.npy"}}
    with pytest.raises(UserError, match="x.npy: no such file in the folder"):
        task.checked(record)
    record["documents"]["test_00"] = "../x.npy"
    with pytest.raises(UserError, match="documents"):
        task.checked(record)


def test_a_task_of_an_earlier_version_has_no_number_of_documents(task):
    part = dataclasses.replace(task.evaluate[0], documents=0)
    old = dataclasses.replace(task, evaluate=(part,))
    rows = np.array([[16.5, 11.0]])
    old.finish({"test_00": (1.5, 11)}, {"test_00": rows}, parameters=1)
