"""Experiment files: lists, sizes, named runs, overrides;
table2 has the rows of the paper's Table 2."""

import shlex
from pathlib import Path

import pytest
from launcher import ROOT, read_requests

from alma.errors import UserError
from alma.records import Run
from alma.report.lm.reference import reference
from slurm.lm.experiments import read_overrides
from slurm.lm.plan import make_plan

SIZES = """\
sizes:
  big: {stream: stream, flags: {max-update: 3, lr: 1e-3}}
  tiny: {stream: stream, waiting-time: 2, flags: {max-update: 1, cpu: true}}
  swept: {stream: stream, replay: [false, true], flags: {lr: [1e-3, 2e-3]}}
"""
SET = f"""\
size: big
runs:
  grow: {{learner: gmoe, grow-experts: 2}}
  fixed: {{learner: sm, replay: true, flags: {{moe-expert-count: 8, lr: 2e-3}}}}
{SIZES}"""
TUNED = """\
learner: [sm, gmoe]
waiting-time: [1, 2]
stream: stream
flags: {arch: switch_gmoe_tiny, max-update: 2, lr: 1e-3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with experiments of two runs,
    of four combinations and of a size beside it."""
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("set", SET),
        ("in/tuned", TUNED),
        ("in/plain", "learner: sm\nsize: swept"),
        ("in/sizes", SIZES),
    ):
        path = Path(f"{name}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def setting(request) -> tuple[str, int, int, str]:
    """Learner, waiting time, update multiplier and the experts of the first stage, as in Table
    2."""
    experts = str(request.settings["--moe-expert-count"])
    members = {"ens": f"@{request.members}", "gens": "@1"}.get(request.learner, "")
    return request.learner, request.waiting_time, request.update_multiplier, experts + members


@pytest.mark.parametrize("size", ["base", "large", "small"])
def test_there_is_a_run_for_every_row_of_the_papers_table(monkeypatch, size):
    monkeypatch.chdir(ROOT)
    requests = read_requests(["experiments/table2.yaml", "--size", size])
    rows = {line[:4] for line in reference() if line.size == "base"}
    later = {row for row in rows if row[0] in ("gens", "gmoe") and row[3] not in ("4@1", "4")}
    assert sorted(map(setting, requests)) == sorted(rows - later)
    assert {str(request.out).rpartition("_")[2] for request in requests} == {size}
    assert {str(request.out.parent) for request in requests} == {"runs/table2"}
    arch = "switch_gmoe_tiny" if size == "small" else f"switch_gmoe_{size}"
    assert {request.settings["--arch"] for request in requests} == {arch}
    for request in requests:
        run_plan = make_plan(request, 4)
        last = run_plan.stages[-1]
        if request.learner == "gmoe":
            words = [" ".join(spec.trainings[0].command) for spec in run_plan.stages]
            for experts, command in zip((4, 6, 8, 12), words, strict=True):
                assert f"--moe-expert-count {experts} " in command
            assert "--grow-router copy" in words[-1]
            assert "--grow-noise=0.1" in words[-1]
        if request.waiting_time == 3:
            assert last.stage.last == 3  # the paper has no result at the fourth mega-batch
        assert size == "small" or request.settings["--batch-size"] * 3 * 8 == 192


def test_the_command_line_overrides_files(folder):
    grown, fixed = read_requests(["set.yaml"])
    assert (grown.learner, grown.grow_experts, str(grown.out)) == ("gmoe", [2], "runs/set/grow_big")
    assert (fixed.replay, fixed.stream, grown.replay) == (True, "stream", False)
    flags = {"--max-update": "3", "--lr": "2e-3", "--moe-expert-count": "8"}
    assert fixed.flags == {name: [f"{name}={value}"] for name, value in flags.items()}
    words = [
        "set.yaml",
        "--size",
        "tiny",
        "--seed",
        "5",
        "--stream",
        "x",
        "--",
        "--max-update",
        "7",
    ]
    grown, fixed = read_requests(words)
    assert [str(request.out) for request in (fixed, grown)] == [
        "runs/set/fixed_tiny",
        "runs/set/grow_tiny",
    ]
    assert {(request.seed, request.waiting_time, request.stream) for request in (fixed, grown)} == {
        (5, 2, "x")
    }
    assert grown.flags == {"--max-update": ["--max-update", "7"], "--cpu": ["--cpu"]}
    (fixed,) = read_requests(["set.yaml", "runs=fixed", *words[1:], "--cpu=false"])
    assert fixed.flags.keys() == {"--max-update", "--moe-expert-count", "--lr"}


def test_key_value_overrides_all_files_and_flags_override_key_value(folder):
    words = [
        "set.yaml",
        "max-update=9",
        "replay=false",
        "--stages",
        "2",
        "waiting-time=3",
        "seed=4",
    ]
    words += ["size=tiny", "runs=fixed,grow"]
    requests = read_requests(words)
    for request in requests:
        assert (request.replay, request.waiting_time, request.seed, request.stages) == (
            False,
            3,
            4,
            2,
        )
        assert request.settings["--max-update"] == 9
        assert request.out.name.endswith("_tiny")
    assert requests[0].flags.keys() == {"--max-update", "--cpu"}
    requests = read_requests([*words, "cpu=false", "--seed", "5", "--", "--max-update", "7"])
    assert {(request.seed, request.settings["--max-update"]) for request in requests} == {(5, 7)}
    assert requests[0].flags.keys() == {"--max-update"}
    (request,) = read_requests(
        ["set.yaml", "runs=fixed", "lr=", "max-update=3"]
    )  # without a value: left out
    assert request.flags.keys() == {"--max-update", "--moe-expert-count"}


def test_texts_and_paths_stay_as_they_are_written(folder):
    for text in ("2024_05", "010", "1.10", "on", "run #2", "a,b"):
        assert read_overrides([f"name={text}"]) == ([], {"name": text})
    assert read_overrides(["name='a: b'"]) == ([], {"name": "a: b"})
    assert len(read_overrides(["lr=" + ",".join(f"{i}e-5" for i in range(1, 90))])[1]["lr"]) == 89
    Path("lr=1").mkdir()
    for stream in ("lr=1", "lr=1:lr=2"):
        (request,) = read_requests([stream, "--learner", "sm", "--out", "R"])
        assert request.stream == stream


def outs(*words):
    return [str(request.out.relative_to("runs/in")) for request in read_requests([*words])]


def test_every_combination_has_a_folder_and_its_settings(folder):
    requests = read_requests(["in/tuned.yaml", "lr=2e-4,1e-3", "--seeds", "0-1"])
    settings = [
        (
            request.out.name,
            request.learner,
            request.waiting_time,
            request.flags["--lr"],
            request.seed,
        )
        for request in requests
    ]
    assert settings == [
        (f"learner-{learner}_waiting-time-{w}_lr-{lr}_s{seed}", learner, w, [f"--lr={lr}"], seed)
        for learner in ("sm", "gmoe")
        for w in (1, 2)
        for lr in ("2e-4", "1e-3")
        for seed in (0, 1)
    ]
    assert {str(request.out.parent) for request in requests} == {"runs/in/tuned"}
    assert all(make_plan(request, 4).stages for request in requests)
    assert (
        outs("in/plain.yaml", "lr=3e-3")[0] == "plain_swept/replay-off_lr-3e-3"
    )  # joins the others
    assert [request.replay for request in read_requests(["in/plain.yaml", "lr="])] == [False, True]
    elsewhere = read_requests(["in/plain.yaml", "lr=", "--out", "there"])
    assert [str(request.out) for request in elsewhere] == ["there/replay-off", "there/replay-on"]


def test_which_commas_separate_values(folder):
    """Brackets are a list; a bare comma list is one, unless the option takes a comma list
    itself."""
    words = ["in/tuned.yaml", "learner=gmoe", "waiting-time=1"]
    prefix = "tuned/learner-gmoe_waiting-time-1"
    for text, names in (
        ("replay=off,on", ["_replay-off", "_replay-on"]),
        ("lr=[2e-4, 1e-3]", ["_lr-2e-4", "_lr-1e-3"]),
        ("lr=[2e-4]", ["_lr-2e-4"]),
        ("lr=2e-4", [""]),
        ("average=.999,last:8", ["_average-0.999", "_average-last-8"]),
        ("grow-experts=2,2,4", [""]),
        ("grow-experts=[4,'2,2,4']", ["_grow-experts-4", "_grow-experts-2-2-4"]),
        ("seeds=0-1,3", ["_s0", "_s1", "_s3"]),
        ("name=a,b", [""]),
    ):
        assert outs(*words, text) == [prefix + name for name in names], text
    Path("in/tuned.yaml").write_text(TUNED.replace("}", ', adam-betas: "(0.9,0.98)"}'))
    (request,) = read_requests([*words, "adam-betas=(0.9,0.99)"])
    assert request.flags["--adam-betas"] == ["--adam-betas=(0.9,0.99)"]
    assert (
        outs(*words, "adam-betas=['(0.9,0.98)','(0.8,0.9)']")[1] == f"{prefix}_adam-betas-0.8-0.9"
    )


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("learner: sm", "new.yaml", "give --stream"),
        (
            "learner: sm\nsize: huge",
            "in/new.yaml",
            "in/new.yaml: huge: no such size; there are: big, swept",
        ),
        ("learnr: sm", "new.yaml", "new.yaml: unrecognized arguments: --learnr=sm"),
        ("learner: [sm", "new.yaml", "new.yaml: not YAML"),
        ("sm", "new.yaml", "give options as"),
        ("learner: sm\nflags: fast", "in/new.yaml --size big", "give options, flags and runs as"),
        (
            "learner: sm\nruns: {a: {seed: 1}}",
            "new.yaml runs=b",
            "new.yaml: no run b; there are: a",
        ),
        ("learner: sm\nflags: {seed: 1}", "in/new.yaml --size big", "give --seed before"),
        ("learner: sm\nout: runs/set/fixed_tiny", "set.yaml in/new.yaml --size tiny", "goes to"),
        ("learner: sm", "stream new.yaml", "not both"),
        (
            "learner: sm",
            "set.yaml learnr=ens",
            "learnr=: neither an option nor .*; did you mean learner",
        ),
        ("learner: sm", "set.yaml dropout=.1", "dropout=: neither .*; give other flags of "),
        ("learner: sm", "set.yaml partition=x", "give --partition on the command line"),
        ("learner: sm", "set.yaml lr=[1", r"lr=\[1: the value is not YAML"),
        (
            "learner: sm",
            "stream --out R runs=a",
            "runs=: of experiments",
        ),
        ("", "in/tuned.yaml lr=[]", "key=value: lr: give a value, or a list of values"),
        (
            "",
            "in/tuned.yaml seed=[0,1]",
            "seed takes one value, .*; several seeds are `seeds: 0-2`",
        ),
        (
            "",
            "in/tuned.yaml grow-experts=[2,2,4]",
            "folder grow-experts-2; a value with commas needs quotes",
        ),
        (
            "",
            "in/tuned.yaml learner=sm,gmo",
            "in/tuned.yaml: argument --learner: .*did you mean gmoe",
        ),
        (
            "",
            "in/tuned.yaml lr=1e-3,2e-3 -- --lr 1",
            "lr is a list: give lr=VALUE in place of --lr",
        ),
    ],
)
def test_bad_experiments_are_one_clear_line(folder, text, words, message):
    for path in ("new.yaml", "in/new.yaml"):
        Path(path).write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        read_requests(words.split())
    assert "\n" not in str(refused.value)


