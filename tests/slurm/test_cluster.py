"""The private cluster of the tests is a real SLURM: arrays, dependencies, GPUs, requeues, preemption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

NODE = "--gpus-per-node=8"
ROOT = Path(__file__).parent.parent.parent


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_throttled_array_runs_so_many_at_a_time(cluster, tmp_path):
    # each element says, after a while, how many are running
    script = f"touch {tmp_path}/$SLURM_ARRAY_TASK_ID; sleep 0.4; ls {tmp_path} | wc -l >>{tmp_path}.seen; "
    job = cluster.submit(script + f"rm {tmp_path}/$SLURM_ARRAY_TASK_ID", "--array=0-4%2")
    assert cluster.wait([job]) == {f"{job}_{index}": "COMPLETED" for index in range(5)}
    assert max(map(int, lines(tmp_path.with_name(tmp_path.name + ".seen")))) == 2


def test_children_wait_for_their_parents_and_go_with_them(cluster, tmp_path):
    script = f"echo $SLURM_ARRAY_TASK_ID >>{tmp_path}/log; "
    invalid = "--kill-on-invalid-dep=yes"
    parent = cluster.submit(script + "[ $SLURM_ARRAY_TASK_ID = 0 ] || { sleep 1.5; false; }", "--array=0-1")
    children = [
        cluster.submit(
            script, "--array=0-1", f"--dependency=aftercorr:{parent}", "--kill-on-invalid-dep=yes"
        ),
        cluster.submit(script, f"--dependency=afterok:{parent}", invalid),
    ]
    cluster.until(lambda: len(lines(tmp_path / "log")) == 3)  # element 0 of the child has not waited for 1
    assert cluster.state(f"{parent}_1") == "RUNNING"
    assert cluster.wait([parent, *children]) == {
        f"{parent}_0": "COMPLETED",
        f"{parent}_1": "FAILED",
        f"{children[0]}_0": "COMPLETED",
        f"{children[0]}_1": "CANCELLED",
        children[1]: "CANCELLED",
    }
    assert sorted(lines(tmp_path / "log")) == ["0", "0", "1"]


def test_the_gpus_of_a_node_are_given_out_one_by_one(cluster, tmp_path):
    script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES\n"
    script += f"until [ $(ls {tmp_path} | wc -l) = 2 ]; do sleep 0.1; done"  # both at a time
    node = f"--nodelist={cluster.nodes[0]}"
    jobs = [
        cluster.submit(script, f"--gpus-per-node={gpus}", node, f"--output={tmp_path}/%j") for gpus in (5, 3)
    ]
    assert set(cluster.wait(jobs).values()) == {"COMPLETED"}
    outputs = [(tmp_path / job).read_text().split() for job in jobs]
    assert {name for name, _ in outputs} == {cluster.nodes[0]}
    assert sorted(f"{outputs[0][1]},{outputs[1][1]}".split(",")) == list("01234567")

    # all of two nodes, whose names are addresses that a process there can listen on
    script = 'import os, socket; socket.create_server((os.environ["SLURMD_NODENAME"], 0)); '
    script += 'print(os.environ["SLURM_PROCID"], os.environ["CUDA_VISIBLE_DEVICES"])'
    ranks = cluster.run("srun", "--nodes=2", "--ntasks-per-node=4", NODE, sys.executable, "-c", script)
    assert sorted(ranks.splitlines()) == [f"{rank} 0,1,2,3,4,5,6,7" for rank in range(8)]
    with pytest.raises(RuntimeError, match="Requested node configuration is not available"):
        cluster.submit("true", "--gpus-per-node=9")


def test_requeued_jobs_run_again(cluster, tmp_path):
    script = f'echo "run $SLURM_RESTART_COUNT" >>{tmp_path}/$SLURM_JOB_ID; [ $SLURM_RESTART_COUNT ] || '
    script += f"sleep 60 & echo $! >{tmp_path}/$SLURM_JOB_ID.pid; wait"
    asked, downed, _ = jobs = [
        cluster.submit(script, "--gpus-per-node=4", f"--nodelist={node}")
        for node in (cluster.nodes[0], cluster.nodes[0], cluster.nodes[1])
    ]
    cluster.until(lambda: all(lines(tmp_path / f"{job}.pid") for job in jobs))
    sleeping = [int(lines(tmp_path / f"{job}.pid")[0]) for job in jobs]
    cluster.run("scontrol", "requeue", asked)
    cluster.wait_for(asked, "PENDING")  # else SLURM 22.05 loses its GPUs
    cluster.crash(cluster.nodes[1])
    assert not alive(sleeping[2])
    assert cluster.state(downed) == "RUNNING"
    cluster.down(cluster.nodes[0])
    cluster.until(lambda: cluster.state(downed) == "PENDING")
    cluster.up(cluster.nodes[0])
    assert cluster.wait(jobs) == dict.fromkeys(jobs, "COMPLETED")
    assert [lines(tmp_path / job) for job in jobs] == [["run ", "run 1"]] * 3


def test_preemption_requeues_with_and_without_the_signal_asked_for(cluster, cluster_with_signal, tmp_path):
    told = "trap 'echo USR2; scontrol requeue $SLURM_JOB_ID; exit' USR2; "
    script = 'echo "run $SLURM_RESTART_COUNT"; [ $SLURM_RESTART_COUNT ] || while true; do sleep 0.1; done'
    options = (NODE, "--nodes=2", "--signal=B:USR2@60", "--time=30", "--open-mode=append")
    jobs = {}
    for name, where in (("plain", cluster), ("signal", cluster_with_signal)):
        low = where.submit(told + script, *options, f"--output={tmp_path}/{name}")
        where.until(lambda name=name: lines(tmp_path / name))
        jobs[name] = (where, low, where.submit("true", NODE, "--nodes=2", "--partition=high"))
    for where, low, high in jobs.values():
        assert where.wait([low, high]) == {low: "COMPLETED", high: "COMPLETED"}
        assert where.jobs()[low]["Restarts"] == "1"
        assert where.jobs()[high]["EndTime"] <= where.jobs()[low]["StartTime"]
    printed = {
        name: [line for line in lines(tmp_path / name) if line.startswith(("run", "USR2"))] for name in jobs
    }
    assert printed == {"plain": ["run ", "run 1"], "signal": ["run ", "USR2", "run 1"]}


def test_sacct_tells_submitit_the_states(cluster, tmp_path):
    from submitit.slurm.slurm import SlurmInfoWatcher

    job = cluster.submit("[ $SLURM_ARRAY_TASK_ID = 1 ]", "--array=1-2")
    held = cluster.submit("true", "--hold", "--array=0-2%1")
    cluster.wait([job])
    told = cluster.run("sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j", job, "-j", held, "-j", "1")
    cluster.run("scancel", held)
    states = {key: info["State"] for key, info in SlurmInfoWatcher().read_info(told).items()}
    assert states == {
        f"{job}_1": "COMPLETED",
        f"{job}_2": "FAILED",
        **{f"{held}_{index}": "PENDING" for index in range(3)},
    }
    assert cluster.wait([held]) == {f"{held}_{k}": "CANCELLED" for k in range(3)}


def test_what_holds_a_job_can_be_killed(cluster):
    job = cluster.submit("sleep 60")
    cluster.until(lambda: cluster.steps(job))
    for pid in cluster.steps(job):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert cluster.state(job) == "RUNNING"  # nobody has told slurmctld
    cluster.run("scancel", job)
    assert cluster.wait([job]) == {job: "CANCELLED"}


def test_a_cluster_that_cannot_start_says_why(cluster, monkeypatch):
    monkeypatch.setattr(Cluster, "_configuration", lambda self: ["ClusterName=test", "Nonsense=1"])
    broken = Cluster()
    with pytest.raises(RuntimeError, match="slurmctld.*\n.*Nonsense"):
        broken.start()
    assert not broken.root.exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_behind_when_the_test_process_is_gone(cluster, tmp_path, end):
    # the job leaves a process of another session, deaf to signals, and so does the test process a fork
    script = f"""
import os, time
from tests.slurm.cluster import Cluster
from tests.slurm.supervisor import descendants
with Cluster(nodes=1) as cluster:
    left = "trap : TERM INT HUP; echo $$ >{tmp_path}/job; while :; do sleep 1; done"
    cluster.submit(f"setsid sh -c '{{left}}' & wait")
    cluster.until(lambda: os.path.exists("{tmp_path}/job") and os.path.getsize("{tmp_path}/job"))
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    print(cluster.root, *descendants(cluster._supervisor.pid), cluster._supervisor.pid, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout
    root, *pids = process.stdout.readline().split()
    assert len(pids) > 5
    assert int((tmp_path / "job").read_text()) in map(int, pids)
    process.send_signal(end)
    process.wait(10)
    deadline = time.monotonic() + 5
    while any(alive(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if alive(int(pid))] == []
    assert not Path(root.decode()).exists()
