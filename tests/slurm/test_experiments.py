"""Experiment files: table2 has the rows of the paper's Table 2; errors are one clear line."""

from pathlib import Path

import pytest
from launcher import ROOT, read_requests

from alma.errors import UserError
from alma.experiments import read_overrides
from alma.report.lm.reference import reference
from slurm.lm.plan import make_plan

FILES = sorted((ROOT / "experiments/table2").glob("*.yaml"))


def setting(request) -> tuple[str, int, int, str]:
    """Learner, waiting time, update multiplier and the experts of the first stage, as in Table 2."""
    experts = str(request.settings["--moe-expert-count"])
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
        assert request.settings["--arch"] == f"switch_gmoe_{size}"
        if request.learner == "gmoe":
            words = [" ".join(spec.trainings[0].command) for spec in made.stages]
            for experts, command in zip((4, 6, 8, 12), words, strict=True):
                assert f"--moe-expert-count {experts} " in command
            assert "--grow-router copy" in words[-1]
            assert "--grow-noise=0.1" in words[-1]
        if request.waiting_time == 3:
            assert last.stage.last == 3  # the paper has no result at the fourth mega-batch
        assert request.settings["--batch-size"] * 3 * 8 == 192


def test_size_small_has_the_same_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    small = read_requests(["experiments/table2", "--size", "small"])
    assert len(small) == len(FILES) / 2 == 15
    base = read_requests([str(file) for file in FILES if file.stem.endswith("_base")])
    assert [setting(request) for request in small] == [setting(request) for request in base]
    assert {str(request.out).rpartition("_")[2] for request in small} == {"small"}
    assert {request.settings["--arch"] for request in small} == {"switch_gmoe_tiny"}


def experiments(folder: Path) -> None:
    """Two experiments and two sizes."""
    (folder / "set/sizes").mkdir(parents=True)
    files = {
        "grow_big": "learner: gmoe\ngrow-experts: 2\nsize: big",
        "fixed_big": "learner: sm\nsize: big\nreplay: true\nflags: {moe-expert-count: 8, lr: 2e-3}",
        "sizes/big": "stream: stream\nflags: {max-update: 3, lr: 1e-3}",
        "sizes/tiny": "stream: stream\nwaiting-time: 2\nflags: {max-update: 1, cpu: true}",
    }
    for name, text in files.items():
        (folder / f"set/{name}.yaml").write_text(text)


def test_the_command_line_overrides_files(tmp_path, monkeypatch):
    experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    grown, fixed = read_requests(["set/grow_big.yaml", "set/fixed_big.yaml"])
    assert (grown.learner, grown.grow_experts, str(grown.out)) == ("gmoe", [2], "runs/set/grow_big")
    assert (fixed.replay, fixed.stream, grown.replay) == (True, "stream", False)
    wanted = {"--max-update": "3", "--lr": "2e-3", "--moe-expert-count": "8"}
    assert fixed.flags == {name: [f"{name}={value}"] for name, value in wanted.items()}
    words = ["set", "--size", "tiny", "--seed", "5", "--stream", "x", "--", "--max-update", "7"]
    fixed, grown = read_requests(words)
    assert [str(one.out) for one in (fixed, grown)] == ["runs/set/fixed_tiny", "runs/set/grow_tiny"]
    assert {(one.seed, one.waiting_time, one.stream) for one in (fixed, grown)} == {(5, 2, "x")}
    assert grown.flags == {"--max-update": ["--max-update", "7"], "--cpu": ["--cpu"]}
    assert read_requests([*words, "--cpu=false"])[0].flags.keys() == {
        "--max-update",
        "--moe-expert-count",
        "--lr",
    }


