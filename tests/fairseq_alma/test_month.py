"""A stream that grows, with fairseq's trainings: the evaluation matrix of the stream in one go."""

from pathlib import Path

import pytest

from tests.growing import GrowingStream, assert_same

SMALL = """
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 32
    --max-tokens 512 --lr 1e-3 --max-update 2 --warmup-updates 1 --no-epoch-checkpoints
    --num-workers 0 --cpu
""".split()
RUNS = {
    "sm": ["--learner", "sm", "--replay-share", ".5"],
    "ens": ["--learner", "ens", "--members", "2", "--context-window", "8"],
    "umix": ["--learner", "umix", "--waiting-time", "2", "--replay"],
    "gens": ["--learner", "gens", "--waiting-time", "2"],
    "gmoe": ["--learner", "gmoe", "--grow-experts", "1", "--average", ".5"],
    "last": ["--learner", "sm", "--average", "last:2", "--schedule", "continuous"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_a_grown_stream_has_the_matrix_of_one_made_in_one_go(
    forked, monthly_stream, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    stream = GrowingStream(monthly_stream, Path("stream"))
    words = ["stream", *RUNS[name], "--out"]
    arch = ["--arch", "switch_gmoe_tiny"]
    saves = ["--save-interval-updates", "1"] if name == "last" else []
    for megabatches in (2, 4, 6):
        stream.has(megabatches)
        forked.launch(*words, "grown", "--", *arch, *SMALL, *saves)
    forked.launch(*words, "at_once", "--", *arch, *SMALL, *saves)
    assert_same("grown", "at_once")
