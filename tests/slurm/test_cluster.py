"""The private cluster of the tests ends with them, and has a sacct."""

import subprocess
import sys
from pathlib import Path

from launcher import ROOT, ended, wait_for


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


def test_nothing_stays_behind_when_the_test_process_is_gone(tmp_path):
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
    process.kill()
    process.wait(10)
    wait_for(lambda: all(ended(int(pid)) for pid in pids))
    assert not Path(root.decode()).exists()
