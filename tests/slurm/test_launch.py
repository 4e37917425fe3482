"""The launcher over fake children: rows, relaunches, refused command lines."""

import json
import re

import pytest
from launcher import ESTIMATE, ROOT, SMALL, finish, make, write_stream
from stand_ins import entry

from alma.files import write_json_atomic
from alma.records import Run
from slurm.engine import queue


def test_a_chain_gives_a_row_per_megabatch(launcher, expected):
    launcher.learner = "gmoe"
    out, err = launcher.run("--name", "mine")
    rows = launcher.rows
    assert [(row["t"], row["stage"], row["trained_on"]) for row in rows] == [
        (0, None, []), (1, 0, [1]), (2, 1, [2]), (3, 2, [3]), (4, 3, [4])
    ]  # fmt: skip
    assert [row["extra"]["experts"] for row in rows] == [4, 4, 6, 8, 10]
    assert [row["parameters"] for row in rows] == [4000, 4000, 6000, 8000, 10000]
    assert [row["train_flops"] for row in rows] == [0, *[2.001e12] * 4]
    assert len({row["value"] for row in rows}) == 5
    assert rows == expected
    header = "t stage experts parameters perplexity TFLOPs seconds".split()
    table = [line.split() for line in out.splitlines()]
    assert [cells[4] for cells in table[table.index(header) + 1 :][:5]] == [
        f"{row['value']:,.2f}" for row in rows
    ]
    lines = err.splitlines()
    assert [
        re.sub(r"\d+ s\b", "N s", line).partition(";")[0] for line in lines if "stage 1" in line
    ] == [
        "run stage 1: started",
        "run stage 1: done in N s",
        "run evaluation of stage 1: started",
        f"run evaluation of stage 1: done in N s, perplexity {rows[2]['value']:,.2f}",
    ]
    entries = [
        line.endswith(" left") for line in lines if ": done in" in line and "untrained" not in line
    ]
    assert entries == [True] * 6 + [False] * 2  # nothing is left after the last training
    assert lines[0] == "checking the flags of fairseq-train"
    assert lines[ESTIMATE] == "run untrained: started"
    assert Run.read(launcher.out).config["name"] == "mine"
    assert Run.read(launcher.out).info["stages"] == 4
    assert [row["extra"]["valid"] for row in rows] == [{"loss": 6.1, "perplexity": 400.0}] * 5
    assert [row["extra"].get("validation") for row in rows] == [None, *[5e8] * 4]
    assert (
        "--finetune-from-model run/stage_00/checkpoint_best.pt"
        in (launcher.out / "stage_01/train.log").read_text()
    )


def test_relaunching_a_complete_run_runs_nothing(launcher):
    launcher.run()
    (
        launcher.out / "stage_00/trained.json"
    ).unlink()  # as with the checkpoints of an evaluated stage
    logs = {path: path.read_bytes() for path in launcher.out.rglob("*") if path.is_file()}
    _, err = launcher.run()
    assert err.count("was complete") == 9
    assert {path: path.read_bytes() for path in launcher.out.rglob("*") if path.is_file()} == logs


def test_waiting_rows_carry_the_unchanged_model(launcher):
    for name in ("ordinary", "missing"):
        (launcher.folder / name).mkdir()
    launcher.data = "ordinary"  # cut into 3 mega-batches
    launcher.run("--waiting-time", "2", flags=("--max-update", "2", "--megabatch-words", "9"))
    rows = launcher.rows
    assert [(row["stage"], row["trained_on"]) for row in rows] == [(None, [])] * 2 + [
        (0, [1, 2]),
        (1, [3]),
    ]
    assert rows[1] == rows[0] | {"t": 1}
    _, err = launcher.run(
        "--out", "ids", "--dry-run", flags=("--max-update", "2", "--gpt2-encoder-json", "E")
    )
    assert "ordinary: few words\n" in err
    launcher.data = "missing"  # to fairseq
    _, err = launcher.run(code=2, flags=("--megabatch-words", "9"))
    assert err.splitlines()[-1] == "error: missing: no such directory"
    assert err.count("\n") == 3


