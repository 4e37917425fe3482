"""Whole runs: record, interruption, resumption, and errors."""

import io
import json
import resource
import signal
import time
import zipfile
from dataclasses import replace

import pytest
import torch

from alma import processes
from alma.errors import UserError, command
from alma.files import locked
from alma.records import Run
from tests.vision.conftest import equal, numbers
from vision import MegaBatchStream, run
from vision.data import Images
from vision.learners import LEARNERS
from vision.stage_trainer import CHECKPOINT, StageTrainer

STREAM = MegaBatchStream("digits", 7)
QUICK = {"epochs": 3, "hidden": 4, "batch_size": 32}


def play(out, learner="sm", stream=STREAM, **options):
    return run(stream, learner, out, **QUICK | options)


def test_a_run_writes_its_record_and_is_not_repeated(tmp_path, monkeypatch):
    record = play(tmp_path / "run", waiting_time=3)
    rows = record.rows
    assert [row["t"] for row in rows] == list(range(8))
    assert [row["stage"] for row in rows] == [None] * 3 + [0] * 3 + [1, 2]
    assert [row["trained_on"] for row in rows][3:] == [[1, 2, 3]] * 3 + [[4, 5, 6], [7]]
    assert rows[1]["value"] == rows[0]["value"]
    assert {row["metric"] for row in rows} == {"error"}
    trained = [row for row in rows if row["t"] in (3, 6, 7)]
    for row in rows:
        flops = row["extra"]["flops"]
        assert row["train_flops"] == flops.get("forward", 0) + flops.get("backward", 0)
        assert (row["extra"]["valid"] is None) == (row["stage"] is None)
        assert set(flops) == ({"forward", "backward", "validation"} if row in trained else set())
        assert row["extra"]["test_flops"] == (
            360 * row["eval_flops_per_example"] if row in [rows[0], *trained] else 0
        )
    config = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert config["epochs"] == 3
    assert config["data"] == STREAM.dataset.fingerprint
    assert "members" not in config  # a setting of ensembles

    monkeypatch.setattr("vision.experiment.LEARNERS", {})
    (tmp_path / "run/.checkpoint.pt.tmp").write_bytes(b"half")  # that a kill left
    assert play(tmp_path / "run", waiting_time=3).rows == rows
    assert not list((tmp_path / "run").glob(".*.tmp"))
    with (
        locked(tmp_path / "run"),
        pytest.raises(UserError, match="another process is at work here"),
    ):
        play(tmp_path / "run", waiting_time=3)


class Stop(BaseException):
    """Stands in for a kill; no handler catches it."""


def test_seconds_of_a_stage_are_summed_over_interruptions(tmp_path, monkeypatch):
    def save_and_stop(trainer, progress=None):
        save(trainer, progress)
        if progress:
            raise Stop

    save = StageTrainer.save
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "_due", lambda trainer: time.sleep(0.3) or True)
        patch.setattr(StageTrainer, "save", save_and_stop)
        for _ in range(2):
            with pytest.raises(Stop):
                play(tmp_path / "run", waiting_time=7, epochs=4)
    rows = play(tmp_path / "run", waiting_time=7, epochs=4).rows
    assert rows[7]["seconds"] > 0.6


def test_peak_memory_is_that_of_the_run(tmp_path, child, monkeypatch):
    """It excludes the process's earlier peak; if the system cannot measure that, rows say so."""

    def after_a_large_one():
        torch.ones(200_000_000).sum()
        (tmp_path / "before").write_text(str(processes.peak_memory()))
        play(tmp_path / "run")

    child(tmp_path / "log", after_a_large_one).wait()
    before = int((tmp_path / "before").read_text())
    row = Run.read(tmp_path / "run").rows[-1]
    if processes.reset_peak_memory():
        assert 10**6 < row["peak_memory_bytes"] < before - 400_000_000
        assert "memory_of" not in row["extra"]
    monkeypatch.setattr(processes, "reset_peak_memory", lambda: False)
    assert play(tmp_path / "other").rows[-1]["extra"]["memory_of"] == "process"