def test_no_run_lies_in_another_one(folder):
    Path("runs/in/tuned").mkdir(parents=True)
    Path("runs/in/tuned/run.json").touch()
    with pytest.raises(
        UserError, match="runs/in/tuned is a single run: give a sweep another --out"
    ):
        read_requests(["in/tuned.yaml", "--seeds", "0-1"])
    assert read_requests(["in/tuned.yaml", "--out", "runs/in"])
    single = ["stream", "--learner", "sm", "--out", "runs/in"]
    with pytest.raises(UserError, match="runs/in has runs in folders .*: give --out runs/in/NAME"):
        read_requests(single)
    assert [request.out.name for request in read_requests([*single, "--seeds", "0-1"])] == [
        "in_s0",
        "in_s1",
    ]


def test_combinations_are_checked_before_the_first_one_starts(launcher):
    """Then they train; a second start trains nothing."""
    (launcher.folder / "tuned.yaml").write_text(TUNED)

    def start(*words):
        process = launcher.start_words(
            "tuned.yaml", "waiting-time=2", "out=runs", *words, "--jobs", "2"
        )
        return process.communicate(timeout=60)[1], process.returncode

    err, code = start("max-update=2,fast")
    assert (code, err.splitlines()[-1].partition(":")[0]) == (2, "error"), err
    assert not (launcher.folder / "runs").exists()
    assert start()[1] == 0
    places = sorted(path.parent for path in (launcher.folder / "runs").glob("*/run.json"))
    assert [path.name for path in places] == [
        "learner-gmoe_waiting-time-2",
        "learner-sm_waiting-time-2",
    ]
    assert [len(Run.read(path).rows) for path in places] == [5, 5]
    assert "training" not in start()[0]


@pytest.mark.parametrize(
    "words",
    [
        "S --learner sm --out R",
        "S --learner ens --members 3 --replay --seeds 0-1 --name 'a b' --out R -- --lr 1e-3 --cpu",
        "S --learner gmoe --grow-experts 2,2,4 --grow-router copy --stages 2 --out R -- --lr=2e-3",
        "S --learner sm --schedule continuous --average .999 --replay-share .5 --seed 7 --out R",
        "S --learner sm --average last:2 --from-scratch --context-window 4 --update-multiplier 3 "
        "--out R --"
        " --save-interval-updates 9 --max-update 60 --adam-betas '(0.9, 0.98)'",
        "in/tuned.yaml lr=1e-3,2e-3",
        "in/plain.yaml",
    ],
)
def test_a_recorded_command_requests_that_run_alone(folder, words):
    requests = read_requests(shlex.split(words))
    assert requests
    for request in requests:
        command = shlex.split(request.command)
        assert command[:2] == ["alma", "train"]
        assert read_requests(command[2:]) == [request], request.command
