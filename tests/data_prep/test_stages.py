"""The list of stages: each reads the files of the stages that it names,
and writes those that it names."""

from collections import defaultdict

import pytest

from data_prep.build import PipelineStage
from data_prep.stages import STAGES
from data_prep.work import Workspace

STAGE = {stage.name: stage for stage in STAGES}
ALL = {"near_duplicates": "drop", "eval_words": 300}


@pytest.fixture
def files(monkeypatch) -> dict[str, set[str]]:
    """The names of the numbered files that each stage asks for, as NAME.SUFFIX."""
    names: dict[str, set[str]] = defaultdict(set)
    running: list[str] = []
    run = PipelineStage.run
    file = Workspace.file

    def noted_run(self, build, work):
        running.append(self.name)
        run(self, build, work)
        running.pop()

    def noted_file(self, name, number, suffix):
        if running:
            names[running[-1]].add(f"{name}.{suffix}")
        return file(self, name, number, suffix)

    monkeypatch.setattr(PipelineStage, "run", noted_run)
    monkeypatch.setattr(Workspace, "file", noted_file)
    return names


def test_a_stage_comes_after_those_that_it_needs():
    assert len(STAGE) == len(STAGES)
    for number, stage in enumerate(STAGES):
        assert set(stage.needs) <= {earlier.name for earlier in STAGES[:number]}, stage.name


def test_a_stage_reads_and_writes_what_it_says(near, prepare, tmp_path, files):
    """In a new stream and in an addition, with all that can be switched on."""
    pytest.importorskip("rensa")
    flags = ("--write-dropped", "--write", "jsonl")
    out = prepare(*near[:2], *flags, out=tmp_path / "out", mega_batches=2, **ALL)
    new = {"mega_batches": None, "valid_words": None, "vocab_size": None}
    prepare(near[2], "--append", out=out, words=300, **new)
    for name, of_stage in files.items():
        stage = STAGE[name]
        needed = {file for name in stage.needs for file in STAGE[name].writes}
        assert of_stage - set(stage.writes) <= needed, name
    assert set(STAGE) - set(files) == {"dates"}


def test_the_last_file_of_a_task_marks_it_as_finished(corpus, prepare, tmp_path, monkeypatch):
    done = {}
    run = PipelineStage.run

    def noted_run(self, build, work):
        done[self.name] = {task.done.name for task in self.tasks(build)}
        run(self, build, work)
        assert all((build.space.directory / name).exists() for name in done[self.name])

    monkeypatch.setattr(PipelineStage, "run", noted_run)
    prepare(corpus, out=tmp_path / "out")
    assert done["scan"] == {"scan-00000.bin"}
    assert done["cut"] == {"cut.npz"}
    assert "valid.json" in done["finalise"]
