"""`slurm.status` and `slurm.cancel` over stand-ins for SLURM's programs,
and once over a real SLURM."""

import os
import pwd
from pathlib import Path

import pytest
from launcher import call, make, refused, wait_for
from stand_ins import entry, finish, finish_all, states, write

from alma.files import locked
from slurm import cancel, status
from slurm.engine import queue, squeue
from slurm.engine.submission import in_queue

NAME = "--job-name=alma-test"
INNER = (
    '2026-11-21 08:22:25 | INFO | train_inner | {"ppl": "%s", "ups": "%s", "num_updates": "%s"}\n'
)
VALID = (
    "2026-11-21 08:22:40 | INFO | valid | "
    '{"epoch": 1, "valid_ppl": "483", "valid_num_updates": "80"}\n'
)


def test_table(slurm, run, monkeypatch, capsys):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    (run / "stage_00/member_0/train.log").write_text(INNER % (50, 2, 400) + VALID)
    (run / "stage_00/member_1/train.log").write_text(
        INNER % (60, 2, 100) + INNER % (55.5, 4, 120) + "| {\n"
    )
    slurm.has(
        squeue="7_1|RUNNING|n3|0|None|\n8_0|FAILED|n1|0|x|\n"
        + "".join(f"{job_id}|PENDING||0|x|\n" for job_id in ("20", "8_1", "21"))
    )
    Path("jobs/8_0.out").write_text("error: boom\n")
    assert call(status.main, monkeypatch, run) == 1
    header, *lines, total = capsys.readouterr().out.splitlines()
    assert header.split() == "run job state job id node updates perplexity log".split()
    words = {" ".join(line.split()) for line in lines}
    assert words == {
        "run untrained done 5 118.57 run/untrained.log",
        "run stage 0, member 1 of 2 done 7_0 400/400 valid 483.00 run/stage_00/member_0/train.log",
        "run stage 0, member 2 of 2 running 7_1 n3 120/400 train 55.50 "
        "run/stage_00/member_1/train.log",
        "run evaluation of stage 0 waiting 20 needs stage 0, member 2 of 2",
        "run stage 1, member 1 of 2 failed 8_0 n1 jobs/8_0.out: boom",
        "run stage 1, member 2 of 2 waiting 8_1 needs stage 0, member 2 of 2",
        "run evaluation of stage 1 cancelled 21 needs stage 1, member 1 of 2 (failed)",
    }
    assert total == "2 done, 1 running, 2 waiting, 1 failed, 1 cancelled"


def test_linked_runs_are_found(slurm, run, tmp_path, monkeypatch, capsys):
    slurm.has(squeue="7_1|RUNNING|n3|0|None|\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/far").symlink_to(run.resolve().parent / run.name)
    assert "7_1" in (call(status.main, monkeypatch, tmp_path / "links"), capsys.readouterr().out)[1]


def test_progress_is_that_of_the_last_attempt(slurm, run, monkeypatch, capsys):
    """A relaunched job that waits, is queued, has just started, has begun to train;
    and one that failed."""

    def updates(state: str) -> str:
        slurm.has(squeue=f"7_0|{state}|n1|0|x|\n8_0|PENDING||0|x|\n")
        call(status.main, monkeypatch, run)
        out = capsys.readouterr().out
        assert "380/400" not in out
        return "90/400" if "90/400" in out else ""

    finish(run, "untrained.json")
    log = run / "stage_00/member_0/train.log"
    started = Path("jobs/7_0.out")
    old = "\n$ fairseq-train\n" + INNER % (50, 2, 380)
    for path in (log, run / "stage_01/member_0/train.log"):
        path.write_text(old)
    os.utime(log, (1000, 1000))
    assert updates("PENDING") == ""
    started.write_text("submitit INFO - Starting\n")
    assert updates("RUNNING") == ""
    log.write_text(old + "\n$ fairseq-train\n")
    assert updates("RUNNING") == ""
    log.write_text(old + "\n$ fairseq-train\n" + INNER % (50, 2, 90))
    os.utime(started, (1000, 1000))
    assert updates("RUNNING") == updates("FAILED") == "90/400"


