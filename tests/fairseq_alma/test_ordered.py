"""Ordered streams: evaluation on every held-out part, validation and replay of a stage."""

import dataclasses

import numpy as np
import pytest

from alma.stream import Stream
from data_prep.__main__ import main as data_prep


@pytest.fixture(scope="module")
def ordered(text, tmp_path_factory):
    """A stream of two mega-batches: help, then reference; with the periods of a dated stream."""
    out = tmp_path_factory.mktemp("ordered") / "stream"
    sizes = (
        "--words 3000 --eval-words 800 --valid-words 800 --vocab-size 400 --max-document-words 40"
    )
    sources = (f"{name}={text}/{name}.txt" for name in ("help", "reference"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["data", *sources, "--ordered", "--out", str(out), *sizes.split()]
        )
        data_prep()
    stream = Stream.load(out)
    held_out = (
        dataclasses.replace(part, period=f"202{t}") for t, part in enumerate(stream.held_out)
    )
    dataclasses.replace(stream, held_out=tuple(held_out)).write()
    return out


def test_a_model_is_evaluated_on_the_held_out_part_of_every_megabatch(evaluate, ordered, tiny):
    names = ("test", "test_00", "test_01")
    result, *parts = (
        evaluate("--untrained", *tiny, "--gen-subset", name, data=ordered) for name in names
    )
    assert result["matrix"] == [part["perplexity"] for part in parts]
    assert result["matrix_periods"] == ["2020", "2021"]
    shares = [np.array(list(part.values())) for part in result["matrix_experts"]]
    assert len(shares) == 2
    assert all(np.allclose(share.sum(-1), 1) for share in shares)
    assert result["tokens"] not in [part["tokens"] for part in parts]


def test_a_stage_validates_on_its_own_megabatch_and_replays_earlier_ones(build, ordered):
    stream = Stream.load(ordered)
    for stage in (0, 1):
        replay = ("--replay-share", "0.5") if stage else ()
        task, _ = build("--stage", str(stage), *replay, data=ordered)
        for split, part in (
            ("valid", stream.held_out_valid[stage]),
            ("train", stream.megabatches[stage]),
        ):
            task.load_dataset(split)
            assert task.sources[split][0] == [stream.path(part)]
    blocks = task.dataset("train").dataset
    assert int(blocks.sizes.sum(dtype=int)) == pytest.approx(
        2 * stream.megabatches[1].tokens, abs=64
    )
    (earlier,) = blocks.earlier
    assert earlier.tokens.prefixes == [stream.path(stream.megabatches[0])]
