"""run.json records the command of each run."""

import shlex
from pathlib import Path

import pytest

from alma.records import Run
from tests.vision.conftest import jobs, numbers

SECTIONS = """\
size: little
learner: [sm, gmoe]
runs:
- {waiting-time: [1, all], replay: on}
- {router: flat, average: 0.5}
- {learner: gmoe, nesterov: on}
"""


def recorded(command, out):
    """The job of a recorded command, with another --out."""
    words = shlex.split(command)
    assert words[:2] == ["alma", "images"]
    words[words.index("--out") + 1] = str(out)
    (job,) = jobs(*words[2:])
    return job


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--learner sm,ens --lr .3,0.30000000000000004 --from-scratch off,on --save-stages "
        "--data-root 'a b'",
        "--dataset mnist --download --megabatches 50 --stream-seed 432 --seeds 0-1 "
        "--preset authors",
        "--scenario classes --replay-share 0,.5 --replay-from recent --device cpu",
        "one.yaml --seeds 0-1",
    ],
)
def test_a_recorded_command_is_that_run_alone(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    little = "{megabatches: 5, optimizer: sgd, momentum: 0.9, hidden: 4}"
    Path("sizes.yaml").write_text(f"sizes: {{little: {little}}}")
    Path("one.yaml").write_text(SECTIONS)
    recorded_jobs = jobs(*shlex.split(words))
    assert recorded_jobs
    for job in recorded_jobs:
        again = recorded(job.command, job.out)
        assert again == job, job.command
    assert len({job.command for job in recorded_jobs}) == len(recorded_jobs)


def test_a_recorded_command_repeats_the_run(tmp_path):
    words = "--lr .3,1 --megabatches 4 --epochs 2 --hidden 8 --seed 1 --out".split()
    first, _ = jobs(*words, tmp_path / "sweep")
    first.run()
    run = Run.read(first.out)
    recorded(run.info["command"], tmp_path / "again").run()
    rerun = Run.read(tmp_path / "again")
    assert numbers(rerun) == numbers(run)
    assert rerun.config == run.config
    assert rerun.info["command"] == run.info["command"].replace(
        str(first.out), str(tmp_path / "again")
    )
