"""States of submitted jobs, over stand-ins for SLURM's programs."""

import json
from pathlib import Path

import pytest
from stand_ins import RUNNING, entry, finish, finish_all, later, states, write

from alma.errors import UserError
from slurm.engine import queue


@pytest.mark.parametrize(
    ("words", "restarts", "state"),
    [
        ("PENDING REQUEUE_HOLD", 0, "queued"),
        ("PENDING", 1, "requeued"),
        ("CONFIGURING COMPLETING SUSPENDED", 0, "running"),
        ("CANCELLED", 0, "cancelled"),
        ("COMPLETED FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED", 0, "failed"),
    ],
)
def test_states_of_slurm(slurm, run, words, restarts, state):
    for word in words.split():
        slurm.has(squeue=f"5|{word}|n1|{restarts}|Priority|\n")
        seen = queue.look([run])[0]
        assert seen.state == state
        assert (seen.why == "Priority") == (state in ("queued", "requeued"))


def test_a_marker_written_during_squeue_counts(slurm, run):
    finish_all(run)
    (run / "untrained.json").unlink()
    slurm.has(squeue="5|COMPLETED|n1|0|None|\n")
    with (slurm.folder / "squeue").open("a") as file:
        file.write(f"echo '{{}}' > {run.resolve()}/untrained.json\n")
    assert states(run)["untrained"] == "done"


def test_dependents_of_a_failed_job_are_cancelled_and_say_so(slurm, run):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(
        squeue="7_1|FAILED|n1|0|NonZeroExitCode|\n8_0|RUNNING|n2|0|None|\n"
        "8_1|PENDING||0|Dependency|\n"
    )
    seen = {status.job.name: status for status in queue.look([run])}
    assert seen["stage 0, member 2 of 2"].state == "failed"
    assert seen["stage 1, member 1 of 2"].state == "running"
    for name in ("evaluation of stage 0", "stage 1, member 2 of 2", "evaluation of stage 1"):
        assert seen[name].state == "cancelled"
        assert seen[name].why == "needs stage 0, member 2 of 2 (failed)"
    (run / "stage_00/member_0/trained.json").unlink()
    slurm.has(squeue="7_0|CANCELLED||0|x|\n7_1|FAILED|n1|0|x|\n")  # a failure explains more
    assert queue.look([run])[3].why == "needs stage 0, member 2 of 2 (failed)"


def test_jobs_that_slurm_does_not_know_are_lost(slurm, run):
    """squeue fails for a single unknown job."""
    slurm.fails(squeue="slurm_load_jobs error: Invalid job id specified")
    finish(run, "untrained.json")
    seen = {status.job.name: status for status in queue.look([run])}
    assert seen["stage 0, member 1 of 2"].state == "lost"
    assert "no longer known to SLURM" in seen["stage 0, member 1 of 2"].why
    assert seen["evaluation of stage 1"].why == "needs stage 0, member 1 of 2 (lost)"


def test_errors_in_logs(slurm, run):
    """SLURM ends the first process of a job when another fails, which alone says why."""
    slurm.has(
        squeue="5|FAILED|n1|0|x|\n7_0|FAILED|n1|0|x|\n7_1|COMPLETED|n1|0|x|\n8_0|FAILED|n1|0|x|\n"
    )
    Path("jobs/5.out").write_text(
        "error: stage 0: no room\nsrun: error: n1: Exited with exit code 1\n"
    )
    (run / "untrained.log").write_text("RuntimeError: mended long ago\n")
    (run / "stage_00/member_0/train.log").write_text("RuntimeError: CUDA error\n")
    Path("jobs/8_0.out").write_text(
        "srun: error: n2: task 1: Exited\nslurmstepd-n1: error: *** STEP\n"
    )
    Path("jobs/8_0_1_log.out").write_text("error: process 8 on n2: no file of this start\n")
    (run / "stage_01/member_0/train.log").write_text("error: training: signal 15 (Terminated)\n")
    untrained, first, second, _, third, *_ = queue.look([run])
    assert (untrained.why, untrained.log) == ("stage 0: no room", Path("jobs/5.out").resolve())
    assert (first.why, first.log) == (
        "RuntimeError: CUDA error",
        run / "stage_00/member_0/train.log",
    )
    assert second.why == "its job ended without trained.json"
    assert third.why == "process 8 on n2: no file of this start"
    assert "failed: RuntimeError: CUDA error; log: run/stage_00/member_0/train.log" in str(first)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (
            "srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive.\n",
            "SLURM_MEM_PER_CPU",
        ),
        (
            "srun: error: Unable to create step for job 5: Invalid account\n",
            "Unable to create step",
        ),
        (
            "/spool/job5/slurm_script: line 13: srun: command not found\n",
            "line 13: srun: command not found",
        ),
        (
            "slurmstepd: error: execve(): /venv/bin/python: No such file or directory\n"
            "srun: error: n1: task 0: Exited with exit code 2\nsrun: Terminating StepId=5.0\n",
            "execve(): /venv/bin/python: No such file",
        ),
        ("srun: error: n1: task 0: Killed\n", "n1: task 0: Killed"),
    ],
)
def test_what_slurm_wrote_counts_if_no_process_wrote_an_error(slurm, run, written, why):
    slurm.has(squeue="5|FAILED|n1|0|x|\n")
    Path("jobs/5.out").write_text(f"submitit INFO - Starting\n{written}")
    assert queue.look([run])[0].why.startswith(why)


