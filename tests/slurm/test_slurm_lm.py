"""The launcher on a real SLURM with real trainings of a tiny language model."""

import json
import os
import subprocess
import sys
from pathlib import Path

from alma.records import MACHINE_FIELDS, Run
from slurm.engine import queue

ROOT = Path(__file__).parents[2]
FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --max-tokens 512 --optimizer adam --lr 1e-2 --lr-scheduler fixed --dropout 0.1
    --no-epoch-checkpoints --num-workers 0 --log-interval 1 --cpu
""".split()


def command(stream, out, *options, updates: int) -> list[str]:
    launch = [sys.executable, "-m", "slurm.launch", stream, "--out", out, *options]
    return [str(word) for word in (*launch, "--", *FLAGS, "--max-update", updates)]


def on(cluster) -> dict[str, str]:
    return cluster.environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def comparable(out) -> list[dict]:
    rows = [{k: v for k, v in row.items() if k not in MACHINE_FIELDS} for row in Run.read(out).rows]
    return json.loads(json.dumps(rows))


def losses(out) -> list[tuple[str, str]]:
    """Update and loss of the first stage's training, in the order of its log."""
    lines = (out / "stage_00/train.log").read_text().splitlines()
    records = [json.loads(line.split("train_inner | ")[1]) for line in lines if "train_inner | " in line]
    return [(record["num_updates"], record["loss"]) for record in records]


def test_slurm_and_one_machine_give_the_same_rows(cluster, stream, tmp_path):
    options = ("--learner", "ens", "--members", "2", "--stages", "2")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    here = command(stream, tmp_path / "here", *options, updates=3)
    subprocess.run([*here[:4], "--jobs", "2", *here[4:]], check=True, env=environment, cwd=ROOT)
    there = command(stream, tmp_path / "there", *options, "--cluster", "slurm", "--wait", updates=3)
    subprocess.run(there, check=True, env=on(cluster), cwd=ROOT)
    assert comparable(tmp_path / "there") == comparable(tmp_path / "here")
    assert [row["t"] for row in comparable(tmp_path / "there")] == [0, 1, 2]


def test_two_tasks_resume_after_a_requeue_with_the_same_losses(cluster, stream, tmp_path):
    """Two gloo processes, one per task, on one and on two nodes; only the signal saves a checkpoint.

    The nodes' GPUs are fake, so that --cpu is needed; without it the first job would end with one line.
    """
    options = ("--learner", "sm", "--stages", "1", "--cluster", "slurm", "--wait", "--timeout-min", "30")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    together = command(stream, whole, *options, "--tasks-per-node", "2", "--gpus-per-node", "2", updates=60)
    subprocess.run(together, check=True, env=on(cluster), cwd=ROOT)
    apart = command(stream, cut, *options, "--nodes", "2", "--gpus-per-node", "1", updates=60)
    process = subprocess.Popen(apart, env=on(cluster), cwd=ROOT)
    log = cut / "stage_00/train.log"
    cluster.until(lambda: log.exists() and "train_inner | " in log.read_text(), timeout=90)
    job_id = next(job.job_id for job in queue.read_jobs(cut) if job.kind == "train")
    cluster.run("scancel", "--signal=USR2", job_id)  # as SLURM does before a preemption or a timeout
    assert process.wait(timeout=900) == 0
    assert comparable(cut) == comparable(whole)
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == 60
    assert "training on 2 devices" in log.read_text()
    assert log.read_text().count("\n$ ") == 2  # starts


def test_gpus_that_torch_cannot_use_end_a_job_in_one_line(cluster, stream, tmp_path):
    """One fake GPU on each of two nodes; no checkpoint, no results of another batch."""
    options = ("--learner", "sm", "--stages", "1", "--cluster", "slurm", "--wait", "--timeout-min", "30")
    words = command(stream, tmp_path / "run", *options, "--nodes", "2", "--gpus-per-node", "1", updates=2)
    words.remove("--cpu")
    done = subprocess.run(words, env=on(cluster), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "planned: 1 GPU here, but torch" in done.stderr
    assert not list((tmp_path / "run/stage_00").glob("*.pt"))
