"""A launch in a job, or beside variables of SLURM, gives the jobs of a launch from a login
shell."""

import json
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from launcher import ROOT

from slurm.engine.resources import check_cluster
from slurm.engine.squeue import clean_environment

PROGRAM = """
import os, sys
from dataclasses import dataclass
from pathlib import Path
from alma.files import write_json_atomic
from slurm.engine import submission
from slurm.engine.jobs import Job
from slurm.engine.resources import Resources

@dataclass(frozen=True, kw_only=True)
class Show(Job):
    def work(self):
        write_json_atomic(self.marker, dict(os.environ))

out = Path(sys.argv[1])
out.mkdir()
same = {"run": out, "kind": "train", "directory": out}
jobs = [Show(name=f"{k}", array="alma-show", marker=out / f"{k}.json", **same) for k in range(2)]
jobs += [Show(name="2", array="alma-after", marker=out / "2.json", needs=(jobs[0].marker,), **same)]
wanted = Resources(partition="main", gpus_per_node=1, cpus_per_task=2, mem_gb=1, timeout_min=30)
submission.check(wanted)
submission.submit(jobs, wanted, submission.to_slurm(out / "logs"), ids := {})
write_json_atomic(out / "ids.json", list(ids.values()))
"""
OUTER = ("--partition=high", "--time=10", "--cpus-per-task=3", "--gres=gpu:2")
LAUNCHES = {
    "login": (),
    "salloc": ("salloc", *OUTER),
    "salloc --mem-per-cpu": ("salloc", *OUTER, "--mem-per-cpu=100"),
    "sbatch": ("sbatch", "--wait", *OUTER, "--mem=200"),
    "sbatch of an array --mem-per-cpu": (
        "sbatch",
        "--wait",
        *OUTER,
        "--mem-per-cpu=100",
        "--array=3",
    ),
    "srun": ("srun", *OUTER, "--mem=200", "--cpu-bind=none"),
    "srun --mem-per-cpu": ("srun", *OUTER, "--mem-per-cpu=100"),
}
"""The program that starts the launch."""
ASKED = (
    "Partition TimeLimit Requeue NumNodes NumCPUs NumTasks TRES MinMemoryNode Features QOS "
    "Account Nice"
)
ASKED += (
    " TresPerNode ArrayTaskThrottle JobName JobState KillOInInvalidDependent WCKey OverSubscribe"
)
OF_A_JOB = re.compile(r"_?SLURM|SBATCH|SRUN|SUBMITIT|CUDA|RANK|WORLD_SIZE|MASTER")


def launch(cluster, folder: Path, *before: str, **environment: str) -> list:
    """Launch three jobs; what each asked of SLURM, and the names of SLURM's variables in it."""
    folder.mkdir()
    program = folder / "program.py"
    out = folder / "out"
    program.write_text(PROGRAM)
    command = [*before, sys.executable, str(program), str(out)]
    if before[:1] == ("sbatch",):
        command = [
            *before,
            f"--output={folder}/log",
            f"--wrap={shlex.join(command[len(before) :])}",
        ]
    cluster.run(*command, **{"PYTHONPATH": str(ROOT), **environment})
    ids = json.loads((out / "ids.json").read_text())
    cluster.wait(ids)
    jobs = cluster.jobs()
    settings = []
    for job_id in ids:
        settings.append({name: jobs[job_id].get(name) for name in ASKED.split()})
    names = [
        sorted(filter(OF_A_JOB.match, json.loads((out / f"{k}.json").read_text())))
        for k in range(3)
    ]
    return [settings, names]


@pytest.fixture(scope="module")
def from_login(cluster, tmp_path_factory):
    return launch(cluster, tmp_path_factory.mktemp("login") / "x")


@pytest.mark.parametrize("way", list(LAUNCHES)[1:])
def test_a_launch_in_a_job(cluster, from_login, tmp_path, way):
    assert launch(cluster, tmp_path / "x", *LAUNCHES[way]) == from_login


def test_variables_of_slurm_and_of_processes_count_for_nothing(cluster, from_login, tmp_path):
    """Every SBATCH_ variable that sbatch knows, and some of others."""
    names = re.findall(rb"\bSBATCH_[A-Z_]+", Path(str(shutil.which("sbatch"))).read_bytes())
    assert len(names) > 40
    variables = {name.decode(): "high" if name == b"SBATCH_PARTITION" else "7" for name in names}
    variables |= {
        "SLURM_CPU_BIND": "no such",
        "SLURM_RESTART_COUNT": "3",
        "SRUN_CPUS_PER_TASK": "99",
    }
    variables |= {
        "SUBMITIT_PREEMPT_SIGNAL": "USR1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "5",
    }
    assert launch(cluster, tmp_path / "x", **variables) == from_login


def test_variables_are_hidden_only_from_programs_of_slurm(monkeypatch):
    hidden = (
        "SLURM_JOB_ID _SLURM_SPANK_OPTION_x SLURMD_NODENAME SRUN_DEBUG SCANCEL_STATE LOCAL_RANK"
    )
    names = "SLURM_CONF SLURM_CONF_SERVER SLURM_JWT PYTHONPATH MY_RANK OMP_NUM_THREADS"
    for name in (hidden + " " + names).split():
        monkeypatch.setenv(name, "x")
    before = dict(os.environ)
    with clean_environment():
        assert not os.environ.keys() & set(hidden.split())
        assert os.environ.keys() >= set(names.split())
    assert dict(os.environ) == before


def test_ignored_variables_are_printed(slurm, monkeypatch, capsys):
    monkeypatch.setenv("SBATCH_ACCOUNT", "nlp")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")
    slurm.has(sbatch="")
    check_cluster(Namespace(cluster="local"))
    assert capsys.readouterr().err == ""
    check_cluster(Namespace(cluster="slurm"))
    line = "ignored: SBATCH_ACCOUNT, SBATCH_TIMELIMIT: give --partition or --sbatch KEY=VALUE\n"
    assert capsys.readouterr().err == line
