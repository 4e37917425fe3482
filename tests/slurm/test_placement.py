"""The batch of an update stays the user's, whatever the number of GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import submitit
from launcher import read_requests

from alma.errors import UserError
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.lm import record
from slurm.lm.placement import place
from slurm.lm.plan import make_plan
from slurm.lm.stage import TrainJob, jobs_of

START = "--distributed-init-method"
SIXTEEN = Resources(nodes=2).machine()


def here(gpus: int) -> Machine:
    return Machine((10**10,) * gpus, None)


def placed(machine: Machine, *flags: str, out="R"):
    """The plan on a machine: batch size 8 and --update-freq 3 if `flags` give none."""
    (request,) = read_requests(["S", "--learner", "sm", "--out", str(out), "--", *flags])
    return make_plan(place(request, machine), 4)


def words(plan) -> dict[str, str]:
    """The flags of the first training that say how the batch is divided."""
    arguments = plan.stages[0].trainings[0].arguments
    names = ("--distributed-world-size", "--update-freq", "--expect-tokens")
    return {name[2:]: arguments[arguments.index(name) + 1] for name in names}


@pytest.mark.parametrize(
    ("machine", "flags", "processes", "freq", "sequences"),
    [
        (here(0), "", 1, "3", 24),
        (here(8), "", 8, "3", 192),
        (here(8), "--cpu", 1, "3", 24),
        (here(4), "--distributed-world-size 2", 2, "1", 16),
        (here(4), "--batch-size 8 --update-freq 3 --distributed-world-size=8", 4, "6", 192),
        (here(1), "--batch-size 8 --update-freq 1,2 --distributed-world-size 8", 1, "8,16", 64),
        (here(0), "--cpu --batch-size 8 --distributed-world-size 2", 2, "1", 16),
        (SIXTEEN, "", 16, "3", 384),
        (SIXTEEN, "--batch-size 4 --update-freq 4 --distributed-world-size 8", 16, "2", 128),
        (Resources(nodes=2, gpus_per_node=1).machine(), "--cpu", 2, "3", 48),
        (Resources(gpus_per_node=0, tasks_per_node=4).machine(), "", 4, "3", 96),
    ],
)
def test_the_batch_stays_and_its_division_is_explicit(machine, flags, processes, freq, sequences):
    if "world" in flags and "--update" not in flags:
        flags += " --batch-size 8 --update-freq 1"
    plan = placed(machine, *flags.split())
    expected = {"distributed-world-size": str(processes), "update-freq": freq}
    assert words(plan) == expected | {"expect-tokens": str(sequences * 512)}
    assert plan.stages[0].settings["--distributed-world-size"] == processes


def test_processes_that_cannot_share_the_batch_are_refused_with_what_works():
    eight = ("--batch-size", "8", "--update-freq", "3", "--distributed-world-size", "8")
    works = (
        "16 processes cannot share the 24 batches .* `-- --distributed-world-size 12 "
        "--update-freq 2` on 12"
    )
    with pytest.raises(UserError, match=works):
        placed(SIXTEEN, *eight)
    with pytest.raises(UserError, match="--tasks-per-node 4, but --gpus-per-node 8"):
        Resources(tasks_per_node=4)


def test_a_run_keeps_the_batch_of_its_first_machine(tmp_path, monkeypatch):
    """Runs on 8 and on 2 GPUs are not the same run, unless the second one resumes the first."""
    monkeypatch.setattr(record, "identity", lambda stream: {})
    eight, on_two = (placed(here(gpus), out=tmp_path / "run") for gpus in (8, 2))
    assert eight.config != on_two.config
    run = record.open_run(eight)
    assert (run.info["processes"], run.info["gpus"], run.info["tokens_per_update"]) == (
        8,
        8,
        192 * 512,
    )
    (tmp_path / "run/x.pt").touch()  # trained
    resumed = placed(here(2), out=tmp_path / "run")
    assert words(resumed) | {"expect-tokens": ""} == words(on_two) | {
        "update-freq": "12",
        "expect-tokens": "",
    }
    assert record.open_run(resumed).info["processes"] == 2
    with pytest.raises(UserError, match="tokens_per_update: 98304 -> 24576"):
        record.open_run(on_two)
    assert words(placed(here(5), out=tmp_path / "run"))["distributed-world-size"] == "4"
    with pytest.raises(UserError, match="give GPUs for 4 processes"):
        placed(Resources(gpus_per_node=5).machine(), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("resources", "tasks", "rank"),
    [
        (Resources(nodes=2), 2, "8"),
        (Resources(nodes=2, gpus_per_node=1), 2, "1"),
        (Resources(tasks_per_node=2, gpus_per_node=2), 2, "1"),
        (Resources(gpus_per_node=2), 1, "0"),
        (Resources(gpus_per_node=1), 1, None),
    ],
)
def test_processes_find_each_other(tmp_path, monkeypatch, resources, tasks, rank):
    """Also on N nodes of one GPU, where fairseq would train N times alone.

    They meet by a file of this start of the job; on one node at localhost.
    """
    job = SimpleNamespace(
        num_tasks=tasks, global_rank=tasks - 1, raw_job_id="7", num_nodes=resources.nodes
    )
    monkeypatch.setattr(submitit, "JobEnvironment", lambda: job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    calls: list = []
    monkeypatch.setattr(TrainJob, "do", lambda self, **options: calls.append(options["arguments"]))
    request = placed(resources.machine(), out=tmp_path / "a run")
    next(job for job in jobs_of(request) if job.kind == "train").work()
    gpus = resources.gpus_per_node // resources.tasks_per_node
    assert calls[0][:2] == ["--expect-gpus", str(gpus)]
    file = f"{tmp_path}/a%20run/stage_00/.rendezvous.json"
    host = "&host=localhost" if resources.nodes == 1 else ""
    meeting = [START, f"alma://{file}?attempt=7.3{host}", "--distributed-rank", rank]
    alone = ["--distributed-no-spawn"] if gpus == 1 else []
    assert calls[0][2:] == ([*meeting, *alone] if rank else [])


def by_transformers(machine: Machine, processes: int | None, passes: int, cpu: bool = False):
    """The settings on a machine of a run by transformers' Trainer with batches of 4 blocks."""
    (request,) = read_requests(["S", "--learner", "sm", "--out", "R", "--", "--cpu"])
    settings = {
        "--cpu": cpu,
        "--batch-size": 4,
        "--update-freq": [passes],
        "--distributed-world-size": processes,
    }
    settings = request.settings | settings
    return place(replace(request, engine="transformers", settings=settings), machine).settings


def test_transformers_keeps_the_batch_by_its_accumulation():
    settings = by_transformers(here(2), 8, 1)
    assert settings["--distributed-world-size"] == 2
    assert settings["--update-freq"] == [4]
    assert by_transformers(SIXTEEN, None, 3)["--distributed-world-size"] == 16
    on_cpu = Resources(nodes=2, gpus_per_node=0).machine()
    assert by_transformers(on_cpu, None, 1, cpu=True)["--distributed-world-size"] == 2


def test_errors_name_the_flags_of_transformers():
    remedy = "`-- --num_processes 2 --gradient_accumulation_steps 2` on 2 of them"
    with pytest.raises(UserError, match=remedy):
        by_transformers(Resources(gpus_per_node=3).machine(), 4, 1)
    with pytest.raises(
        UserError, match="--num_processes 2: each process needs a GPU, .* --use_cpu"
    ):
        by_transformers(here(0), 2, 1)
