"""The private cluster of the tests ends with them."""

import subprocess
import sys
from pathlib import Path

from launcher import ROOT, ended, wait_for


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
