"""The files of experiments/table2 are the rows of the paper's Table 2."""

from pathlib import Path

import pytest

from alma.lm_reference import reference
from slurm.flags import number, value
from slurm.launch import read_requests
from slurm.plan import make_plan

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments/table2").glob("*.yaml"))


def setting(request) -> tuple[str, int, int, str]:
    """Learner, waiting time, update multiplier and the experts of the first stage, as in the table."""
    experts = str(number(request.flags, "--moe-expert-count"))
    members = {"ens": f"@{request.members}", "gens": "@1"}.get(request.learner, "")
    return request.learner, request.waiting_time, request.update_multiplier, experts + members


@pytest.mark.parametrize("size", ["base", "large"])
def test_there_is_a_file_for_every_row_of_the_papers_table(monkeypatch, size):
    monkeypatch.chdir(ROOT)
    files = [str(file) for file in FILES if file.stem.endswith(f"_{size}")]
    requests = read_requests([*files, "--stream", "S"])
    found = [setting(request) for request in requests]
    rows = {line[:4] for line in reference() if line.size == size}
    later = {row for row in rows if row[0] in ("gens", "gmoe") and row[3] not in ("4@1", "4")}
    assert sorted(found) == sorted(rows - later)
    for request in requests:
        made = make_plan(request, 4)
        last = made.stages[-1]
        assert value(request.flags, "--arch") == f"switch_gmoe_{size}"
        if request.learner == "gmoe":
            words = [" ".join(spec.trainings[0].command) for spec in made.stages]
            for experts, command in zip((4, 6, 8, 12), words, strict=True):
                assert f"--moe-expert-count {experts} " in command
            assert "--grow-router copy" in words[-1]
        if request.waiting_time == 3:
            assert last.stage.last == 3  # the paper has nothing at the fourth mega-batch
        assert (number(request.flags, "--batch-size") or 0) * 3 * 8 == 192


def test_small_is_the_same_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    small = read_requests(["experiments/table2", "--size", "small"])
    assert len(small) == len(FILES) / 2 == 15
    base = read_requests([str(file) for file in FILES if file.stem.endswith("_base")])
    assert [setting(request) for request in small] == [setting(request) for request in base]
    assert {str(request.out).rpartition("_")[2] for request in small} == {"small"}
    assert {value(request.flags, "--arch") for request in small} == {"switch_gmoe_tiny"}
