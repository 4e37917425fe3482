"""Every learner on real text, from the launcher's plan to the paper's tables,
and interrupted in between.

The launcher runs in this process and its children are forked, so that fairseq is imported once.
"""

import itertools
from pathlib import Path

import pytest

from alma.learners import text_learners
from alma.records import Run
from tests.machine_fields import without_machine_fields

FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --max-tokens 1024 --optimizer adam --lr 1e-2
    --lr-scheduler polynomial_decay --total-num-update 8 --max-update 8 --warmup-updates 2
    --save-interval-updates 3 --keep-interval-updates 1 --no-epoch-checkpoints --num-workers 0 --cpu
""".split()

RUNS = [
    ("sm", "1"),
    ("moe", "1"),
    ("gens", "1"),
    ("ens", "2"),
    ("umix", "2"),
    ("gens", "2"),
    ("gmoe", "2"),
]
"""Learners and waiting times; those that wait also replay."""
LAST = {"sm_w1": 461.26, "moe_w1": 461.26, "gens_w1": 644.17, "ens_w2": 455.61, "umix_w2": 439.12}
LAST |= {"gens_w2": 700.91, "gmoe_w2": 509.01}
"""Their last perplexities, as an earlier version had them; CPUs round in their own ways."""


def run(forked, stream, out, *options) -> list[dict]:
    """The rows of a run without what belongs to the machine."""
    forked.launch(stream, "--out", out, *options, "--", *FLAGS)
    return without_machine_fields(Run.read(out).rows)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Folder of runs that several tests read: to launch a complete run again only reads it."""
    return tmp_path_factory.mktemp("learners") / "runs"


def whole(forked, stream, finished, learner: str, wait: str = "1") -> list[dict]:
    """The rows of an uninterrupted run; with waiting time 2 it replays."""
    options = ["--learner", learner, "--waiting-time", wait, *(["--replay"] if wait == "2" else [])]
    return run(forked, stream, finished / f"{learner}_w{wait}", *options)


@pytest.mark.thorough
def test_every_learner_trains_and_the_report_prints_both_tables(
    forked, stream, finished, tmp_path, capsys
):
    from alma.report.__main__ import main

    assert {learner for learner, _ in RUNS} == set(text_learners())
    values = {}
    for learner, wait in RUNS:
        name = f"{learner}_w{wait}"
        rows = whole(forked, stream, finished, learner, wait)
        stages = [None, 0, 1, 2] if wait == "1" else [None, None, 0, 1]
        assert [row["stage"] for row in rows] == stages, name
        values[name] = [row["value"] for row in rows]
        assert values[name][-1] < 0.5 * values[name][0]
        members = {
            "ens": [2] * 4,
            "umix": [2] * 4,
            "gens": [1 if s is None else s + 1 for s in stages],
        }
        assert [row["extra"]["members"] for row in rows] == members.get(learner, [1] * 4)
        trained = [stage != before for before, stage in itertools.pairwise([None, *stages])]
        assert [row["train_flops"] > 0 for row in rows] == trained
    assert {name: losses[-1] for name, losses in values.items()} == pytest.approx(LAST, rel=0.01)
    assert values["sm_w1"] == values["moe_w1"]
    assert values["gens_w1"][:2] == values["sm_w1"][:2]  # gens with one stage is sm
    tripled = ("--learner", "sm", "--waiting-time", "3", "--update-multiplier", "3")
    run(forked, stream, finished / "iid", *tripled)
    capsys.readouterr()
    report = ["report", str(finished), "--table", "lm", "--out", str(tmp_path / "report")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", report)
        main()
    printed = capsys.readouterr().out
    names = ["Ens_w2", "UMix_w2", "gEns_w1", "gEns_w2", "gMoE_w2", "MoE_w1", "SM_w3 (3x steps)"]
    for line in ("Table 1", "Table 2", *names):
        assert line in printed, line
    assert "4@2" in printed


@pytest.mark.thorough
def test_an_ensemble_of_one_is_sm(forked, stream, finished, tmp_path):
    sm = whole(forked, stream, finished, "sm")[:3]
    for learner in ("ens", "umix"):
        options = ("--learner", learner, "--members", "1", "--stages", "2")
        assert run(forked, stream, tmp_path / learner, *options) == sm


SLOW = [pytest.param(learner, marks=pytest.mark.slow) for learner in ("umix", "gens")]


@pytest.mark.parametrize(
    "learner", [pytest.param("ens", marks=pytest.mark.thorough), "gmoe", *SLOW]
)
def test_killed_within_a_stage_it_goes_on_with_the_same_numbers(
    forked, stream, finished, tmp_path, learner
):
    out = tmp_path / "killed"
    options = ("--learner", learner, "--waiting-time", "2", "--replay")
    for update in (3, 6):
        forked.kill = ("stage_00/member_1" if learner == "ens" else "stage_01", update)
        with pytest.raises(forked.Killed):
            run(forked, stream, out, *options)
    assert run(forked, stream, out, *options) == whole(forked, stream, finished, learner, "2")
