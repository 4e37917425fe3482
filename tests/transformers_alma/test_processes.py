"""Several processes of a training, as forks on a CPU: equal updates, kills, signals."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.transformers_alma import tiny

AVERAGE = ("--average", "poly:8")


@pytest.fixture(scope="module")
def train(tiny_engine):
    """`train(out, processes, hooks, flags)`: train in forks; what has become of them.

    hooks: called first in the processes, by rank; they may replace functions.
    """
    from transformers_alma import training

    def run(
        out: Path,
        processes: int = 2,
        hooks: dict[int, Callable[[], object]] | None = None,
        flags: Sequence[str] = (),
    ) -> list:
        arguments = tiny_engine.arguments("--num_processes", str(processes), *flags)
        task = tiny.task(out, tiny_engine.parts)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            if hooks and rank in hooks:
                hooks[rank]()
            training.train(task, arguments)

        logs = out.with_name(f"{out.name}_logs_{time.monotonic_ns()}")
        return tiny.together([partial(work, rank) for rank in range(processes)], logs)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> Path:
    """A training by two processes that nothing disturbs."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = train(out, flags=AVERAGE)
    assert [child.code for child in done] == [0, 0], done
    assert len(tiny.losses(done[0].output)) == tiny.UPDATES
    assert not tiny.losses(done[1].output)
    assert sorted(path.name for path in out.iterdir()) == ["trained.json", "weights"]
    return out


def test_two_processes_update_as_one_that_accumulates(train, whole, tmp_path):
    out = tmp_path / "one"
    done = train(out, 1, flags=(*AVERAGE, "--gradient_accumulation_steps", "2"))
    assert done[0].code == 0, done
    from safetensors.torch import load_file

    of_one = load_file(out / "weights/model.safetensors")
    for name, weight in load_file(whole / "weights/model.safetensors").items():
        torch.testing.assert_close(weight, of_one[name], rtol=1e-5, atol=1e-6)


def ask_to_stop(step: int) -> None:
    """Ask only this process to stop, after an update, as if one node got the signal first."""
    from alma.trainer import StageTask

    progress = StageTask.progress

    def replaced(task: StageTask, updates: int, loss: float) -> None:
        progress(task, updates, loss)
        if updates == step:
            Path(os.environ["ALMA_STOP_FILE"]).touch()

    StageTask.progress = replaced


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_other_and_the_next_start_goes_on(train, whole, tmp_path, rank):
    out = tmp_path / "killed"
    done = train(out, hooks={rank: partial(tiny.kill_before_update, 4)}, flags=AVERAGE)
    assert done[rank].code == -signal.SIGKILL
    assert done[1 - rank].code == 1, done
    assert (out / "checkpoint-2/alma_seconds.json").exists()
    done = train(out, flags=AVERAGE)
    assert [child.code for child in done] == [0, 0], done
    assert [update for update, _ in tiny.losses(done[0].output)] == [3, 4, 5, 6]
    assert tiny.checksums(out) == tiny.checksums(whole)


def test_a_stop_of_one_process_saves_and_ends_all_in_the_same_update(train, whole, tmp_path):
    out = tmp_path / "stopped"
    done = train(out, hooks={0: partial(ask_to_stop, 3)}, flags=AVERAGE)
    assert [child.code for child in done] == [75, 75], done
    stopped = max(out.glob("checkpoint-*"))
    assert (stopped / "rng_state_1.pth").exists()
    done = train(out, flags=AVERAGE)
    assert [child.code for child in done] == [0, 0], done
    assert tiny.checksums(out) == tiny.checksums(whole)


def save_rng_late() -> None:
    from transformers import Trainer

    save = Trainer._save_rng_state

    def replaced(trainer: Trainer, output_dir: str) -> None:
        time.sleep(0.5)
        save(trainer, output_dir)

    Trainer._save_rng_state = replaced


def end_at_first_whole_checkpoint() -> None:
    from transformers_alma import training

    write = training.write_json_atomic

    def replaced(path: Path, record: object) -> None:
        files = [file.name for file in path.parent.iterdir()]
        write(path, {"files": files})
        os.kill(os.getpid(), signal.SIGKILL)

    training.write_json_atomic = replaced


def test_a_checkpoint_is_whole_only_with_the_files_of_all_processes(train, tmp_path):
    out = tmp_path / "late"
    train(out, hooks={0: end_at_first_whole_checkpoint, 1: save_rng_late})
    files = json.loads((out / "checkpoint-2/alma_seconds.json").read_text())["files"]
    assert "rng_state_1.pth" in files


def test_a_training_that_has_ended_is_answered_by_the_first_process(train, whole, tmp_path):
    answer = (whole / "trained.json").read_bytes()
    (whole / "trained.json").unlink()
    done = train(whole, flags=AVERAGE)
    assert [child.code for child in done] == [0, 0], done
    assert not tiny.losses(done[0].output)
    assert (whole / "trained.json").read_bytes() == answer


def test_the_batch_is_kept_on_another_number_of_processes(train, whole, tmp_path):
    """From two processes to one with twice the accumulation, in the middle of a stage."""
    out = tmp_path / "fewer"
    train(out, hooks={1: partial(tiny.kill_before_update, 4)}, flags=AVERAGE)
    done = train(out, 1, flags=(*AVERAGE, "--gradient_accumulation_steps", "2"))
    assert done[0].code == 0, done
    from safetensors.torch import load_file

    resumed = load_file(out / "weights/model.safetensors")
    for name, weight in load_file(whole / "weights/model.safetensors").items():
        torch.testing.assert_close(weight, resumed[name], rtol=1e-5, atol=1e-6)
