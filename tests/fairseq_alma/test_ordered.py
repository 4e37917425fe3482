"""Ordered streams: evaluation on every held-out part, validation and replay of a stage."""

import dataclasses

import numpy as np
import pytest

from alma.errors import UserError
from alma.evaluations import item_losses_file, read_item_losses
from alma.stream import Stream, document_losses, document_starts, write_index
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


@pytest.fixture
def trained(train, ordered, tmp_path):
    """`trained(flags)`: a checkpoint of four updates, with an average of the weights."""

    def run(flags):
        average = ("--store-ema", "--ema-decay", ".5") if "average" in flags else ()
        save = tmp_path / f"trained_{len(average)}"
        if not save.exists():
            train(save, "--max-update", "4", *average, data=ordered)
        return save / "checkpoint_last.pt"

    return run


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


@pytest.mark.parametrize(
    "flags",
    [
        ("--weights", "average"),
        pytest.param((), marks=pytest.mark.thorough),
        pytest.param(("--context-window", "16"), marks=pytest.mark.thorough),
    ],
)
def test_a_part_evaluated_alone_has_the_same_numbers_and_the_losses_of_its_documents(
    evaluate, ordered, tiny, trained, tmp_path, flags
):
    path = trained(flags)
    words = ["--path", path, "--tokens-per-sample", "64", "--stage", "1", *flags]
    whole = evaluate(*words, "--item-losses", tmp_path / "whole", data=ordered)
    alone = evaluate(*words, "--held-out", "2", "--item-losses", tmp_path / "alone", data=ordered)
    (cell,) = alone["held_out"]
    assert cell["value"] == whole["matrix"][1]
    assert cell["period"] == "2021"
    assert cell["experts"] == whole["matrix_experts"][1]
    assert cell.get("raw") == whole.get("raw", {"matrix": [None, None]})["matrix"][1]
    files = [item_losses_file(tmp_path / name, 1, 2) for name in ("whole", "alone")]
    losses, again = map(read_item_losses, files)
    assert np.array_equal(losses, again)
    part = Stream.load(ordered).held_out[1]
    assert losses.shape == (part.documents, 2)
    assert losses[:, 1].sum() == part.tokens == cell["tokens"]
    assert np.exp(losses[:, 0].sum() / part.tokens) == pytest.approx(cell["value"], rel=1e-7)
    assert not item_losses_file(tmp_path / "alone", 1, 1).exists()


def test_the_untrained_model_and_an_ensemble_are_tested_on_chosen_parts(
    evaluate, ordered, tiny, trained
):
    whole = evaluate("--untrained", *tiny, "--seeds", "1,2", data=ordered)
    alone = evaluate("--untrained", *tiny, "--seeds", "1,2", "--held-out", "1-2", data=ordered)
    assert [cell["value"] for cell in alone["held_out"]] == whole["matrix"]
    both = ["--path", f"{trained(())}:{trained(())}", "--tokens-per-sample", "64"]
    whole = evaluate(*both, data=ordered)
    alone = evaluate(*both, "--held-out", "2", data=ordered)
    assert alone["held_out"][0]["value"] == whole["matrix"][1]


def test_a_part_that_the_stream_lacks_is_one_line(start, ordered, stream, tiny, tmp_path):
    for data, parts in ((ordered, 2), (stream, 0)):
        words = ["--task", "alma_lm", "--out", tmp_path / "x", "--untrained", *tiny]
        done = start("evaluate", data, *words, "--held-out", "3").wait()
        assert done.code == 2
        assert f"--held-out 3: the stream has {parts} held-out parts" in done.output


def test_the_documents_of_a_part_are_lines_up_to_a_lone_eos_or_items(tmp_path):
    index = tmp_path / "test.idx"
    write_index(index, np.array([3, 2, 1, 4, 1]), 8)
    assert document_starts(index, 2).tolist() == [0, 6]
    assert document_starts(index, 5).tolist() == [0, 3, 5, 6, 10]  # of a Hugging Face tokenizer
    losses = document_losses(np.arange(11.0), index, 2)
    assert losses.tolist() == [[15.0, 6.0], [40.0, 5.0]]
    with pytest.raises(UserError, match="2 documents, not 3"):
        document_starts(index, 3)
    with pytest.raises(UserError, match="losses of 10 of 11 tokens"):
        document_losses(np.arange(10.0), index, 2)