_GOOD = {"name": "stage 0", "kind": "train", "marker": "a/trained.json", "updates": 9}
_GOOD |= {"job": "7_2", "log": None, "needs": []}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "'jobs'"),
        ("[" * 100_000, ""),
        ({"job": "--user=root"}, r"\.job"),  # would be an option of scancel
        ({"needs": "none"}, r"\.needs"),
        ({"needs": [3]}, r"\.needs"),
        ({"marker": None}, r"\.marker"),
        ({"updates": 1.5}, r"\.updates"),
        ({"name": "\x1b[2J"}, r"\.name"),
    ],
)
def test_a_damaged_jobs_file_is_an_error(run, content, problem):
    text = content if isinstance(content, str) else json.dumps({"jobs": [_GOOD | content]})
    (run / "jobs.json").write_text(text)
    with pytest.raises(UserError, match=f"run/jobs.json is damaged .*{problem}"):
        queue.read_jobs(run)


def test_slurm_is_asked_once_for_all_runs_and_an_array_once(slurm, run, tmp_path):
    write(tmp_path / "other", entry("stage 0", "stage_00/trained.json", "7_2"))
    finish(run, "untrained.json")
    slurm.has(squeue=RUNNING + "7_2|RUNNING|n1|0|None|\n")
    queue.look([run, tmp_path / "other"])
    (arguments,) = slurm.calls("squeue")
    assert arguments[arguments.index("-j") + 1] == "7,20,8,21"


def test_watch_ends_when_nothing_moves(slurm, run):
    slurm.has(squeue="5|NODE_FAIL|n1|0|x|\n7_0|FAILED|n1|0|x|\n")
    assert len(list(queue.watch([run], 0.01))) == 2  # a failed job may be about to be requeued


def test_watch_retries_when_slurm_stops_answering(slurm, run, capsys):
    """A data_prep that waits for its jobs also if the first look fails."""
    slurm.fails(squeue="Socket timed out")
    with pytest.raises(UserError, match="Socket timed out"):
        next(queue.watch([run], 0.01))
    with later(finish_all, run):
        assert {status.state for status in next(queue.watch([run], 0.01, patient=True))} == {"done"}
    assert capsys.readouterr().err.count("Socket timed out; asking again") == 1


def test_wait_prints_changes_and_held_jobs_and_returns_failures(slurm, run, capsys):
    slurm.has(
        squeue="5|RUNNING|n1|0|None|\n7_1|PENDING||1|launch failed requeued held|\n"
        "7_0|PENDING||0|Priority|\n"
    )

    def end():
        finish(run, "untrained.json", "stage_00/member_0/trained.json")
        slurm.has(squeue="7_1|OUT_OF_MEMORY|n1|0|x|\n8_0|CANCELLED||0|x|\n")

    with later(end):
        failed = queue.wait([run], 0.1)
    cancelled = dict.fromkeys(("20", "8_0", "8_1", "21"), "cancelled")
    assert {status.job.job_id: status.state for status in failed} == {"7_1": "failed", **cancelled}
    err = capsys.readouterr().err
    assert "run: untrained (job id 5) done" in err
    held = "launch failed requeued held: release it with: scontrol release 7_1"
    assert err.count(f"run: stage 0, member 2 of 2 (job id 7_1) requeued: {held}") == 1
    assert "run: stage 0, member 2 of 2 (job id 7_1) failed: SLURM says OUT_OF_MEMORY; log: " in err
