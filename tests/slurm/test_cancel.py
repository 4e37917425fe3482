"""`alma cancel` and relaunches of runs that share trainings,
on a real SLURM whose jobs do not start."""

import re

import pytest
from launcher import SMALL, call, make

from slurm import cancel
from slurm.engine import queue, squeue

STAGES = [f"stage {k}" for k in range(2)]
EVALUATIONS = [f"evaluation of {name}" for name in STAGES]


@pytest.fixture
def launched(cluster, tmp_path, monkeypatch):
    """Runs `sm` and `ens`, whose first member is sm; a function launches them again."""
    run = make(tmp_path / "my runs", environment=cluster.environment)
    for name, members in (("sm", ""), ("ens", "members: 2\n")):
        (run.folder / f"{name}.yaml").write_text(f"learner: {name}\nout: {name}\n{members}")

    def launch() -> str:
        words = ("sm.yaml", "ens.yaml", "--stream", "stream", "--cluster", "slurm", "--stages", "2")
        return run.run_words(*words, "--timeout-min", "30", "--", *SMALL, "--max-update", "2")[1]

    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("SCANCEL_STATE", "SQUEUE_STATES"):  # would filter jobs
        monkeypatch.setenv(name, "RUNNING")
    monkeypatch.chdir(run.folder)
    cluster.run("scontrol", "update", "partitionname=main", "state=down")
    try:
        launch()
        yield launch
    finally:
        cluster.run("scancel", *(id for name in ("sm", "ens") for id in jobs(name).values()))
        cluster.run("scontrol", "update", "partitionname=main", "state=up")


def jobs(run: str) -> dict[str, str]:
    return {job.name: job.job_id for job in queue.read_jobs(queue.find([run])[0])}


def test_shared_trainings_are_left_unless_all_their_runs_are_given(
    cluster, launched, monkeypatch, capsys
):
    def say(*words: str) -> list[str]:
        assert call(cancel.main, monkeypatch, "sm", *words) == 0
        return capsys.readouterr().out.splitlines()

    def live(run: str) -> set[str]:
        ids = jobs(run)
        states = squeue.ask(ids.values())
        return {name for name, job_id in ids.items() if job_id in states and states[job_id].live}

    capsys.readouterr()
    sm = jobs("sm")
    ens = jobs("ens")
    waiting = {"stage 0, member 1 of 2", "stage 1, member 1 of 2", *EVALUATIONS}
    lines = say("--dry-run")
    cancelled = [f"sm: {name} (job id {sm[name]})" for name in ("untrained", *EVALUATIONS)]
    assert lines[:4] == [*cancelled, "would cancel 3 jobs"]
    assert lines[4].startswith(
        "left are these, because other runs wait for them; give these runs too "
    )
    assert lines[5:7] == [f"  sm: {name} (job id {sm[name]})" for name in STAGES]
    assert {re.search(r"ens: (.*) \(job", line)[1] for line in lines[7:]} == waiting
    assert live("sm") == sm.keys()
    assert "cancelled 3 jobs" in say()
    assert live("sm") == set(STAGES)
    assert live("ens") == ens.keys()
    both = len(STAGES) + len(ens)
    assert f"would cancel {both} jobs" in say("ens", "--dry-run")
    assert say("ens")[-1] == f"cancelled {both} jobs"
    assert live("sm") == live("ens") == set()
    assert f"{len(sm) + len(ens)} jobs submitted" in launched()
    assert live("sm") == sm.keys()
    assert live("ens") == ens.keys()


def test_a_relaunch_cancels_jobs_whose_needed_job_of_another_run_is_gone(cluster, launched):
    before = jobs("sm") | {f"ens {name}": job_id for name, job_id in jobs("ens").items()}
    shared = before["ens stage 0, member 1 of 2"]
    cluster.run("scancel", before["stage 0"])
    # SLURM forgets this dependency, because the element had not started.
    cluster.until(lambda: not squeue.ask([shared])[shared].waits_for)
    launched()
    after = jobs("sm") | {f"ens {name}": job_id for name, job_id in jobs("ens").items()}
    unchanged = {name for name in after if after[name] == before[name]}
    assert unchanged == {
        "untrained",
        "ens untrained",
        "ens stage 0, member 2 of 2",
        "ens stage 1, member 2 of 2",
    }
    waiting = squeue.ask([after["ens stage 0, member 1 of 2"]])
    assert [state.waits_for for state in waiting.values()] == [{after["stage 0"]}]
    old = [before[name] for name in before.keys() - unchanged]
    cluster.until(lambda: not any(state.live for state in squeue.ask(old).values()))
    assert {state.word for state in squeue.ask(after.values()).values()} == {"PENDING"}
