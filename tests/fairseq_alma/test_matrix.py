"""Every schedule, average, optimizer and model that docs/language.md names,
with fairseq's own training.

The launcher trains two stages and evaluates both; the first one is killed and resumed.
"""

import itertools

import pytest

from alma.records import Run

BASE = """
    --tokens-per-sample 32 --max-tokens 512 --lr 1e-3 --max-update 4 --warmup-updates 1
    --save-interval-updates 2 --no-epoch-checkpoints --num-workers 0 --cpu
""".split()
SMALL = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2"
SWITCH = f"--arch switch_gmoe_tiny {SMALL}".split()
SCHEDULES = ("stage", "continuous")
AVERAGES = ("", ".5", "poly:4", "last:2")
OPTIMIZERS = ("adam", "adamax", "nag", "sgd", "adagrad", "adadelta", "adafactor")
LSTM = "--decoder-embed-dim 16 --decoder-hidden-size 16 --decoder-out-embed-dim 16"
MODELS = {
    "transformer_lm": f"{SMALL} --decoder-ffn-embed-dim 32",
    "transformer_lm_gpt": f"{SMALL} --decoder-ffn-embed-dim 32",
    "lstm_lm": LSTM,
    "fconv_lm": "--decoder-layers [(16,3)]*2 --decoder-embed-dim 16",
    "lightconv_lm": f"{SMALL} --decoder-ffn-embed-dim 32 --decoder-kernel-size-list [3,3]",
}
FAST = ("lstm_lm",)


def thinned(names) -> list:
    """All but FAST are thorough."""
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in names
    ]


def schedules() -> list:
    """Every schedule and average; all but one are thorough."""
    fast = ("continuous", "poly:4")
    pairs = itertools.product(SCHEDULES, AVERAGES)
    return [
        pytest.param(*pair, marks=() if pair == fast else pytest.mark.thorough) for pair in pairs
    ]


@pytest.fixture
def run(forked, stream, tmp_path):
    """`run(options, flags)` launches two stages, kills the first one after two updates,
    launches again and returns the rows at the ends of the stages."""

    def launch(options: list[str], flags: list[str]) -> list[dict]:
        out = tmp_path / "run"
        words = [stream, "--out", out, "--stages", "2", *options, "--", *BASE, *flags]
        forked.kill = ("stage_00", 2)
        with pytest.raises(forked.Killed):
            forked.launch(*words)
        forked.launch(*words)
        rows = Run.read(out).rows
        assert [row["stage"] for row in rows] == [None, 0, 1]
        assert rows[2]["value"] < rows[1]["value"] < rows[0]["value"]
        assert all(row["train_flops"] > 0 for row in rows[1:])
        return rows

    return launch


@pytest.mark.parametrize(("schedule", "average"), schedules())
def test_every_schedule(run, schedule, average):
    options = ["--learner", "sm", "--schedule", schedule]
    options += ["--average", average] if average else []
    run(
        options,
        [*SWITCH, *(["--save-interval-updates", "1"] if average.startswith("last") else [])],
    )


@pytest.mark.parametrize("optimizer", thinned(OPTIMIZERS))
def test_every_optimizer(run, optimizer):
    options = "--learner gmoe --schedule continuous --grow-experts 2".split()
    run(options, [*SWITCH, "--optimizer", optimizer])


@pytest.mark.parametrize("model", thinned(MODELS))
def test_every_model(run, model):
    run(["--learner", "sm"], ["--arch", model, *MODELS[model].split()])