def test_jobs_that_were_complete_at_launch_have_no_job_id(slurm, run, monkeypatch, capsys):
    write(run, entry("untrained", "untrained.json", None))
    assert states(run) == {"untrained": "never submitted"}
    finish(run, "untrained.json")
    write(Path("stream"), entry("scan 0", "share-scan-00000.json", "7_0", kind="data_prep"))
    finish(Path("stream"), "share-scan-00000.json")
    assert call(status.main, monkeypatch, ".") == 0  # a folder of runs
    _, _, scan, total = capsys.readouterr().out.splitlines()
    assert scan.endswith("  jobs/7_0.out")  # of SLURM, the only one
    assert total == "2 done"
    assert call(cancel.main, monkeypatch, run) == 0
    assert capsys.readouterr().out == "nothing to cancel\n"
    assert slurm.calls("squeue") == slurm.calls("scancel") == []


def test_a_damaged_run_is_named_beside_the_others_and_is_no_success(
    slurm, run, monkeypatch, capsys
):
    finish_all(run)
    assert call(status.main, monkeypatch, ".") == 0
    write(Path("other"), entry("untrained", "untrained.json", None))
    Path("other", queue.JOBS).write_text("{")
    capsys.readouterr()
    assert call(status.main, monkeypatch, ".") == 1
    captured = capsys.readouterr()
    assert captured.out.endswith("\n7 done\n")
    assert captured.err.startswith("left out: other/jobs.json is damaged")


def test_states_of_a_local_run(launcher, monkeypatch, capsys):
    def line(code: int) -> str:
        assert call(status.main, monkeypatch, "run") == code
        return " ".join(capsys.readouterr().out.splitlines()[1].split())

    monkeypatch.chdir(launcher.folder)
    launcher.run("--stages", "2")
    value = f"{launcher.rows[2]['value']:,.2f}"
    assert line(0) == f"run mega-batch 2 of 4 done {value} 2 of 4 stages requested"
    with locked(launcher.out):
        assert line(0).startswith(
            f"run mega-batch 2 of 4 running {value} run/stage_01/eval.log: pid "
        )
    results = launcher.out / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:2]))
    assert " stopped " in line(1)  # killed between two rows
    trained = launcher.out / "stage_01/trained.json"
    backup = trained.rename(trained.with_suffix(".kept"))
    log = launcher.out / "stage_01/train.log"
    log.write_text("\n$ fairseq-train\nRuntimeError: of an earlier start\n\n$ fairseq-train\n")
    assert " stopped " in line(1)
    log.write_text("\n$ fairseq-train\nRuntimeError: out of luck\n")
    assert line(1).endswith("run/stage_01/train.log: RuntimeError: out of luck")
    backup.rename(trained)
    launcher.run()
    assert line(0).startswith("run mega-batch 4 of 4 done ")
    with locked(launcher.out):  # by a launch whose other runs still train
        assert " done " in line(0)
        assert ": its launch still works: pid " in line(0)
    assert call(cancel.main, monkeypatch, "run") == 2
    assert "not launched on a cluster" in capsys.readouterr().err


def test_states_of_runs_that_the_launcher_left(tmp_path, monkeypatch, capsys):
    """After an error, a killed child and a killed launcher."""
    monkeypatch.chdir(tmp_path)
    failed, ended, killed = (make(tmp_path / name) for name in ("failed", "ended", "killed"))
    failed.environment["FAKE_CRASH"] = "1:1:python"
    ended.environment["FAKE_CRASH"] = "1:1:kill"  # as the kernel does when memory runs out
    killed.environment["FAKE_SLEEP"] = "60"
    gone_job, gone, process = (run.start() for run in (failed, ended, killed))
    wait_for(killed.pids.exists)
    assert call(status.main, monkeypatch, "killed") == 0
    assert " running " in capsys.readouterr().out
    process.kill()
    assert (gone_job.wait(60), gone.wait(60), process.wait(60)) == (1, 1, -9)
    assert call(status.main, monkeypatch, "failed/run", "ended/run", "killed/run") == 1
    _, *lines, total = capsys.readouterr().out.splitlines()
    assert " failed " in lines[0]
    assert lines[0].endswith("stage_01/train.log: RuntimeError: CUDA error: out of luck")
    assert " failed " in lines[1]
    assert "signal 9 (Killed)" in lines[1]
    assert " stopped " in lines[2]
    assert total == "2 failed, 1 stopped"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (status, "", "required: RUN"),
        (status, "absent", "absent is not a folder: give run directories"),
        (cancel, "jobs", "no runs in jobs: no folder in it has a jobs.json or a run.json"),
        (status, "run", "no SLURM here (no squeue): run this on a machine of the cluster"),
        (cancel, "run", "no SLURM here (no squeue)"),
    ],
)
def test_wrong_command_lines(slurm, run, monkeypatch, capsys, command, words, message):
    (slurm.folder / "squeue").unlink()
    assert message in refused(command.main, monkeypatch, capsys, *words.split())