@pytest.mark.parametrize(
    ("learner", "words", "members"),
    [("ens", ["--members", "3"], [3] * 5), ("gens", [], [1, 1, 2, 3, 4])],
)
def test_ensembles_train_all_members_or_a_new_one_in_each_stage(launcher, learner, words, members):
    launcher.learner = learner
    _, err = launcher.run(*words)
    rows = launcher.rows
    assert [row["extra"]["members"] for row in rows] == members
    assert [row["parameters"] for row in rows] == [4000 * count for count in members]
    trained = 3 if learner == "ens" else 1
    assert [row["train_flops"] for row in rows] == [0, *[trained * 2.001e12] * 4]
    assert err.count("done in") == 1 + 4 * (trained + 1)
    if learner == "ens":
        assert "run stage 1, member 2 of 3: started" in err
        log = (launcher.out / "stage_01/member_2/train.log").read_text()
        assert "--finetune-from-model run/stage_00/member_2/checkpoint_best.pt" in log
        assert Run.read(launcher.out).info["seeds"] == {
            "member_0": 0,
            "member_1": 1000,
            "member_2": 2000,
        }


def test_a_finished_run_resumes_with_more_stages_and_on_a_longer_stream(
    launcher, tmp_path, expected
):
    launcher.learner = "gmoe"
    launcher.run("--stages", "2")
    assert launcher.rows == expected[:3]
    launcher.run()
    before = launcher.rows
    assert before == expected
    write_stream(launcher.folder / "stream", 5)
    _, err = launcher.run()
    assert (err.count("was complete"), err.count("done in")) == (9, 2)
    assert launcher.rows[:5] == before
    at_once = make(tmp_path / "at_once", learner="gmoe")
    write_stream(at_once.folder / "stream", 5)
    at_once.run()
    assert launcher.rows == at_once.rows
    assert Run.read(launcher.out).config == Run.read(at_once.out).config
    write_stream(launcher.folder / "stream", 4)
    assert "megabatch_sha256: 5 values -> 4; megabatches: 5 -> 4" in launcher.run(code=2)[1]
    write_stream(launcher.folder / "stream", 6)
    record = json.loads((launcher.folder / "stream/stream.json").read_text())
    record["megabatches"].reverse()
    (launcher.folder / "stream/stream.json").write_text(json.dumps(record))
    assert "megabatch_sha256[0]: " in launcher.run(code=2)[1]


def test_a_stage_cut_short_by_the_end_of_a_shorter_stream_is_refused(launcher):
    launcher.run("--waiting-time", "3")
    write_stream(launcher.folder / "stream", 5)
    _, err = launcher.run("--waiting-time", "3", code=2)
    assert "stage 1 was trained when the stream ended with mega-batch 4" in err
    assert err.count("\n") == ESTIMATE + 1


def test_modules_in_the_current_folder_are_the_users(launcher):
    """A user's slurm.py beside the stream; `alma` itself does not look there."""
    for name in ("slurm", "vision", "alma", "fairseq_alma"):
        (launcher.folder / f"{name}.py").write_text("raise SystemExit('not this one')")
    words = ("stream", "--learner", "sm", "--out", "run", "--", *SMALL, "--max-update", "2")
    finish(launcher.start_words(*words, program=("-P", "-m", "slurm.launch")))
    assert len(launcher.rows) == 5


def test_other_settings_are_refused_where_something_was_trained(launcher):
    """Even in the first stage, whose checkpoint would be resumed."""
    launcher.environment["FAKE_CRASH"] = "0:1:user"
    launcher.run(code=2)
    for options in ((), ("--jobs", "2", "--dry-run")):
        _, err = launcher.run("--seed", "3", *options, code=2, flags=("--max-update", "3", *SMALL))
        assert err.splitlines()[ESTIMATE:] == [
            "error: run holds a run with other settings (--max-update: 2 -> 3; seed: 0 -> 3): "
            "choose another --out, or give that run's settings to resume it"
        ]
    write_stream(launcher.folder / "stream", 4, dictionary="other")
    _, err = launcher.run(code=2)
    assert "(stream_sha256: " in err
    del launcher.environment["FAKE_CRASH"]
    write_stream(launcher.folder / "stream", 4)
    launcher.run(flags=("--max-update=2", *SMALL))  # the same flags in another spelling
    assert len(launcher.rows) == 5


