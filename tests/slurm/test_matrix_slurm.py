"""`alma matrix --cluster slurm`: a job for each model, on a real SLURM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.alma.matrix_data import EVAL, records, write_records

ROOT = Path(__file__).parents[2]
MODELS = ("m-2024-01", "m-2024-02", "m-2024-03")
SLURM = ("--cluster", "slurm", "--gpus-per-node", "0", "--timeout-min", "5")


@pytest.mark.thorough
def test_jobs_measure_what_this_machine_does(cluster, tmp_path):
    write_records(tmp_path / "news.jsonl", records())
    (tmp_path / "eval.py").write_text(EVAL)
    words = [*MODELS, "--data", "news.jsonl", "--by", "month", "--metric", "MAPE"]
    words += ["--command", f"{sys.executable} eval.py"]
    environment = cluster.environment | {"PYTHONPATH": str(ROOT)}

    def run(*more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "alma", "matrix", *words, *more]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    here = run("--out", "here.csv")
    assert here.returncode == 0, here.stderr
    measured = tmp_path / "measured.txt"
    measured.unlink()

    submitted = run(*SLURM)
    assert submitted.returncode == 0, submitted.stderr
    assert "3 jobs submitted" in submitted.stderr
    assert "type this command again: it writes matrix.csv" in submitted.stdout
    waited = run(*SLURM, "--wait")  # for the jobs that are in the queue
    assert waited.returncode == 0, waited.stderr
    assert (tmp_path / "matrix.csv").read_text() == (tmp_path / "here.csv").read_text()
    lines = measured.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 12

    status = subprocess.run(
        [sys.executable, "-m", "alma", "status", "matrix.cells"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert status.returncode == 0, status.stderr
    assert "m-2024-02" in status.stdout
