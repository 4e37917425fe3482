"""Edges of jobs and clusters: signals at both ends of a job, limits, paths, a damaged record."""

import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from random import Random

import pytest
from launcher import ROOT
from stand_ins import finish_all, later

from alma.errors import UserError
from alma.options import options_of
from slurm.engine import queue, resources, submission
from slurm.engine.jobs import ENDING_SIGNALS, shielded
from slurm.engine.partitions import longest_limit, most_gpus, nodes_of
from slurm.engine.resources import Resources

JOB = """
import atexit, sys, time
from pathlib import Path
from slurm.engine.jobs import Job

class Short(Job):
    def work(self):
        pass

atexit.register(time.sleep, 0.5)
here = Path(".")
Short(run=here, name="x", kind="train", array="x", directory=here, marker=here / "m")()
print("ended", flush=True)
"""


def exit_code(name: str, seconds: float, at_end: bool) -> int:
    """Of a short job that gets a signal `seconds` after its start, or after its end."""
    words = [*shlex.split(shielded(shlex.quote(sys.executable))), "-c", JOB]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        if at_end:
            process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.Signals[f"SIG{name}"])
        return process.wait(60)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ENDING_SIGNALS)
def test_a_signal_at_the_edge_of_a_job_does_not_end_it(name, at_end):
    seconds = 0.1 if at_end else 0.3
    assert exit_code(name, seconds, at_end) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("at_end", [False, True])
def test_fifty_signals_at_an_edge(at_end):
    rng = Random(0)
    for _ in range(50):
        name = rng.choice(["TERM", "USR1"])
        moment = rng.uniform(0, 0.4) if at_end else rng.uniform(0.03, 1)
        assert exit_code(name, moment, at_end) == 0


SINFO = """main*|1-00:00:00|gpu:a100:2(S:0-1),scratch:9|a100
main*|1-00:00:00|gpu:v100:4|v100,big
"""


def options(**chosen: object) -> Namespace:
    return Namespace(**{"cluster": "slurm", **dict.fromkeys(options_of(Resources)), **chosen})


def test_defaults_fit_the_partition(slurm, capsys):
    slurm.has(sinfo=SINFO.replace("1-00:00:00", "2:00:00"))
    read = resources.read(options())
    assert (read.timeout_min, read.gpus_per_node) == (120, 4)
    assert "--timeout-min 120: the time limit of partition main" in capsys.readouterr().err
    assert resources.read(options(sbatch=["constraint=a100"])).gpus_per_node == 2
    assert resources.read(options(sbatch=["gres=gpu:a100"])).gpus_per_node == 2
    assert resources.read(options(gpus_per_node=1)).gpus_per_node == 1
    assert resources.read(options(), Resources(gpus_per_node=0)).gpus_per_node == 0


def test_a_longer_request_than_the_partition_allows_is_refused(slurm):
    slurm.has(sinfo=SINFO)
    problem = "--timeout-min 1441: the time limit of partition main is 1440 minutes: give at most"
    with pytest.raises(UserError, match=problem):
        resources.read(options(timeout_min=1441))
    assert resources.read(options(timeout_min=1440)).timeout_min == 1440
    assert resources.read(options(timeout_min=1441, sbatch=["qos=long"])).timeout_min == 1441


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("infinite", None), ("30:00", 30), ("1:00:00", 60), ("2-01:00:00", 2940), ("n/a", None)],
)
def test_limits_of_sinfo(slurm, limit, minutes):
    slurm.has(sinfo=f"main*|{limit}|(null)|(null)\n")
    nodes = nodes_of(None)
    assert longest_limit(nodes) == minutes
    assert most_gpus(nodes) == 0


@pytest.mark.parametrize("name", ["a%j", "50%", "a\\b"])
def test_paths_that_slurm_reads_as_patterns_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="in the path of a log as a pattern: give --out"):
        submission.log_folder(tmp_path / name)


def test_nodes_that_no_partition_has_are_refused(slurm):
    reason = "sbatch: error: Requested node configuration is not available"
    slurm.fails(sbatch=f"allocation failure: {reason}")
    slurm.has(sinfo="state idle\nstate drain\n")
    submission.check(Resources())
    slurm.has(sinfo="state idle\nstate alloc\n")
    with pytest.raises(UserError, match="sbatch would refuse the training"):
        submission.check(Resources())
    slurm.fails(sbatch="allocation failure: Required node not available (down, drained)")
    submission.check(Resources())


def test_a_damaged_record_is_written_anew_unless_jobs_are_queued(slurm, run):
    (run / queue.JOBS).write_text("{")
    assert submission.in_queue([run]) == []
    script = Path(run, queue.LOGS, "20260101-000000", "x.sh").resolve()
    user = pwd.getpwuid(os.getuid()).pw_name
    slurm.has(squeue=f"5|RUNNING|n1|0|None||{user}|alma-stage|{script}\n")
    assert [job.job_id for job in queue.live_jobs([run])] == ["5"]
    with pytest.raises(UserError, match=r"in the queue \(5\): .* cancel them with: alma cancel"):
        submission.in_queue([run])


def test_waiting_survives_a_squeue_that_fails_at_first(slurm, run):
    slurm.fails(squeue="down")
    looks = queue.watch([run], 0.01, patient=True)
    with later(lambda: (finish_all(run), slurm.has(squeue=""))):
        assert all(status.state == "done" for status in next(looks))
