"""A learner of language models is one entry in LEARNERS."""

import pytest
from launcher import read_requests

from alma.errors import UserError
from alma.learners import LEARNERS, LearnerSpec
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.lm.announce import table
from slurm.lm.checks import check
from slurm.lm.cluster import show_jobs
from slurm.lm.estimate import estimate
from slurm.lm.options import parser
from slurm.lm.plan import Plan, make_plan


def plan(learner: str, *words: str) -> Plan:
    (request,) = read_requests(["S", "--learner", learner, "--out", "R", *words])
    check(request)
    return make_plan(request, 3)


def test_a_new_entry_is_planned_estimated_submitted_and_documented(monkeypatch, capsys):
    """Each stage trains two new members; those of the latest two stages are deployed."""
    spec = LearnerSpec("the latest members", members=2, fresh=True, deployed=2)
    monkeypatch.setitem(LEARNERS, "window", spec)
    run_plan = plan("window", "--seed", "5")
    for spec, stages in zip(run_plan.stages[1:], ((0, 1), (1, 2)), strict=True):
        members = [f"stage_{stage:02d}/member_{member}" for stage in stages for member in (0, 1)]
        assert [str(model) for model in spec.models] == [f"R/{member}" for member in members]
    trainings = [training for spec in run_plan.stages for training in spec.trainings]
    seeds = [training.arguments[training.arguments.index("--seed") + 1] for training in trainings]
    assert seeds == ["5", "1005", "2005", "3005", "4005", "5005"]
    assert {training.previous for training in trainings} == {None}
    assert run_plan.config["members"] == 2
    assert table([estimate(run_plan, 10, Machine((), None))]).splitlines()[1].split()[1:3] == [
        "window",
        "4@4",
    ]
    show_jobs([run_plan], Resources(), verbose=False)
    assert capsys.readouterr().out.splitlines() == [
        "# <1> R untrained",
        *(f"# <{k + 2}> R stage {k}, member 1 of 2, R stage {k}, member 2 of 2" for k in range(3)),
        *(f"# <{k + 5}> R evaluation of stage {k}" for k in range(3)),
        "7 submissions with 10 jobs, 1,248 GPU-hours requested, before requeues "
        "(jobs x GPUs x --timeout-min)",
    ]
    assert "window: the latest members" in " ".join(parser().format_help().split())
    with pytest.raises(UserError, match="--grow-experts needs --learner gmoe, not window"):
        plan("window", "--grow-experts", "2")
    with pytest.raises(UserError, match="--from-scratch: window trains new models in every stage"):
        plan("window", "--from-scratch")


def test_a_new_entry_may_grow(monkeypatch):
    spec = LearnerSpec("each member grows", members=3, growth=True, switch=True)
    monkeypatch.setitem(LEARNERS, "grown", spec)
    run_plan = plan("grown", "--grow-experts", "1,3")
    assert [spec.settings["--moe-expert-count"] for spec in run_plan.stages] == [4, 5, 8]
    assert [len(spec.models) for spec in run_plan.stages] == [3, 3, 3]
    assert str(run_plan.stages[2].trainings[1].previous) == "R/stage_01/member_1"
    with pytest.raises(UserError, match="--grow-experts needs --learner gmoe or grown, not sm"):
        plan("sm", "--grow-experts", "2")
