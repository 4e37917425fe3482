"""Lists in experiments of language models: every combination is a run in a folder of its own."""

import shlex
from pathlib import Path

import pytest
from launcher import ROOT, SMALL, read_requests

from alma.errors import UserError
from alma.records import Run
from slurm.lm.plan import make_plan

TUNED = """\
learner: [sm, gmoe]
waiting-time: [1, 2]
stream: stream
flags: {arch: switch_gmoe_tiny, max-update: 2, lr: 1e-3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with an experiment of four combinations."""
    monkeypatch.chdir(tmp_path)
    Path("set/sizes").mkdir(parents=True)
    Path("set/tuned.yaml").write_text(TUNED)
    Path("set/plain.yaml").write_text("learner: sm\nsize: tiny")
    Path("set/sizes/tiny.yaml").write_text("stream: stream\nreplay: [false, true]\nflags: {lr: [1e-3, 2e-3]}")
    return tmp_path


def outs(*words):
    return [str(each.out.relative_to("runs/set")) for each in read_requests([*words])]


def test_every_combination_has_a_folder_and_its_settings(folder):
    found = read_requests(["set/tuned.yaml", "lr=2e-4,1e-3", "--seeds", "0-1"])
    settings = [
        (each.out.name, each.learner, each.waiting_time, each.flags["--lr"], each.seed) for each in found
    ]
    assert settings == [
        (f"learner-{learner}_waiting-time-{w}_lr-{lr}_s{seed}", learner, w, [f"--lr={lr}"], seed)
        for learner in ("sm", "gmoe")
        for w in (1, 2)
        for lr in ("2e-4", "1e-3")
        for seed in (0, 1)
    ]
    assert {str(each.out.parent) for each in found} == {"runs/set/tuned"}
    assert all(make_plan(each, 4).stages for each in found)
    assert outs("set/plain.yaml", "lr=3e-3")[0] == "plain_tiny/replay-off_lr-3e-3"  # joins the others
    assert [each.replay for each in read_requests(["set/plain.yaml", "lr="])] == [False, True]
    assert [str(each.out) for each in read_requests(["set/plain.yaml", "lr=", "--out", "there"])] == [
        "there/replay-off",
        "there/replay-on",
    ]


def test_which_commas_separate_values(folder):
    """Brackets are a list; a bare comma list is one, unless the option takes a comma list itself."""
    words = ["set/tuned.yaml", "learner=gmoe", "waiting-time=1"]
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
    Path("set/tuned.yaml").write_text(TUNED.replace("}", ', adam-betas: "(0.9,0.98)"}'))
    (one,) = read_requests([*words, "adam-betas=(0.9,0.99)"])
    assert one.flags["--adam-betas"] == ["--adam-betas=(0.9,0.99)"]
    assert outs(*words, "adam-betas=['(0.9,0.98)','(0.8,0.9)']")[1] == f"{prefix}_adam-betas-0.8-0.9"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=[]"], "key=value: lr: give a list of values"),
        (["lr=[1e-3,~]"], "key=value: lr: give a list of values"),
        (["stream=[a,b]"], "key=value: stream takes one value, not a list"),
        (["seed=[0,1]"], "seed takes one value, not a list; several seeds are `seeds: 0-2`"),
        (["grow-experts=[2,2,4]"], "have the folder grow-experts-2; a value with commas needs quotes"),
        (["jobs=1,2"], "--jobs says where to run"),
        (["learner=sm,gmo"], "set/tuned.yaml: argument --learner: .*did you mean gmoe"),
        (["replay=off,maybe"], "argument --replay: ignored explicit argument 'maybe'"),
        (["lr=1e-3,2e-3", "--", "--lr", "1"], "lr is a list: give lr=VALUE in place of --lr"),
    ],
)
def test_bad_lists_are_one_clear_line(folder, words, message):
    with pytest.raises(UserError, match=message) as refused:
        read_requests(["set/tuned.yaml", *words])
    assert "\n" not in str(refused.value)