def _flip(data: bytes) -> bytes:
    """One bit of the largest tensor is another; torch itself does not compare its check sums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tensor = archive.read(max(archive.infolist(), key=lambda info: info.file_size))
    at = data.index(tensor)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def first_rows(record, count=4):
    """Cut the record to its first rows."""
    lines = record.results.read_bytes().splitlines(keepends=True)[:count]
    record.results.write_bytes(b"".join(lines))
    return b"".join(lines)


def test_a_run_without_checkpoint_restarts_and_keeps_its_rows_one_newer_than_the_rows_is_an_error(
    tmp_path,
):
    whole = play(tmp_path / "run")
    expected = numbers(whole)
    first = first_rows(whole)
    with pytest.raises(UserError, match=r"lacks rows of completed stages: delete checkpoint\.pt"):
        play(tmp_path / "run")
    (tmp_path / "run" / CHECKPOINT).unlink()
    assert numbers(play(tmp_path / "run")) == expected
    assert whole.results.read_bytes().startswith(first)


LAST = {
    "checkpoint": (StageTrainer, "_write", lambda trainer, name, state: state["done"] == 7),
    "row": (Run, "append", lambda run, row: row["t"] == 7),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("learner", ["sm", "gens"])
def test_a_kill_before_the_last_row_leaves_a_run_that_is_not_complete(
    tmp_path, monkeypatch, last, learner
):
    """The last row follows the last checkpoint; with that, nothing is trained again."""
    whole = play(tmp_path / "whole", learner)
    owner, name, is_last = LAST[last]
    method = getattr(owner, name)

    def killed(*arguments):
        if is_last(*arguments):
            raise Stop
        return method(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Stop):
            play(tmp_path / "run", learner)
    assert [row["t"] for row in Run.read(tmp_path / "run").rows] == list(range(7))
    assert (tmp_path / "run" / CHECKPOINT).exists() == (last == "row")
    if last == "row":
        monkeypatch.setattr("vision.experiment.LEARNERS", {})
    assert numbers(play(tmp_path / "run", learner)) == numbers(whole)


@pytest.mark.parametrize("model", ["none", "older"])
def test_a_run_with_all_rows_but_without_its_model_makes_the_model_and_keeps_the_rows(
    tmp_path, model
):
    whole = play(tmp_path, save_stages=True)
    path = tmp_path / CHECKPOINT
    rows = whole.results.read_bytes()
    state = torch.load(path)
    path.unlink()
    if model == "older":
        torch.save(state | {"done": 6, "learner": torch.load(tmp_path / "stage_005.pt")}, path)
    play(tmp_path)
    again = torch.load(path)
    assert again["done"] == 7
    assert equal(again["learner"]["model"], state["learner"]["model"])
    assert whole.results.read_bytes() == rows


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"text" * 99, _flip]
)
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, damage):
    first_rows(play(tmp_path / "run"))
    path = tmp_path / "run" / CHECKPOINT
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"checkpoint\.pt is damaged .*: delete it"):
        play(tmp_path / "run")


def test_other_settings_data_or_partition_in_the_same_folder_are_refused(tmp_path, refused):
    play(tmp_path / "run")
    images = STREAM.dataset.train.images.clone()
    images[0, 0, 0, 0] += 1
    dataset = replace(STREAM.dataset, train=Images(images, STREAM.dataset.train.labels))
    for options, message in (
        ({"epochs": 4}, "epochs: 3 -> 4"),
        ({"stream": MegaBatchStream("digits", 7, seed=432)}, "partition: not given -> 432"),
        (
            {"stream": MegaBatchStream("digits", parts=STREAM.parts[::-1])},
            "partition: not given -> ",
        ),
        ({"stream": MegaBatchStream(dataset, 7)}, "data: "),
    ):
        assert message in refused(play, tmp_path / "run", **options)


def test_a_full_disk_is_one_clear_line_and_the_run_resumes(tmp_path, child):
    """In a child: the limit on file sizes holds for the whole process."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        command(lambda: play(tmp_path / "part", "gens", save_interval=0))()

    finished = child(tmp_path / "log", limited).wait()
    assert "checkpoint.pt: cannot be written" in finished.error
    assert not list((tmp_path / "part").glob(".*.tmp"))
    assert numbers(play(tmp_path / "part", "gens")) == numbers(play(tmp_path / "whole", "gens"))


def test_edges_of_the_stream(tmp_path):
    """One minibatch per mega-batch, fewer validation images than classes,
    w that does not divide B, B = 1."""
    shortest = MegaBatchStream("digits", 700)
    assert {len(shortest.split(t)[1]) for t in (1, 2, 3)} == {1}
    shortest.parts = shortest.parts[:5]
    for learner in LEARNERS:
        rows = play(tmp_path / learner, learner, shortest, waiting_time=2).rows
        assert [row["stage"] for row in rows] == [None, None, 0, 0, 1, 2]
    assert len(play(tmp_path / "one", stream=MegaBatchStream("digits", 1)).rows) == 2


def test_divergence_is_one_clear_line_and_keeps_the_rows(tmp_path):
    with pytest.raises(UserError, match="diverged"):
        play(tmp_path / "run", optimizer="sgd", lr=1e30)
    assert [row["t"] for row in Run.read(tmp_path / "run").rows] == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"waiting_time": 8}, "waiting time 8 is longer"),
        ({"lr": 0}, "--lr 0: more than 0"),
        ({"replay_share": 1.0}, "a share"),
        ({"replay_share": 0.5, "replay": True}, "leave out"),
        ({"device": "nonsense"}, "device"),
    ],
)
def test_wrong_settings_are_one_clear_line_and_leave_nothing(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        play(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_complete_run_without_models_of_its_stages_cannot_give_them(tmp_path, refused):
    play(tmp_path / "kept", save_stages=True)
    play(tmp_path / "kept", save_stages=True)
    play(tmp_path / "run")
    assert "give another --out" in refused(play, tmp_path / "run", save_stages=True)
