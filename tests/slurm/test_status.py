"""`slurm.status` and `slurm.cancel` over programs that stand for SLURM's, and once over a real SLURM."""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher import call, make

from alma.errors import UserError
from alma.files import locked
from alma.records import Run
from slurm import cancel, status
from slurm.engine import queue

STUB = """#!/bin/sh
f="{folder}/${{0##*/}}"
echo "${{0##*/}} $*" >> {folder}/calls
if [ -e "$f.err" ]; then /bin/cat "$f.err" >&2; exit 1; fi
/bin/cat "$f.out"
"""
INNER = '2026-11-21 08:22:25 | INFO | train_inner | {"ppl": "%s", "ups": "%s", "num_updates": "%s"}\n'
VALID = '2026-11-21 08:22:40 | INFO | valid | {"epoch": 1, "valid_ppl": "483", "valid_num_updates": "80"}\n'


@dataclass
class Slurm:
    """Programs on PATH that print what they are told to and keep their command lines."""

    folder: Path

    def has(self, **programs: str) -> None:
        """What each program prints; the jobs of squeue are `job|state|node|restarts|reason|`."""
        for name, text in programs.items():
            self.put(f"{name}.out", text)
            (self.folder / f"{name}.err").unlink(missing_ok=True)
            if not (self.folder / name).exists():
                self.put(name, STUB.format(folder=self.folder))

    def fails(self, **programs: str) -> None:
        """What each says on stderr before it exits with 1."""
        self.has(**dict.fromkeys(programs, ""))
        for name, text in programs.items():
            self.put(f"{name}.err", text + "\n")

    def put(self, name: str, text: str) -> None:
        """A file that is never seen half written: programs are running."""
        temporary = self.folder / f"{name}.new"
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(self.folder / name)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1:] for line in lines if line.split()[0] == name]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    made = Slurm(tmp_path / "bin")
    made.folder.mkdir()
    made.has(squeue="", scancel="")
    monkeypatch.setenv("PATH", str(made.folder))  # neither sacct nor a real SLURM
    return made


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Two members, two stages: untrained, stages 0 (array 7) and 1 (array 8), evaluations 20 and 21."""
    monkeypatch.chdir(tmp_path)
    units = [unit("untrained", None, ".", "untrained.json", "5", [])]
    for stage in (0, 1):
        for member in (0, 1):
            directory = f"stage_0{stage}/member_{member}"
            name = f"stage {stage}, member {member + 1} of 2"
            needs = [member + 1] if stage else []
            units.append(
                unit(name, stage, directory, f"{directory}/trained.json", f"{7 + stage}_{member}", needs)
            )
        directory = f"stage_0{stage}"
        marker, needs = f"{directory}/result.json", [len(units) - 2, len(units) - 1]
        units.append(unit(f"evaluation of stage {stage}", stage, directory, marker, str(20 + stage), needs))
    write(Path("run"), units)
    return Path("run")


def unit(
    name: str, stage: int | None, directory: str, marker: str, job: str | None, needs: list[int]
) -> dict:
    kind = "untrained" if stage is None else "evaluate" if name.startswith("eval") else "train"
    log = job and f"{os.getcwd()}/jobs/{job}.out"
    updates = 400 if kind == "train" else None
    return {
        "name": name,
        "kind": kind,
        "stage": stage,
        "directory": directory,
        "marker": marker,
        "updates": updates,
        "job": job,
        "log": log,
        "needs": needs,
    }


def write(run: Path, units: list[dict]) -> None:
    Path("jobs").mkdir(exist_ok=True)
    for each in units:
        (run / each["directory"]).mkdir(parents=True, exist_ok=True)
    (run / "jobs.json").write_text(json.dumps({"version": 1, "units": units}))


def finish(run: Path, *markers: str) -> None:
    for marker in markers:
        (run / marker).write_text('{"perplexity": 118.574}')


def finish_all(run: Path) -> None:
    finish(run, *(str(unit.marker.relative_to(run)) for unit in queue.read_units(run)))


def states(run: Path) -> dict[str, str]:
    return {each.unit.name: each.state for each in queue.look([run])}


def test_states_of_a_chain_on_its_way(slurm, run):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(
        squeue="7_1|RUNNING|n3|0|None|\n8_0|PENDING||0|Priority|\n8_1|PENDING||0|Dependency|\n"
        "20|PENDING||0|Dependency|\n21|PENDING||0|Dependency|\n999|FAILED|n1|0|None|\n"
    )
    seen = {each.unit.name: each for each in queue.look([run])}
    assert {name: each.state for name, each in seen.items()} == {
        "untrained": "done",
        "stage 0, member 1 of 2": "done",
        "stage 0, member 2 of 2": "running",
        "evaluation of stage 0": "waiting",
        "stage 1, member 1 of 2": "queued",
        "stage 1, member 2 of 2": "waiting",
        "evaluation of stage 1": "waiting",
    }
    assert seen["stage 0, member 2 of 2"].node == "n3"
    assert seen["stage 1, member 1 of 2"].why == "Priority"
    assert seen["evaluation of stage 0"].why == "needs stage 0, member 2 of 2"


def test_slurm_is_asked_once_for_all_runs_and_an_array_once(slurm, run, tmp_path):
    write(tmp_path / "other", [unit("stage 0", 0, "stage_00", "stage_00/trained.json", "7_2", [])])
    finish(run, "untrained.json")
    slurm.has(squeue="".join(f"{job}|RUNNING|n1|0|None|\n" for job in "7_0 7_1 7_2 20 8_0 8_1 21".split()))
    queue.look([run, tmp_path / "other"])
    (asked,) = slurm.calls("squeue")
    assert asked[asked.index("-j") + 1] == "7,20,8,21"
    assert slurm.calls("sacct") == []


def test_nobody_is_asked_when_all_is_done(slurm, run):
    finish_all(run)
    assert set(states(run).values()) == {"done"}
    assert slurm.calls("squeue") == []


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", "queued"),
        ("REQUEUE_HOLD", "queued"),
        ("CONFIGURING", "running"),
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("CANCELLED", "cancelled"),
        ("COMPLETED", "failed"),
        ("FAILED", "failed"),
        ("TIMEOUT", "failed"),
        ("NODE_FAIL", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("PREEMPTED", "failed"),
    ],
)
def test_states_of_slurm(slurm, run, word, state):
    slurm.has(squeue=f"5|{word}|n1|0|None|\n")
    assert states(run)["untrained"] == state


def test_a_job_that_ran_before_is_requeued(slurm, run):
    slurm.has(squeue="7_0|PENDING||1|BeginTime|\n7_1|PENDING||0|Resources|\n")
    seen = states(run)
    assert (seen["stage 0, member 1 of 2"], seen["stage 0, member 2 of 2"]) == ("requeued", "queued")


def test_a_marker_written_while_slurm_is_asked_counts(slurm, run):
    finish_all(run)
    (run / "untrained.json").unlink()
    slurm.has(squeue="5|COMPLETED|n1|0|None|\n")
    with (slurm.folder / "squeue").open("a") as file:
        file.write(f"echo '{{}}' > {run.resolve()}/untrained.json\n")
    assert states(run)["untrained"] == "done"


def test_what_needs_a_failed_unit_is_cancelled_and_says_so(slurm, run):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(squeue="7_1|FAILED|n1|0|NonZeroExitCode|\n8_0|RUNNING|n2|0|None|\n8_1|PENDING||0|Dependency|\n")
    seen = {each.unit.name: each for each in queue.look([run])}
    assert seen["stage 0, member 2 of 2"].state == "failed"
    assert seen["stage 1, member 1 of 2"].state == "running"
    for name in ("evaluation of stage 0", "stage 1, member 2 of 2", "evaluation of stage 1"):
        assert seen[name].state == "cancelled"
        assert seen[name].why == "needs stage 0, member 2 of 2, which failed"


def test_what_failed_comes_before_what_was_cancelled(slurm, run):
    finish(run, "untrained.json")
    slurm.has(squeue="7_0|CANCELLED||0|x|\n7_1|FAILED|n1|0|x|\n")
    assert queue.look([run])[3].why == "needs stage 0, member 2 of 2, which failed"


def test_answers_are_of_the_jobs_asked_for(slurm):
    slurm.has(squeue="7_0|PENDING||0|x|\n7_1|PENDING||0|x|\n", sacct="7_1|FAILED|\n8_[0-2]|CANCELLED|\n")
    assert queue.ask(["7_0", "8_2"]).keys() == {"7_0", "8_2"}


def test_unknown_jobs_are_lost(slurm, run):
    finish(run, "untrained.json")
    slurm.fails(squeue="slurm_load_jobs error: Invalid job id specified")
    seen = {each.unit.name: each for each in queue.look([run])}
    assert seen["stage 0, member 1 of 2"].state == "lost"
    assert "not known to SLURM" in seen["stage 0, member 1 of 2"].why
    assert seen["evaluation of stage 1"].why == "needs stage 0, member 1 of 2, which is lost"


def test_accounting_tells_of_what_slurmctld_has_forgotten(slurm, run):
    slurm.has(
        squeue="20|PENDING||0|Dependency|\n",
        sacct="5|RUNNING|n1\n7_0|FAILED|n1\n7_1|TIMEOUT|n2\n8_[0-1%2]|CANCELLED by 0|None assigned\nx\n",
    )
    seen = {each.unit.job: each for each in queue.look([run])}
    assert seen["5"].state == "lost"  # accounting has missed its end
    assert (seen["7_0"].state, seen["7_1"].state) == ("failed", "failed")
    assert seen["7_1"].why == "SLURM says TIMEOUT"
    assert {seen["8_0"].state, seen["8_1"].state} == {"cancelled"}
    (asked,) = slurm.calls("sacct")
    assert asked[asked.index("-j") + 1] == "5,7,8,21"  # 20 is known


def test_sacct_that_fails_is_as_none(slurm, run):
    slurm.has(squeue="5|RUNNING|n1|0|None|\n")
    slurm.fails(sacct="Slurm accounting storage is disabled")
    assert states(run)["untrained"] == "running"
    assert states(run)["stage 0, member 1 of 2"] == "lost"


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("7", ["7"]),
        ("7_3", ["7_3"]),
        ("7_[1-3,9%2]", ["7_1", "7_2", "7_3", "7_9"]),
        ("7_[0-4:2]", ["7_0", "7_2", "7_4"]),
    ],
)
def test_elements_that_never_ran(name, elements):
    assert queue._elements(name) == elements


def test_settings_of_the_user_do_not_filter_the_answer(slurm, run, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    slurm.has(squeue="")
    with (slurm.folder / "squeue").open("a") as file:
        file.write('echo "5|RUNNING|n1${SQUEUE_PARTITION}|0|None|"\n')
    assert queue.look([run])[0].node == "n1"


def test_errors_in_logs(slurm, run):
    slurm.has(squeue="5|FAILED|n1|0|x|\n7_0|FAILED|n1|0|x|\n7_1|COMPLETED|n1|0|x|\n")
    Path("jobs/5.out").write_text(
        "error: stage 0: no room\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    (run / "untrained.log").write_text("RuntimeError: mended long ago\n")
    (run / "stage_00/member_0/train.log").write_text("RuntimeError: CUDA error\n")
    untrained, first, second, *_ = queue.look([run])
    assert (untrained.why, untrained.log) == ("stage 0: no room", Path("jobs/5.out").resolve())
    assert (first.why, first.log) == ("RuntimeError: CUDA error", run / "stage_00/member_0/train.log")
    assert second.why == "its job ended without trained.json"
    assert "failed: RuntimeError: CUDA error; log: run/stage_00/member_0/train.log" in str(first)


def test_table(slurm, run, monkeypatch, capsys):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    (run / "stage_00/member_0/train.log").write_text(INNER % (50, 2, 400) + VALID)
    (run / "stage_00/member_1/train.log").write_text(INNER % (60, 2, 100) + INNER % (55.5, 4, 120) + "| {\n")
    slurm.has(
        squeue="7_1|RUNNING|n3|0|None|\n8_0|FAILED|n1|0|x|\n20|PENDING||0|x|\n8_1|PENDING||0|x|\n21|PENDING||0|x|\n"
    )
    Path("jobs/8_0.out").write_text("error: boom\n")
    assert call(status.main, monkeypatch, run) == 1
    header, *lines, total = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "unit", "state", "job", "node", "updates", "perplexity", "ETA", "log"]
    words = {" ".join(line.split()) for line in lines}
    assert words == {
        "run untrained done 5 118.57 run/untrained.log",
        "run stage 0, member 1 of 2 done 7_0 400/400 valid 483.00 run/stage_00/member_0/train.log",
        "run stage 0, member 2 of 2 running 7_1 n3 120/400 train 55.50 01:10 run/stage_00/member_1/train.log",
        "run evaluation of stage 0 waiting 20 needs stage 0, member 2 of 2",
        "run stage 1, member 1 of 2 failed 8_0 n1 jobs/8_0.out: boom",
        "run stage 1, member 2 of 2 waiting 8_1 needs stage 0, member 2 of 2",
        "run evaluation of stage 1 cancelled 21 needs stage 1, member 1 of 2, which failed",
    }
    assert total == "2 done, 1 running, 2 waiting, 1 failed, 1 cancelled"


def test_exit_code_0_when_done(slurm, run, monkeypatch, capsys):
    finish_all(run)
    assert call(status.main, monkeypatch, ".") == 0  # a folder that holds runs
    assert "7 done" in capsys.readouterr().out


def test_units_that_were_complete_at_launch_have_no_job(slurm, run, monkeypatch, capsys):
    write(run, [unit("untrained", None, ".", "untrained.json", None, [])])
    assert states(run) == {"untrained": "never submitted"}
    finish(run, "untrained.json")
    assert call(status.main, monkeypatch, run) == 0
    assert slurm.calls("squeue") == []


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "units": [{"name": "untrained"}]}',
        '{"version": 2, "units": []}',
    ],
)
def test_damaged_jobs_file(slurm, run, monkeypatch, capsys, content):
    (run / "jobs.json").write_text(content)
    assert call(status.main, monkeypatch, run) == 2
    assert capsys.readouterr().err.startswith("error: run/jobs.json")


def test_units_come_after_what_they_need(slurm, run):
    write(run, [unit("untrained", None, ".", "untrained.json", "1", [0])])
    with pytest.raises(UserError, match="run/jobs.json is damaged"):
        queue.read_units(run)


def test_no_slurm_here(slurm, run, monkeypatch, capsys):
    (slurm.folder / "squeue").unlink()
    assert call(status.main, monkeypatch, run) == 2
    assert capsys.readouterr().err == "error: no SLURM here (no squeue): ask on a machine of the cluster\n"


def test_slurm_that_does_not_answer(slurm, run, monkeypatch, capsys):
    slurm.fails(squeue="slurm_load_jobs error: Unable to contact slurm controller")
    assert call(status.main, monkeypatch, run) == 2
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_first_look_that_fails_ends_watch(slurm, run, monkeypatch):
    slurm.fails(squeue="Unable to contact slurm controller")
    monkeypatch.setattr(queue, "time", None)  # no second one
    with pytest.raises(UserError, match="Unable to contact"):
        next(queue.watch([run], 0.01))


def test_what_could_not_be_submitted_was_never_submitted(slurm, run, monkeypatch, capsys):
    """sbatch refused the second stage: what was sent before goes on, and nothing is lost."""
    units = json.loads((run / "jobs.json").read_text())["units"]
    write(run, [each | ({"job": None, "log": None} if each["stage"] == 1 else {}) for each in units])
    finish(run, "untrained.json")
    slurm.has(squeue="7_0|RUNNING|n1|0|None|\n7_1|RUNNING|n1|0|None|\n20|PENDING||0|Dependency|\n")
    assert call(status.main, monkeypatch, run) == 1
    total = capsys.readouterr().out.splitlines()[-1]
    assert total == "1 done, 2 running, 1 waiting, 3 never submitted"


def test_the_log_of_units_of_data_prep_is_that_of_their_job(slurm, run, monkeypatch, capsys):
    each = unit("scan 0", 0, ".", "share-scan-00000.json", "7_0", []) | {"kind": "data_prep"}
    write(run, [each])
    slurm.has(squeue="7_0|RUNNING|n1|0|None|\n")
    call(status.main, monkeypatch, run)
    assert capsys.readouterr().out.splitlines()[1].endswith("  jobs/7_0.out")


@pytest.fixture
def local(slurm, tmp_path, monkeypatch) -> Run:
    """A run of 4 stages, with the row of the untrained model."""
    monkeypatch.chdir(tmp_path)
    config = {"learner": "sm", "megabatches": 4, "waiting_time": 1, "replay": False, "seed": 0}
    made = Run.open("local", config)
    made.append(ROW)
    (made.directory / "untrained.json").touch()
    (made.directory / "untrained.log").touch()
    return made


ROW = {"t": 0, "stage": None, "trained_on": [], "metric": "perplexity", "value": 9.5, "parameters": 1}
ROW |= {"train_flops": 0, "eval_flops_per_example": 0, "seconds": 0, "peak_memory_bytes": 0, "extra": {}}


def local_state(monkeypatch, capsys, code: int) -> str:
    """The line of the local run, blanks as one."""
    assert call(status.main, monkeypatch, "local") == code
    _, line, _ = capsys.readouterr().out.splitlines()
    return " ".join(line.split())


def train(run: Run, stage: int, text: str, *markers: str) -> None:
    folder = run.directory / f"stage_{stage:02d}"
    folder.mkdir(exist_ok=True)
    (folder / "train.log").write_text(text)
    for marker in markers:
        (folder / marker).touch()


def test_a_local_run_at_work_is_running(local, monkeypatch, capsys):
    train(local, 0, "\n$ fairseq-train\nRuntimeError: of a worker, caught\n")
    with locked(local.directory):
        line = local_state(monkeypatch, capsys, 0)
    assert line.startswith("local mega-batch 0 of 4 running 9.50 local/stage_00/train.log: pid ")


def test_a_local_run_whose_stages_are_complete_is_done(local, monkeypatch, capsys):
    local.note(stages=2)
    train(local, 0, "", "trained.json", "result.json")
    local.append(ROW | {"t": 1, "stage": 0, "trained_on": [1]})
    assert " stopped " in local_state(monkeypatch, capsys, 1)  # killed between two stages
    local.append(ROW | {"t": 2, "stage": 1, "trained_on": [2]})
    assert local_state(monkeypatch, capsys, 0) == "local mega-batch 2 of 4 done 9.50 2 of 4 stages asked for"
    for t in (3, 4):
        local.append(ROW | {"t": t, "stage": t - 1, "trained_on": [t]})
    assert local_state(monkeypatch, capsys, 0) == "local mega-batch 4 of 4 done 9.50"
    assert call(cancel.main, monkeypatch, "local") == 2
    assert "not launched on a cluster" in capsys.readouterr().err


def test_a_local_run_that_failed_says_why(local, monkeypatch, capsys):
    train(local, 0, "\n$ fairseq-train\nRuntimeError: CUDA error: out of luck\n")
    line = local_state(monkeypatch, capsys, 1)
    assert line.endswith(" failed 9.50 local/stage_00/train.log: RuntimeError: CUDA error: out of luck")
    train(local, 0, "\n$ fairseq-train\nRuntimeError: of an earlier start\n\n$ fairseq-train\n")
    assert " stopped " in local_state(monkeypatch, capsys, 1)


def test_watch_goes_on_while_a_local_run_is_at_work(local, monkeypatch, capsys):
    with locked(local.directory):
        looks = status._looks([], [local.directory], 0.01)
        assert next(looks)[0].state == next(looks)[0].state == "running"
    assert [seen[0].state for seen in looks] == ["stopped"]


def test_the_command_itself_leaves_such_runs(tmp_path, monkeypatch, capsys):
    """`--stages 1`, an error, a kill: as the launcher leaves them."""
    monkeypatch.chdir(tmp_path)
    asked, failed, ended, killed = (make(tmp_path / name) for name in ("asked", "failed", "ended", "killed"))
    asked.run("--stages", "1")
    failed.environment["FAKE_CRASH"] = "1:1:python"
    failed.run(code=1)
    ended.environment["FAKE_CRASH"] = "1:1:kill"  # as the kernel does where memory is short
    ended.run(code=1)
    killed.environment["FAKE_SLEEP"] = "60"
    process = killed.start()
    deadline = time.monotonic() + 60
    while not killed.pids.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert call(status.main, monkeypatch, "killed") == 0
    assert " running " in capsys.readouterr().out
    process.kill()
    process.communicate()
    assert call(status.main, monkeypatch, "asked/run", "failed/run", "ended/run", "killed/run") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("1 of 4 stages asked for")
    assert " failed " in lines[2]
    assert lines[2].endswith("stage_01/train.log: RuntimeError: CUDA error: out of luck")
    assert " failed " in lines[3]
    assert "signal 9 (Killed)" in lines[3]
    assert " stopped " in lines[4]
    assert lines[5] == "1 done, 2 failed, 1 stopped"


def test_watch_ends_when_all_is_done(slurm, run, monkeypatch, capsys):
    slurm.has(squeue="".join(f"{job}|RUNNING|n1|0|None|\n" for job in "5 7_0 7_1 20 8_0 8_1 21".split()))
    timer = threading.Timer(0.3, finish_all, [run])
    timer.start()
    assert call(status.main, monkeypatch, "--watch", "0.1", run) == 0
    timer.join()
    out = capsys.readouterr().out
    assert out.count("7 running") == 1  # again only what has changed
    assert out.rstrip().endswith("7 done")


def test_watch_ends_when_nothing_moves(slurm, run, monkeypatch, capsys):
    slurm.has(squeue="5|NODE_FAIL|n1|0|x|\n7_0|FAILED|n1|0|x|\n")
    monkeypatch.setattr(status, "SECONDS", 0.1)
    assert call(status.main, monkeypatch, "--watch", run) == 1
    assert len(slurm.calls("squeue")) == 2  # what looks failed may be about to be requeued


def test_watch_goes_on_when_slurm_falls_silent(slurm, run, capsys):
    slurm.has(squeue="".join(f"{job}|RUNNING|n1|0|None|\n" for job in "5 7_0 7_1 20 8_0 8_1 21".split()))
    looks = queue.watch([run], 0.01)
    next(looks)
    slurm.fails(squeue="Socket timed out")
    timer = threading.Timer(0.3, finish_all, [run])
    timer.start()
    assert {each.state for each in next(looks)} == {"done"}
    timer.join()
    assert capsys.readouterr().err.count("Socket timed out; asking again") == 1


def test_ctrl_c_ends_watch(slurm, run, monkeypatch, capsys):
    slurm.has(squeue="5|RUNNING|n1|0|None|\n7_0|FAILED|n1|0|x|\n")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "time", SimpleNamespace(sleep=interrupt))  # subprocess sleeps, too
    assert call(status.main, monkeypatch, run, "--watch") == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--watch", "0", "run"], ["--watch", "nan", "run"], [], ["--watch"], ["absent"]]
)
def test_wrong_command_lines(slurm, run, monkeypatch, capsys, words):
    assert call(status.main, monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_wait_says_what_changes_and_returns_what_failed(slurm, run, capsys):
    slurm.has(squeue="".join(f"{job}|RUNNING|n1|0|None|\n" for job in "5 7_0 7_1".split()))

    def end():
        finish(run, "untrained.json", "stage_00/member_0/trained.json")
        slurm.has(squeue="7_1|OUT_OF_MEMORY|n1|0|x|\n8_0|CANCELLED||0|x|\n")

    timer = threading.Timer(0.4, end)
    timer.start()
    failed = queue.wait([run], 0.1)
    timer.join()
    assert {each.unit.job: each.state for each in failed} == {
        "7_1": "failed",
        "20": "cancelled",
        "8_0": "cancelled",
        "8_1": "cancelled",
        "21": "cancelled",
    }
    said = capsys.readouterr().err
    assert "run: untrained (job 5) done" in said
    assert "run: stage 0, member 2 of 2 (job 7_1) failed: SLURM says OUT_OF_MEMORY; log: " in said


def test_cancel_takes_what_is_not_done_and_nothing_else(slurm, run, monkeypatch, capsys):
    finish(run, "untrained.json", "stage_00/member_0/trained.json")
    slurm.has(
        squeue="5|COMPLETING|n1|0|x|\n7_0|COMPLETED|n1|0|x|\n7_1|RUNNING|n1|0|x|\n7_2|RUNNING|n1|0|x|\n"
        "8_0|FAILED|n1|0|x|\n8_1|PENDING||0|x|\n20|PENDING||0|x|\n"
    )
    assert call(cancel.main, monkeypatch, run, "--dry-run") == 0
    assert capsys.readouterr().out.endswith("would cancel 3 units\n")
    assert slurm.calls("scancel") == []
    assert call(cancel.main, monkeypatch, run) == 0
    assert slurm.calls("scancel") == [["8_1", "20", "7_1"]]
    assert capsys.readouterr().out.splitlines() == [
        "run: stage 0, member 2 of 2 (job 7_1)",
        "run: evaluation of stage 0 (job 20)",
        "run: stage 1, member 2 of 2 (job 8_1)",
        "cancelled 3 units",
    ]


def test_nothing_left_to_cancel(slurm, run, monkeypatch, capsys):
    assert call(cancel.main, monkeypatch, run) == 0
    assert capsys.readouterr().out == "nothing to cancel\n"
    assert slurm.calls("scancel") == []


def test_scancel_that_is_refused(slurm, run, monkeypatch, capsys):
    slurm.has(squeue="5|RUNNING|n1|0|x|\n")
    slurm.fails(scancel="scancel: error: Kill job error on job id 5: Access/permission denied")
    assert call(cancel.main, monkeypatch, run) == 2
    captured = capsys.readouterr()
    assert "permission denied" in captured.err
    assert "cancelled" not in captured.out


def test_real_slurm(cluster, tmp_path, monkeypatch, capsys):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    script = "[ $SLURM_ARRAY_TASK_ID != 1 ] || { echo 'error: no room'; exit 1; }; sleep 600"
    array = cluster.submit(script, "--array=0-2", "--requeue", f"--output={tmp_path}/jobs/%A_%a.out")
    after = ("--kill-on-invalid-dep=yes", "--dependency")
    blocked = cluster.submit("true", *after, f"afterok:{array}_1")
    waiting = cluster.submit("true", *after, f"afterok:{array}_0")
    other = cluster.submit("sleep 600")
    members = [
        unit(
            f"member {k}", 0, f"stage_00/member_{k}", f"stage_00/member_{k}/trained.json", f"{array}_{k}", []
        )
        for k in range(3)
    ]
    ends = [
        unit("blocked", 1, "stage_01", "stage_01/trained.json", blocked, [1]),
        unit("waiting", 2, "stage_02", "stage_02/trained.json", waiting, [0]),
        unit("gone", 3, "stage_03", "stage_03/trained.json", "999999999", []),
    ]
    run = Path("run")
    write(run, members + ends)
    cluster.wait_for(f"{array}_1", "FAILED")
    cluster.wait_for(f"{array}_0", "RUNNING")
    cluster.wait_for(f"{array}_2", "RUNNING")
    cluster.run("scontrol", "requeue", f"{array}_2")
    cluster.wait_for(f"{array}_2", "PENDING")
    cluster.until(lambda: states(run)["member 2"] == "requeued")  # SLURM says COMPLETING for a while
    seen = {each.unit.name: each for each in queue.look([run])}
    assert {name: each.state for name, each in seen.items()} == {
        "member 0": "running",
        "member 1": "failed",
        "member 2": "requeued",
        "blocked": "cancelled",
        "waiting": "waiting",
        "gone": "lost",
    }
    assert seen["member 0"].node in cluster.nodes
    assert seen["member 1"].why == "no room"
    assert queue.ask(["999999999"]) == {}  # of an unknown id alone squeue fails
    assert call(cancel.main, monkeypatch, run) == 0
    assert capsys.readouterr().out.endswith("cancelled 3 units\n")
    assert queue.wait([run], 0.2)[0].state == "cancelled"
    assert set(cluster.states(f"{array}_0", f"{array}_2", waiting).values()) == {"CANCELLED"}
    assert cluster.state(other) in ("RUNNING", "PENDING")
    cluster.run("scancel", other)
