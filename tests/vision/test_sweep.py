"""Comma lists, and experiments: files with settings whose lists make a sweep."""

import pytest

from alma.errors import UserError
from tests.vision.conftest import jobs, python


def names(*words):
    return [job.out.name for job in jobs(*words)]


@pytest.fixture
def folder(tmp_path):
    """Two experiments, and their sizes beside them."""
    files = {
        "one": "size: big\nlearner: [sm, gmoe]\nwaiting-time: [1, all]\nreplay: [off, on]\n"
        "epochs: 3",
        "parts": "learner: gmoe\nseeds: 0-1\nruns:\n- {router: [tree, flat]}\n"
        "- {learner: moe, experts: 3}",
        "sizes": "sizes:\n  big: {dataset: mnist, hidden: [4, 64], epochs: 9, lr: 1e-3}\n"
        "  small: {megabatches: 6, hidden: 5}",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_every_setting_takes_a_comma_list():
    assert names("--lr", ".3,1", "--hidden", "4,8", "--seeds", "0-1") == [
        f"sm_w1_h{h}_lr-{lr}_s{seed}" for h in (4, 8) for lr in ("0.3", "1") for seed in (0, 1)
    ]
    planned = jobs(
        "--learner", "sm,gmoe", "--router", "tree,flat", "--augment", "off,on", "--replay", "off,on"
    )
    assert len(planned) == 2 * 2 + 2 * 2 * 2
    settings = ("augment", "router", "replay")
    assert {job.out.name: tuple(job.options.get(name) for name in settings) for job in planned} == {
        f"sm_w1_h32_augment-{a}{replay}_s0": (a == "on", None, bool(replay))
        for a in ("off", "on")
        for replay in ("", "_replay")
    } | {
        f"gmoe_w1_h32_augment-{a}_router-{router}{replay}_s0": (a == "on", router, bool(replay))
        for a in ("off", "on")
        for router in ("tree", "flat")
        for replay in ("", "_replay")
    }
    assert names("--epochs", "2,3", "--preset", "paper,authors", "--megabatches", "4,5")[0] == (
        "sm_w1_h32_megabatches-4_preset-paper_epochs-2_s0"
    )


def test_a_single_run_does_not_write_among_the_folders_of_a_sweep(tmp_path):
    (tmp_path / "sm_s0").mkdir()
    (tmp_path / "sm_s0/run.json").touch()
    assert len(jobs("--seeds", "0-1", "--out", tmp_path)) == 2
    with pytest.raises(UserError, match="has runs in folders of their own: give --out .*/NAME"):
        jobs("--out", tmp_path)
    (tmp_path / "run.json").touch()
    assert [job.out for job in jobs("--out", tmp_path)] == [tmp_path]
    with pytest.raises(UserError, match="is a single run: give a sweep another --out"):
        jobs("--seeds", "0-1", "--out", tmp_path)


def test_what_does_not_vary_is_not_in_the_name():
    assert names("--lr", "3", "--router", "flat", "--learner", "sm,gmoe", "--augment") == [
        "sm_w1_h32_s0",
        "gmoe_w1_h32_s0",
    ]
    # The second value of --gate applies to gens with several experts only.
    assert names("--learner", "gens", "--gate", "soft,hard", "--experts", "1,2") == [
        f"gens_w1_h32_gate-{gate}_experts-{experts}_s0"
        for gate, experts in (("soft", 1), ("soft", 2), ("hard", 2))
    ]


def test_other_names_of_the_same_run_are_one_run():
    assert len(jobs("--replay-share", "0,.5", "--replay-from", "all,recent", "--out", "R")) == 3
    assert len(jobs("--preset", "paper,draft", "--megabatches", "20", "--out", "R")) == 1
    assert len(jobs("--dataset", "mnist", "--preset", "paper,draft", "--out", "R")) == 2


def test_all_waits_for_the_whole_stream():
    (job,) = jobs("--scenario", "classes", "--waiting-time", "all")
    assert (job.megabatches, job.scenario, job.options["waiting_time"]) == (5, "classes", 5)
    planned = jobs("--dataset", "mnist", "--waiting-time", "10,all,500")
    assert [job.options["waiting_time"] for job in planned] == [10, 500]
    assert [
        job.options["waiting_time"] for job in jobs("--megabatches", 7, "--waiting-time", "all")
    ] == [7]


def test_an_experiment_is_a_sweep_that_its_size_completes(folder):
    planned = jobs(folder / "one.yaml")
    assert {str(job.out.parent) for job in planned} == {"runs/one"}
    assert len(planned) == 2 * 2 * 2 * 2
    first = planned[0]
    assert (first.dataset["name"], first.megabatches, first.out.name) == (
        "mnist",
        500,
        "sm_w1_h4_s0",
    )
    assert (first.options["epochs"], first.options["lr"]) == (
        3,
        0.001,
    )  # the file overrides its size
    small = jobs(folder / "one.yaml", "--size", "small")
    assert {(job.dataset["name"], job.megabatches, job.options["hidden"]) for job in small} == {
        ("digits", 6, 5)
    }
    assert {str(job.out.parent) for job in small} == {"runs/one_small"}
    assert small[-1].out.name == "gmoe_w6_h5_replay_s0"
    (folder / "last.yaml").write_text(
        "learner: sm\nreplay: on"
    )  # the file's name is not a value of --replay
    assert names(folder / "last.yaml") == ["sm_w1_h32_replay_s0"]


def test_flags_override_the_file(folder):
    words = "--learner ens --no-replay --seed 3 --epochs 7 --waiting-time 2".split()
    words += ["--hidden", "4", "--out", "there"]
    (job,) = jobs(folder / "one.yaml", *words)
    assert str(job.out) == "there/ens_w2_h4_s3"  # of an experiment: always a folder of runs
    assert job.options["epochs"] == 7
    assert job.options["replay"] is False
    assert names(*words[2:], folder / "parts.yaml")[:2] == [
        "gmoe_w2_h4_router-tree_s3",
        "gmoe_w2_h4_router-flat_s3",
    ]


def test_sections_have_settings_of_their_own_and_share_no_run(folder):
    assert names(folder / "parts.yaml") == [
        *(f"gmoe_w1_h32_router-{router}_s{seed}" for router in ("tree", "flat") for seed in (0, 1)),
        *(f"moe_w1_h32_s{seed}" for seed in (0, 1)),
    ]
    assert {job.options.get("experts") for job in jobs(folder / "parts.yaml")} == {None, 3}
    # A flag that some section's learner takes is not refused by the others; equal runs are one.
    path = folder / "twice.yaml"
    path.write_text("runs: [{learner: sm}, {learner: [sm, gmoe], waiting-time: 1}]")
    assert names(path, "--experts", 2) == ["sm_w1_h32_s0", "gmoe_w1_h32_s0"]
    path.write_text("runs: [{learner: sm}, {learner: sm, lr: 3}]")
    assert names(path) == ["sm_w1_h32_lr-1_s0", "sm_w1_h32_lr-3_s0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnr: sm", "new.yaml: learnr is not a setting .did you mean learner"),
        ("learner: smm", "new.yaml: argument --learner: 'smm': did you mean sm"),
        ("lr: fast", "new.yaml: argument --lr: 'fast': a number, or a list"),
        ("epochs: 1.5", "new.yaml: argument --epochs: '1.5': a whole number"),
        ("replay: [maybe]", "new.yaml: argument --replay.*: 'maybe': off, on or off,on"),
        ("lr: {high: 1}", "new.yaml: lr: give a value, or a list"),
        ("lr:", "new.yaml: lr: give a value, or a list"),
        ("runs: 3", "new.yaml: give options, flags and runs as"),
        ("jobs: 2", "new.yaml: jobs says how to run: give --jobs on the command line"),
        ("cluster: slurm", "new.yaml: cluster says how to run"),
        ("members: 2", "--members does not apply to sm: it is a setting of ens, umix"),
        ("runs: [{learner: sm}, {learner: ff, gate: hard}]", "--gate does not apply to ff"),
    ],
)
def test_bad_experiments_are_one_clear_line(folder, text, message):
    (folder / "new.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        jobs(folder / "new.yaml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ones.yaml", r"ones.yaml: no such experiment; did you mean .*one.yaml\?"),
        ("--size small", "--size is for experiments"),
        ("--replay experiments/figure7.yaml", "give an experiment before flags"),
        ("--no-replay off", "off, on or off,on"),
        ("--router tree,fat", r"'fat': did you mean flat"),
        ("--megabatches 0", "a stream needs at least 1 mega-batch, not 0"),
        ("--image-size 8,0", "--image-size 0: at least 1"),
        ("--image-size 8 --resize-size 9,4", "--resize-size 4: at least --image-size"),
        ("--cache-images there", "--cache-images needs --dataset folder"),
        ("--save-interval -1", "--save-interval -1: give seconds from 0 on"),
        ("--waiting-time 1,21", "waiting time 21 is longer"),
        ("--waiting-time 0 --preset draft --learner gmoe", "waiting time 0: use 1"),
        ("--replay-share 0,2", "--replay-share 2.0: a share"),
        ("--replay-from recent", "--replay-from recent needs --replay-share"),
        ("--replay-share .5 --replay off,on", "leave out --replay or --replay-share"),
    ],
)
def test_bad_lists_are_one_clear_line(folder, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        jobs(*words.split())


@pytest.mark.parametrize("module", ["vision.run", "vision.tsne"])
def test_the_help_loads_nothing_heavy(module):
    code = f"import importlib, sys\nimportlib.import_module({module!r}).parser().format_help()\n"
    code += "print(*sys.modules)"
    heavy = {
        "torch",
        "torchvision",
        "numpy",
        "sklearn",
        "matplotlib",
        "yaml",
        "tensorboardX",
        "tqdm",
    }
    assert not heavy & set(python("-c", code).stdout.split())


def test_as_a_module_from_anywhere_without_a_warning(tmp_path):
    done = python("-m", "vision.run", "--list", "--seeds", "0-1", "--out", "x", folder=tmp_path)
    assert (done.stdout, done.stderr) == ("x/sm_w1_h32_s0\nx/sm_w1_h32_s1\n", "")