def test_key_value_overrides_all_files_and_flags_override_key_value(tmp_path, monkeypatch):
    experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["set", "max-update=9", "replay=false", "--stages", "2", "waiting-time=3", "seed=4", "size=tiny"]
    fixed, grown = read_requests(words)
    for one in (fixed, grown):
        assert (one.replay, one.waiting_time, one.seed, one.stages) == (False, 3, 4, 2)
        assert one.settings["--max-update"] == 9
        assert one.out.name.endswith("_tiny")
    assert grown.flags.keys() == {"--max-update", "--cpu"}
    fixed, grown = read_requests([*words, "cpu=false", "--seed", "5", "--", "--max-update", "7"])
    assert {(one.seed, one.settings["--max-update"]) for one in (fixed, grown)} == {(5, 7)}
    assert grown.flags.keys() == {"--max-update"}
    (one,) = read_requests(["set/fixed_big.yaml", "lr=", "max-update=3"])  # without a value: left out
    assert one.flags.keys() == {"--max-update", "--moe-expert-count"}


def test_texts_stay_as_they_are_written():
    for text in ("2024_05", "010", "1.10", "on", "run #2", "a,b"):
        assert read_overrides([f"name={text}"]) == ([], {"name": text})
    assert read_overrides(["name='a: b'"]) == ([], {"name": "a: b"})
    assert len(read_overrides(["lr=" + ",".join(f"{i}e-5" for i in range(1, 90))])[1]["lr"]) == 89


def test_an_override_that_is_no_value_is_one_line():
    with pytest.raises(UserError, match="lr=2020-13-45: the value is not YAML"):
        read_requests(["set/fixed_big.yaml", "lr=2020-13-45"])


def test_an_existing_path_may_contain_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    (one,) = read_requests(["lr=1", "--learner", "sm", "--out", "R"])
    assert one.stream == "lr=1"
    (one,) = read_requests(["lr=1:lr=2", "--learner", "sm", "--out", "R"])
    assert one.stream == "lr=1:lr=2"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("learner: sm", "set/new.yaml", "give --stream"),
        ("learner: sm\nsize: huge", "set/new.yaml", "no such size; there are: big, tiny"),
        ("learnr: sm", "set/new.yaml", "set/new.yaml: unrecognized arguments: --learnr=sm"),
        ("size: big", "set/new.yaml", "give --learner"),
        ("learner: [sm", "set/new.yaml", "set/new.yaml: not YAML"),
        ("learner: 2026-99-99", "set/new.yaml", "set/new.yaml: not YAML .month must be"),
        ("learner: &a [*a]", "set/new.yaml", "new.yaml: give each option a number, a text"),
        ("1: sm", "set/new.yaml", "new.yaml: give each option a number, a text"),
        ("learner: !!python/name:os.system x", "set/new.yaml", "set/new.yaml: not YAML"),
        ("sm", "set/new.yaml", "give options as"),
        ("learner: sm\nflags: fast", "set/new.yaml --size big", "give flags as"),
        ("learner: sm\nflags: {seed: 1}", "set/new.yaml --size big", "give --seed before"),
        ("learner: sm\nout: runs/set/fixed_tiny", "set --size tiny", "another experiment goes to"),
        ("learner: sm", "set/none.yaml", "set/none.yaml: no such experiment"),
        ("learner: sm", "stream set/new.yaml", "not both"),
        ("learner: sm", "stream stream --learner sm", "give one stream"),
        ("learner: sm", "set learnr=ens", "learnr=: neither an option nor a .* sets; did you mean learner"),
        ("learner: sm", "set dropout=.1", "dropout=: neither .*; give other flags of "),
        ("learner: sm", "set max-updates=3", "did you mean max-update"),
        ("learner: sm", "set partition=x", "give --partition on the command line"),
        ("learner: sm", "set lr=[1", r"lr=\[1: the value is not YAML"),
        ("learner: sm", "stream --out R lr=1", "lr=: key=value overrides experiments"),
    ],
)
def test_bad_experiments_are_one_clear_line(tmp_path, monkeypatch, text, words, message):
    experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("set/new.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        read_requests(words.split())
    assert "\n" not in str(refused.value)