def test_cancel_cancels_incomplete_jobs_only(slurm, run, monkeypatch, capsys):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(
        squeue="5|COMPLETING|n1|0|x|\n7_0|COMPLETED|n1|0|x|\n7_1|RUNNING|n1|0|x|\n"
        "7_2|RUNNING|n1|0|x|\n8_0|FAILED|n1|0|x|\n8_1|PENDING||0|x|\n20|PENDING||0|x|\n"
    )
    assert call(cancel.main, monkeypatch, run, "--dry-run") == 0
    assert capsys.readouterr().out.endswith("would cancel 3 jobs\n")
    assert slurm.calls("scancel") == []
    assert call(cancel.main, monkeypatch, run) == 0
    assert slurm.calls("scancel") == [["8_1", "20", "7_1"]]
    assert capsys.readouterr().out.splitlines() == [
        "run: stage 0, member 2 of 2 (job id 7_1)",
        "run: evaluation of stage 0 (job id 20)",
        "run: stage 1, member 2 of 2 (job id 8_1)",
        "cancelled 3 jobs",
    ]


def test_cancel_leaves_jobs_that_were_not_submitted_for_the_run(slurm, run, monkeypatch, capsys):
    """A jobs.json from elsewhere names any job; SLURM gives ids again."""
    me = pwd.getpwuid(os.getuid()).pw_name
    folder = Path.cwd().resolve()
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(
        squeue=f"7_1|RUNNING|n1|0|x||{me}|alma-stage0|{folder}/slurm_jobs/1/a.sh|\n"
        f"8_0|RUNNING|n1|0|x||{me}|alma-stage0|{folder}/other/slurm_jobs/1/a.sh|\n"
        f"8_1|RUNNING|n1|0|x||{me}|\x1b[2Jprecious|{folder}/slurm_jobs/1/a.sh|\n"
        f"20|RUNNING|n1|0|x||somebody|alma-stage0|{folder}/slurm_jobs/1/a.sh|\n"
    )
    assert call(cancel.main, monkeypatch, run) == 0
    assert slurm.calls("scancel") == [["7_1"]]
    _, done, *lines = capsys.readouterr().out.splitlines()
    assert done == "cancelled 1 jobs"
    assert {line.partition(": not")[0] for line in lines} == {
        f"left: job id 8_0 (alma-stage0 of {me})",
        f"left: job id 8_1 (\\x1b[2Jprecious of {me})",
        "left: job id 20 (alma-stage0 of somebody)",
    }


def test_cancel_leaves_what_jobs_of_other_runs_need(slurm, run, monkeypatch, capsys):
    """Also indirectly; an element of array 8 waits for that of array 7 with its own index."""
    finish(run, "untrained.json")
    slurm.has(
        squeue="7_0|RUNNING|n1|0|x||\n7_1|PENDING||0|x||\n"
        + "".join(f"8_{k}|PENDING||0|Dependency|aftercorr:7_*(unfulfilled)|\n" for k in (0, 1))
        + "99|PENDING||0|Dependency|afterok:8_0(unfulfilled),afterok:5(unfulfilled)|\n"
        + "98|FAILED||0|x|afterok:7_1(failed)|\n97|RUNNING||0|x||\n"
    )
    assert call(cancel.main, monkeypatch, run) == 0
    assert slurm.calls("scancel") == [["8_1", "7_1"]]
    *_, done, remaining, first, second, foreign = capsys.readouterr().out.splitlines()
    assert done == "cancelled 2 jobs"
    assert remaining.startswith("left are these")
    assert first == "  run: stage 0, member 1 of 2 (job id 7_0)"
    assert second == "  run: stage 1, member 1 of 2 (job id 8_0)"
    assert foreign == "  another job (job id 99)"