def test_no_run_lies_in_another_one(folder):
    Path("runs/set/tuned").mkdir(parents=True)
    Path("runs/set/tuned/run.json").touch()
    with pytest.raises(UserError, match="runs/set/tuned is a single run: give a sweep another --out"):
        read_requests(["set/tuned.yaml", "--seeds", "0-1"])
    assert read_requests(["set/tuned.yaml", "--out", "runs/set"])
    single = ["stream", "--learner", "sm", "--out", "runs/set"]
    with pytest.raises(UserError, match="runs/set has runs in folders .*: give --out runs/set/NAME"):
        read_requests(single)
    assert [each.out.name for each in read_requests([*single, "--seeds", "0-1"])] == ["set_s0", "set_s1"]


@pytest.mark.parametrize("size", ["base", "tiny"])
def test_the_experiments_that_tune(monkeypatch, size):
    monkeypatch.chdir(ROOT)
    found = read_requests(["experiments/tune", "--size", size, "learner=sm,gmoe"])
    assert len(found) == 2 * (5 + 4 + 3)
    assert all(len(make_plan(each, 4).stages) == 1 for each in found)
    rates = {each.settings["--lr"][0] for each in found if each.out.parent.name == f"lr_{size}"}
    assert (min(rates), max(rates), len(rates)) == (2e-4, 5e-3, 5)


def test_combinations_are_checked_before_the_first_one_starts(launcher):
    """Then they train; a second start trains nothing."""
    (launcher.folder / "tuned.yaml").write_text(TUNED)

    def start(*words):
        process = launcher.start_words("tuned.yaml", "waiting-time=2", "out=runs", *words, "--jobs", "2")
        return process.communicate(timeout=60)[1], process.returncode

    for bad in ("max-update=2,fast", "members=2,3"):
        err, code = start(bad)
        assert (code, err.splitlines()[-1].partition(":")[0]) == (2, "error"), err
    assert start("--dry-run")[1] == 0
    assert not (launcher.folder / "runs").exists()
    assert start()[1] == 0
    places = sorted(path.parent for path in (launcher.folder / "runs").glob("*/run.json"))
    assert [path.name for path in places] == ["learner-gmoe_waiting-time-2", "learner-sm_waiting-time-2"]
    assert [len(Run.read(path).rows) for path in places] == [5, 5]
    assert "training" not in start()[0]


@pytest.mark.parametrize(
    "words",
    [
        "S --learner sm --out R",
        "S --learner ens --members 3 --replay --seeds 0-1 --name 'a b' --out R -- --lr 1e-3 --cpu",
        "S --learner gmoe --grow-experts 2,2,4 --grow-router copy --stages 2 --out R -- --lr=2e-3",
        "S --learner sm --schedule rsqrt --average .999 --replay-share .5 --cooldown .1 --seed 7 --out R",
        "S --learner sm --average last:2 --from-scratch --context-window 4 --update-multiplier 3 --out R --"
        " --save-interval-updates 9 --max-update 60 --adam-betas '(0.9, 0.98)'",
        "set/tuned.yaml lr=1e-3,2e-3",
        "set/plain.yaml",
    ],
)
def test_a_recorded_command_requests_that_run_alone(folder, words):
    found = read_requests(shlex.split(words))
    assert found
    for request in found:
        command = shlex.split(request.command)
        assert command[:2] == ["alma", "train"]
        assert read_requests(command[2:]) == [request], request.command


def test_a_recorded_command_repeats_the_run(launcher):
    launcher.learner = "gmoe"
    launcher.run("--grow-experts", "1", "--seed", "5", flags=(*SMALL, "--max-update", "3"))
    first, rows = Run.read(launcher.out), launcher.rows
    words = shlex.split(first.info["command"])[2:]
    words[words.index("--out") + 1] = launcher.run_name = "again"
    launcher.run_words(*words)
    assert launcher.rows == rows
    assert Run.read(launcher.out).config == first.config
    assert shlex.split(Run.read(launcher.out).info["command"])[2:] == words
