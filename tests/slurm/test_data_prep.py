"""Stages of data_prep as arrays on a real SLURM: they give the stream of a single machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT, finish

from alma.errors import UserError
from alma.files import LOCK
from alma.stream import Stream
from data_prep.cluster import ClusterWork
from data_prep.work import Task
from slurm.engine import squeue, submission
from slurm.engine.resources import Resources

DRIVER = """
import sys
from data_prep import __main__, cluster, documents
cluster.POLL_SECONDS = 0.3
documents.SHARD_BYTES = 20_000
__main__.main()
"""
WANTED = "--mega-batches 3 --words 1500 --valid-words 300 --vocab-size 120".split()


@pytest.fixture
def corpus(tmp_path) -> Path:
    """About 100 kB of text: 40 files of 25 documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    for file in range(40):
        texts = []
        for n in range(25):
            words = []
            for k in range(9):
                first = syllables[(file * 7 + n * n + k * k) % 60]
                words.append(first + syllables[(n + k * file) % 60])
            texts.append(" ".join(words))
        (folder / f"{file:02d}.txt").write_text("\n\n".join(texts), "utf-8")
    return folder


def start(cluster, corpus: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(corpus), "--out", str(out), *WANTED, *options]
    environment = cluster.environment if cluster else dict(os.environ)
    environment = environment | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE)


def digests(out: Path) -> dict[str, str]:
    stream = Stream.load(out)
    stream.check(stream.parts)
    listed = {
        name: info.sha256 for item in [stream, *stream.parts] for name, info in item.files.items()
    }
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files - {LOCK} == {*listed, "stream.json"}
    return listed


def test_arrays_make_the_stream_of_one_machine(cluster, corpus, tmp_path):
    """A kill changes nothing; no stage that is complete has jobs again."""
    local = start(None, corpus, tmp_path / "here", "--workers", "1")
    on_slurm = ("--cluster", "slurm", "--workers", "3")
    before = set(cluster.jobs())
    killed = start(cluster, corpus, tmp_path / "there", *on_slurm)
    cluster.until(lambda: list(tmp_path.glob("there/.work-*/jobs.json")), timeout=60)
    killed.kill()
    killed.wait()
    finish(start(cluster, corpus, tmp_path / "there", *on_slurm), timeout=600)
    finish(local)
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    # 3 jobs each of scan, shuffle, encode and finalise; sort, cut, plan and tokenizer have 1.
    # At most 3 more: tasks of scan that were not finished when the second launch looked.
    new = {name: job for name, job in cluster.jobs().items() if name not in before}
    assert 0 <= len(new) - (4 * 3 + 4) <= 3
    assert "CANCELLED" not in {job["JobState"] for job in new.values()}


def test_a_refused_submission_leaves_no_jobs(slurm, tmp_path, monkeypatch):
    submitted: list[str] = []

    def send(name, jobs, resources, dependency):
        if submitted:
            raise UserError("sbatch refused alma-scan")
        submitted.append("7")
        return submitted

    monkeypatch.setattr("slurm.engine.submission.to_slurm", lambda folder, remedy: send)
    monkeypatch.setattr("slurm.engine.submission.largest_array", lambda: 1)
    tasks = [Task(tmp_path / f"{number}.npz", 1, print, {}) for number in range(2)]
    with pytest.raises(UserError, match="sbatch refused alma-scan"):
        ClusterWork(2, Resources(gpus_per_node=0)).run("scan", tasks, "file")
    assert slurm.calls("scancel") == [["7"]]


def test_a_full_queue_is_waited_for(slurm, tmp_path, monkeypatch):
    """Also where the jobs that fill it are of the stage before, whose work is done."""
    refusals = iter(range(2))
    running = {"5": squeue.JobState("RUNNING")}

    def send(name, jobs, resources, dependency):
        for _ in refusals:
            raise submission.QueueIsFull("sbatch refused alma-scan: AssocMaxSubmitJobLimit; fix")
        for job in jobs:
            job.tasks[0].done.touch()
            job.marker.touch()
        return ["7"]

    monkeypatch.setattr(submission, "to_slurm", lambda folder, remedy: send)
    monkeypatch.setattr(submission, "largest_array", lambda: 1)
    monkeypatch.setattr(submission, "ask", lambda: running)
    monkeypatch.setattr(submission, "_FIRST_FULL_SECONDS", 0)
    task = Task(tmp_path / "0.npz", 1, print, {})
    work = ClusterWork(1, Resources(gpus_per_node=0))
    work.run("scan", [task], "file")
    assert task.done.exists()

    task.done.unlink()
    refusals = iter(range(9))
    running.clear()
    with pytest.raises(UserError, match="AssocMaxSubmitJobLimit; no job of yours is in the queue"):
        work.run("scan", [task], "file")
    assert next(refusals) == 2


def test_a_share_that_fails_or_is_interrupted_leaves_no_jobs(cluster, corpus, tmp_path):
    _, err = finish(
        start(cluster, corpus, tmp_path / "out", "--cluster", "slurm", "--partition", "none"), 2
    )
    assert "sbatch would refuse the step: " in err
    assert "invalid partition" in err.lower()
    assert "--dry-run" not in err, "it is no flag of alma data"
    text = corpus / "07.txt"
    text.write_bytes(text.read_bytes() + b"\xff\n")
    _, err = finish(
        start(cluster, corpus, tmp_path / "out", "--cluster", "slurm", "--nodes", "2"), 2
    )
    assert "--nodes and --tasks-per-node: a share of a stage is one task" in err
    _, err = finish(
        start(cluster, corpus, tmp_path / "out", "--cluster", "slurm", "--workers", "2"), 2
    )
    assert f"{text}: not UTF-8 at byte" in err
    assert "; log: " in err
    text.write_bytes(text.read_bytes()[:-2])

    cluster.run("scontrol", "update", "partitionname=main", "state=down")
    try:
        waiting = start(cluster, corpus, tmp_path / "out", "--cluster", "slurm", "--workers", "2")
        cluster.until(
            lambda: "PENDING" in {job["JobState"] for job in cluster.jobs().values()}, timeout=60
        )
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(30) == 143
        assert "PENDING" not in {job["JobState"] for job in cluster.jobs().values()}
    finally:
        cluster.run("scontrol", "update", "partitionname=main", "state=up")