def test_jobs_that_need_a_job_that_is_gone_are_cancelled(slurm, run):
    """Unless it is one of a run that is not launched."""
    first, second = (f"stage_0{k}/trained.json" for k in (0, 1))
    of_source = f"../source/{first}"
    jobs = [entry("stage 0", first, "11", of_source), entry("stage 1", second, "12", first)]
    write(Path("sharing"), *jobs, entry("stage 2", "stage_02/trained.json", "13"))
    write(Path("source"), entry("stage 0", first, "10"))
    slurm.has(squeue="".join(f"{k}|PENDING||0|x|\n" for k in (11, 12, 13)))

    def queued(*runs: str) -> list[str | None]:
        return [job.job_id for job in in_queue(list(map(Path, runs)))]

    assert queued("sharing") == ["11", "12", "13"]
    assert slurm.calls("scancel") == []
    assert queued("sharing", "source") == ["13"]
    assert slurm.calls("scancel") == [["12", "11"]]
    finish(Path("source"), first)
    assert queued("sharing", "source") == ["11", "12", "13"]
    (Path("source") / first).unlink()
    slurm.has(squeue="".join(f"{k}|PENDING||0|x|\n" for k in (10, 11, 12, 13)))
    assert queued("sharing", "source") == ["11", "12", "13", "10"]


def test_real_slurm(cluster, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    script = "[ $SLURM_ARRAY_TASK_ID != 1 ] || { echo 'error: no room'; exit 1; }; sleep 600"
    array = cluster.submit(
        script, "--array=0-2", "--requeue", f"--output={tmp_path}/jobs/%A_%a.out", NAME
    )
    after = ("--kill-on-invalid-dep=yes", "--dependency")
    blocked = cluster.submit("true", NAME, *after, f"afterok:{array}_1")
    waiting = cluster.submit("true", NAME, *after, f"afterok:{array}_0")
    foreign = cluster.submit("sleep 600")
    jobs = [(f"member {k}", f"{array}_{k}") for k in range(3)]
    jobs += [
        ("blocked", blocked, "member 1"),
        ("waiting", waiting, "member 0"),
        ("gone", "999999999"),
    ]
    run = Path("run")
    done = "{}/trained.json".format
    write(run, *(entry(name, done(name), job, *map(done, needs)) for name, job, *needs in jobs))
    cluster.wait_for(f"{array}_1", "FAILED")
    cluster.wait_for(f"{array}_0", "RUNNING")
    cluster.wait_for(f"{array}_2", "RUNNING")
    cluster.run("scontrol", "requeue", f"{array}_2")
    cluster.wait_for(f"{array}_2", "PENDING")
    cluster.until(lambda: states(run)["member 2"] == "requeued")  # after COMPLETING
    seen = {status.job.name: status for status in queue.look([run])}
    assert {name: status.state for name, status in seen.items()} == {
        "member 0": "running",
        "member 1": "failed",
        "member 2": "requeued",
        "blocked": "cancelled",
        "waiting": "waiting",
        "gone": "lost",
    }
    assert seen["member 0"].node in cluster.nodes
    assert seen["member 1"].why == "no room"
    assert squeue.ask(["999999999"]) == {}  # squeue fails for a single unknown id
    assert call(cancel.main, monkeypatch, run) == 0
    assert capsys.readouterr().out.endswith("cancelled 3 jobs\n")
    assert queue.wait([run], 0.2)[0].state == "cancelled"
    assert set(cluster.states(f"{array}_0", f"{array}_2", waiting).values()) == {"CANCELLED"}
    assert cluster.state(foreign) in ("RUNNING", "PENDING")
    cluster.run("scancel", foreign)