def test_a_dry_run_shows_a_short_plan_and_makes_nothing(launcher):
    on_slurm = ("--dry-run", "--cluster", "slurm")
    for options, printed in ((("--dry-run",), 0), (on_slurm, 1 + 4 + 4 + 1)):
        out, err = launcher.run(*options)
        assert (len(err.splitlines()), len(out.splitlines())) == (ESTIMATE, printed)
    out, err = launcher.run("--verbose", *on_slurm)
    assert "-m fairseq_alma.evaluate stream" in err
    assert "#SBATCH" in out
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["stream"]


def test_a_plan_needs_no_stream(launcher):
    words = ["--megabatches", "4", "--dry-run", "--cluster", "slurm"]
    table = str(ROOT / "experiments/table2.yaml")
    _, err = launcher.run_words(table, "runs=sm12_w1", *words, "--mem-gb", "1", "stream=missing")
    assert "assumed: 4 mega-batches, and a dictionary of 50,260 tokens" in err
    _, err = launcher.run_words(
        table, "runs=sm4_w1,gmoe_w1", "--dry-run", "--megabatches", "6", code=2
    )
    assert "gmoe_w1_base: --grow-experts 2,2,4: 3 growths given, but 6 stages grow 5 times" in err


CHECKED = "checking the flags of fairseq-train\nerror: "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dry-run -- --max-tokns 1", f"{CHECKED}unrecognized argument --max-tokns 1"),
        ("--cluster slurm --dry-run -- --arch switch_gmo", f"{CHECKED}--arch/-a: invalid choice"),
        ("--grow-experts 2 --", f"{CHECKED}run: --grow-experts needs --learner gmoe"),
        (
            "--jobs 3 --",
            f"{CHECKED}--jobs 3: GPUs on this machine: 2, and each training needs at least one",
        ),
        ("--jobs 0", "error: argument --jobs: '0' is not a positive whole number"),
        ("--seeds 2-0", "error: argument --seeds: 2-0: a range goes up: give 0-2"),
        (
            "--cluster slurm --jobs 1",
            "error: --jobs: not with --cluster slurm, only on this machine",
        ),
        ("--cluster slurm", "error: no SLURM here"),
        ("--partition high --wait", "error: --partition, --wait: only with --cluster slurm"),
        ("--mem-gb 8 --cluster local", "error: --mem-gb: only with --cluster slurm"),
        ("--megabatches 4", "error: --megabatches plans without a stream: add --dry-run"),
    ],
)
def test_bad_command_lines_are_one_line_before_anything_is_made(
    launcher, monkeypatch, words, message
):
    launcher.environment["PATH"] = str(launcher.folder)  # no sbatch
    monkeypatch.setattr("slurm.engine.machine._gpus", lambda: (1, 1))
    _, err = launcher.run_words("stream", "--learner", "sm", "--out", "run", *words.split(), code=2)
    assert err.startswith(message)
    assert err.count("\n") == message.count("\n") + 1
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["stream"]


def test_missing_data_and_a_file_in_the_way_are_refused(launcher):
    launcher.out.touch()
    assert "is not a folder" in launcher.run(code=2)[1]
    launcher.data = "strem"
    assert (
        launcher.run(code=2)[1]
        == "error: strem: no such directory; make a stream with `alma data`\n"
    )


def test_local_refuses_a_run_with_queued_jobs(launcher, slurm):
    """Unless squeue knows none of them."""
    launcher.run_name = "my run"
    out = ("--out", "my run")
    launcher.out.mkdir()
    entries = [entry("stage 0", "stage_00/trained.json", "77")]
    write_json_atomic(launcher.out / queue.JOBS, {"jobs": entries})
    slurm.has(squeue="77|RUNNING|node|0|None|\n")
    assert launcher.run(*out, code=2)[1].splitlines()[ESTIMATE:] == [
        "error: my run: jobs of this run are in SLURM's queue (job ids 77): give --cluster slurm, "
        "or cancel them with: alma cancel 'my run'"
    ]
    assert not (launcher.out / "run.json").exists()
    slurm.has(squeue="77|COMPLETED|node|0|None|\n")
    printed, _ = launcher.run(*out, "--stages", "1", "--jobs", "2")
    assert printed.endswith("compare runs with: alma report 'my run'\n")
    assert len(launcher.rows) == 2
