"""The engine transformers on a real SLURM: a training on two nodes, which is requeued."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alma.records import Run
from slurm.engine import queue
from tests.machine_fields import without_machine_fields
from tests.transformers_alma import tiny

ROOT = Path(__file__).parents[2]
UPDATES = 300
FLAGS = (
    f"--max_steps {UPDATES} --learning_rate 1e-3 --per_device_train_batch_size 2 --use_cpu "
    "--save_steps 100000 --logging_steps 1"
).split()
ON_NODES = ("--cluster", "slurm", "--wait", "--timeout-min", "30", "--nodes", "2")


@pytest.fixture
def launch(cluster):
    """Start the launcher on the cluster; it does not outlive the test."""
    started = []

    def run(*words: object) -> subprocess.Popen:
        environment = cluster.environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-m", "slurm.launch", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(program, env=environment, cwd=ROOT, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()


@pytest.fixture
def model(text, tmp_path) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    tiny.make_model(folder, vocab_size=tiny.TOKENS)
    tiny.make_tokenizer(folder, (text / "help.txt").read_text("utf-8"))
    return folder


@pytest.fixture
def own_stream(model, text, tmp_path) -> Path:
    out = tmp_path / "own"
    words = "--mega-batches 1 --words 3000 --eval-words 800 --valid-words 300 --workers 1"
    words += " --max-document-words 100"
    command = [sys.executable, "-m", "data_prep", text / "help.txt", "--tokenizer", model]
    subprocess.run([*command, *words.split(), "--out", out], check=True, cwd=ROOT)
    return out


def comparable(out: Path) -> list[dict]:
    return json.loads(json.dumps(without_machine_fields(Run.read(out).rows)))


@pytest.mark.thorough
def test_two_nodes_and_a_requeue_give_the_weights_of_one_machine(
    cluster, launch, model, own_stream, tmp_path
):
    """Two gloo processes, on two nodes or both on this machine; only the signal saves."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    words = [own_stream, "--init", model, "--learner", "sm", "--out"]
    local = launch(*words, whole, "--", *FLAGS, "--num_processes", 2)
    output, _ = local.communicate(timeout=900)
    assert local.returncode == 0, output
    on_nodes = launch(*words, cut, *ON_NODES, "--", *FLAGS)
    log = cut / "stage_00/train.log"
    cluster.until(lambda: log.exists() and len(tiny.losses(log.read_text())) > 3, timeout=120)
    job_id = next(job.job_id for job in queue.read_jobs(cut) if job.kind == "train")
    cluster.run("scancel", "--signal=USR2", job_id)
    output, _ = on_nodes.communicate(timeout=900)
    assert on_nodes.returncode == 0, output + log.read_text()
    assert log.read_text().count("\n$ ") == 2  # starts
    assert (cut / "stage_00/train.rank1.log").read_text().count("\n$ ") == 2
    assert "--machine_rank 1" in (cut / "stage_00/train.rank1.log").read_text()
    assert not tiny.losses((cut / "stage_00/train.rank1.log").read_text())
    updates = [update for update, _ in tiny.losses(log.read_text())]
    assert updates == list(range(1, UPDATES + 1))
    assert tiny.checksums(cut) == tiny.checksums(whole)
    assert comparable(cut) == comparable(whole)
    assert [row["t"] for row in comparable(cut)] == [0, 1]


def test_several_tasks_on_a_node_are_refused(cluster, launch, model, own_stream, tmp_path):
    words = [own_stream, "--init", model, "--learner", "sm", "--out", tmp_path / "run"]
    tasks = ("--gpus-per-node", 0, "--tasks-per-node", 2)
    process = launch(*words, *ON_NODES, *tasks, "--", *FLAGS)
    output, _ = process.communicate()
    assert process.returncode == 2, output
    remedy = "leave it out, or give `-- --num_processes N`"
    assert output.splitlines()[-1].endswith(remedy)
    assert not (tmp_path / "run").exists()
