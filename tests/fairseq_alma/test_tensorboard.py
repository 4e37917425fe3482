"""TensorBoard shows one curve per model over all stages, whatever interrupted them."""

import itertools
from collections import Counter

import pytest
import torch
from launcher import read_requests

from fairseq_alma.checkpoint import updates_so_far
from slurm.lm.plan import make_plan
from tests.events import points

# Loaded with --user-dir: the process dies in update 7, with its points up to 6 written.
DIES = """
import os, signal, time
from fairseq_alma.task import AlmaLMTask

step = AlmaLMTask.train_step

def train_step(self, sample, model, criterion, optimizer, update_num, **kwargs):
    if update_num == 6:
        time.sleep(3)  # a writer needs up to a second
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, sample, model, criterion, optimizer, update_num, **kwargs)

AlmaLMTask.train_step = train_step
"""


def steps(folder, tag: str) -> list[int]:
    return [step for step, _ in points(folder)[tag]]


@pytest.fixture
def logged(start, stream, tiny, tmp_path, user_dir):
    """The TensorBoard folder of two stages of 8 updates: stage 0 dies and resumes, stage 1
    grows."""
    logs = tmp_path / "logs"
    flags = [*tiny, "--tensorboard-logdir", logs, "--log-interval", "1", "--max-update", "8"]
    first = [stream, *flags, "--save-dir", tmp_path / "stage_00", "--save-interval-updates", "4"]
    assert start("train", *first, *user_dir(DIES)).wait().code == -9
    second = [
        stream,
        *flags,
        "--save-dir",
        tmp_path / "stage_01",
        "--stage",
        "1",
        "--moe-expert-count",
        "6",
    ]
    second += [
        "--grow-experts",
        "2",
        "--finetune-from-model",
        tmp_path / "stage_00/checkpoint_best.pt",
    ]
    for words in (first, second, second):  # the third finds nothing to do
        finished = start("train", *words).wait()
        assert finished.code == 0, finished.output
    evaluation = [stream, "--task", "alma_lm", "--gen-subset", "test", "--tensorboard-logdir", logs]
    evaluation += [
        "--path",
        tmp_path / "stage_01/checkpoint_best.pt",
        "--out",
        tmp_path / "result.json",
    ]
    finished = start("evaluate", *evaluation).wait()
    assert finished.code == 0, finished.output
    return logs


def test_stages_and_evaluations_share_an_axis_and_repeated_updates_are_hidden(logged):
    inner = points(logged / "train_inner")
    assert [step for step, _ in inner["loss"]] == list(range(1, 17))
    assert [step for step, _ in inner["sys.argv/text_summary"]] == [1, 5, 9]
    assert [step for step, _ in inner["l1_share3"]] == list(range(1, 17))
    assert [step for step, _ in inner["l1_share5"]] == list(range(9, 17))
    assert steps(logged / "valid", "l1_nll0") == [4, 8, 16]
    assert steps(logged / "train", "loss") == [8, 16]
    written = Counter(step for step, _ in points(logged / "train_inner", hide=False)["loss"])
    assert written[5] == written[6] == 2
    test = points(logged / "test")
    ((step, loss),) = test["loss"]
    ((_, perplexity),) = test["ppl"]
    assert step == 16
    assert 2**loss == pytest.approx(perplexity, rel=1e-4)
    assert sum(value for tag in test if "share" in tag for _, value in test[tag]) == pytest.approx(
        1
    )
    assert "l1_nll5" in test


def test_updates_are_counted_up_to_the_last_checkpoint(tmp_path):
    """Of checkpoints of earlier versions, the updates of their own stage."""
    for name, updates, counts in (("last", 8, {"earlier_updates": 20}), ("best", 5, {})):
        state = {"model": {}, "optimizer_history": [{"num_updates": updates}]}
        torch.save(
            state | {"extra_state": {"AlmaLMTask": counts}}, tmp_path / f"checkpoint_{name}.pt"
        )
    best = tmp_path / "checkpoint_best.pt"
    assert updates_so_far(str(best)) == 28
    (tmp_path / "checkpoint_last.pt").unlink()
    assert updates_so_far(str(best)) == 5


@pytest.mark.parametrize(
    ("options", "trainings", "evaluations"),
    [
        (["sm"], ["", ""], ["", "", ""]),
        (["ens"], ["/member_0", "/member_1"] * 2, ["", "", ""]),
        (["gens"], ["/stage_00", "/stage_01"], ["/stage_00", "/stage_00", "/stage_01"]),
        (
            ["sm", "--from-scratch"],
            ["/stage_00", "/stage_01"],
            ["/stage_00", "/stage_00", "/stage_01"],
        ),
    ],
    ids=["sm", "ens", "gens", "from-scratch"],
)
def test_the_launcher_gives_each_model_a_folder_and_records_none(options, trainings, evaluations):
    words = ["S", "--learner", *options, "--out", "runs/a", "--", "--max-update", "4"]
    with_logs, without = (
        make_plan(read_requests([*words, *flags])[0], 2)
        for flags in (["--tensorboard-logdir=L"], [])
    )

    def folders(commands) -> list[str]:
        flags_of_commands = [dict(itertools.pairwise(words)) for words in commands]
        return [words["--tensorboard-logdir"] for words in flags_of_commands]

    trained = [training.command for spec in with_logs.stages for training in spec.trainings]
    assert folders(trained) == [f"L/a{folder}" for folder in trainings]
    evaluated = [with_logs.untrained, *(spec.evaluate for spec in with_logs.stages)]
    assert folders(evaluated) == [f"L/a{folder}" for folder in evaluations]
    assert with_logs.config == without.config
    unlogged = [
        without.untrained,
        *(spec.evaluate + spec.trainings[0].command for spec in without.stages),
    ]
    assert not any("--tensorboard-logdir" in command for command in unlogged)
