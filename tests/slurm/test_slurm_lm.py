"""The launcher on a real SLURM with real trainings of a tiny language model, all at the same
time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alma.records import Run
from slurm.engine import queue
from tests.broken_input.sound import Sound
from tests.machine_fields import without_machine_fields

ROOT = Path(__file__).parents[2]
FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --max-tokens 512 --optimizer adam --lr 1e-2 --lr-scheduler fixed
    --dropout 0.1 --no-epoch-checkpoints --num-workers 0 --log-interval 1 --cpu
""".split()
SM = ("--learner", "sm", "--stages", "1")
APART = ("--nodes", "2", "--gpus-per-node", "1")
ON_SLURM = ("--cluster", "slurm", "--wait", "--timeout-min", "30")
UPDATES = 60


def words(stream, out, *options, updates: int) -> list[str]:
    return [
        str(word)
        for word in (stream, "--out", out, *options, "--", *FLAGS, "--max-update", updates)
    ]


@pytest.fixture
def launch(cluster):
    """Start the launcher on the cluster; it does not outlive the test."""
    started = []

    def run(command: list[str], **options) -> subprocess.Popen:
        environment = cluster.environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-m", "slurm.launch", *command]
        started.append(subprocess.Popen(program, env=environment, cwd=ROOT, text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def comparable(out) -> list[dict]:
    return json.loads(json.dumps(without_machine_fields(Run.read(out).rows)))


def losses(out) -> list[tuple[str, str]]:
    """Update and loss of the first stage's training, in the order of its log."""
    lines = (out / "stage_00/train.log").read_text().splitlines()
    records = [
        json.loads(line.split("train_inner | ")[1]) for line in lines if "train_inner | " in line
    ]
    return [(record["num_updates"], record["loss"]) for record in records]


@pytest.mark.thorough
def test_two_nodes_and_a_requeue_give_the_rows_and_losses_of_one_machine(
    cluster, launch, stream, tmp_path
):
    """Two gloo processes, on two nodes or both on this machine; only the signal saves a checkpoint.

    The nodes shard the optimizer's state, this machine does not. The nodes' GPUs are fake,
    so that --cpu is needed; without it the first job would end with one line.
    """
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    command = [*words(stream, whole, *SM, updates=UPDATES), "--distributed-world-size", "2"]
    on_nodes = [
        *words(stream, cut, *SM, *ON_SLURM, *APART, updates=UPDATES),
        "--zero-sharding",
        "os",
    ]
    started = [launch(on_nodes), launch(command)]
    log = cut / "stage_00/train.log"
    cluster.until(lambda: log.exists() and "train_inner | " in log.read_text(), timeout=120)
    job_id = next(job.job_id for job in queue.read_jobs(cut) if job.kind == "train")
    cluster.run(
        "scancel", "--signal=USR2", job_id
    )  # as SLURM does before a preemption or a timeout
    assert [process.wait(timeout=900) for process in started] == [0, 0]
    assert [row["t"] for row in comparable(cut)] == [0, 1]
    assert comparable(cut) == comparable(whole)
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == UPDATES
    assert "training on 2 devices" in log.read_text()
    assert log.read_text().count("\n$ ") == 2  # starts


@pytest.mark.thorough
def test_a_requeue_gives_the_rows_of_an_undisturbed_run_of_transformers(cluster, launch, tmp_path):
    """Only the signal saves a checkpoint: the engine ends with code 75, then it resumes."""
    pytest.importorskip("transformers")
    sound = Sound(tmp_path / "sound")
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    options = [sound.get("own"), "--init", sound.get("qwen"), "--average", "poly:8", *SM]
    flags = f"--max_steps {UPDATES} --per_device_train_batch_size 4 --use_cpu --logging_steps 1"
    flags += " --save_steps 1000 --dataloader_num_workers 1"

    def command(out: Path, *places: str) -> list[str]:
        return [str(word) for word in (*options, "--out", out, *places, "--", *flags.split())]

    on_cluster = (*ON_SLURM, "--gpus-per-node", "1")
    started = [launch(command(cut, *on_cluster)), launch(command(whole))]
    log = cut / "stage_00/train.log"
    cluster.until(lambda: log.exists() and "train_inner | " in log.read_text(), timeout=300)
    job_id = next(job.job_id for job in queue.read_jobs(cut) if job.kind == "train")
    cluster.run("scancel", "--signal=USR2", job_id)
    assert [process.wait(timeout=900) for process in started] == [0, 0]
    assert [row["t"] for row in comparable(cut)] == [0, 1]
    assert comparable(cut) == comparable(whole)
    assert losses(cut) == losses(whole)
    assert log.read_text().count("\n$ ") == 2  # starts
    for name in ("model.safetensors", "raw/model.safetensors"):
        (weights,) = Path(whole, "stage_00/model").glob(f"*/{name}")
        weights = weights.relative_to(whole)
        assert (cut / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.slow
def test_gpus_that_torch_cannot_use_end_a_job_in_one_line(launch, stream, tmp_path):
    """One fake GPU on each of two nodes; no checkpoint, no results of another batch."""
    command = words(stream, tmp_path / "run", *SM, *ON_SLURM, *APART, updates=2)
    command.remove("--cpu")
    process = launch(command, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "planned: 1 GPU here, but torch" in err
    assert not list((tmp_path / "run/stage_00").glob("*.pt"))
