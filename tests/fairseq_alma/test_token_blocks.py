"""Blocks equal fairseq's, which builds an index for them."""

import gc
import multiprocessing
import pickle
import tempfile
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, TruncatedDictionary
from fairseq.tasks import FairseqTask
from hypothesis import example, given
from hypothesis import strategies as st

from alma.errors import UserError
from alma.stream import write_index
from fairseq_alma.data import preprocessed
from fairseq_alma.data.token_blocks import LanguageModelDataset, ReplayBlocks, TokenBlocks, Tokens

DICTIONARY = Dictionary()
for number in range(100):
    DICTIONARY.add_symbol(f"▁{number}")
EOS = DICTIONARY.eos()
PAD = DICTIONARY.pad()


def write(directory, files) -> list[str]:
    """Write a token file for each list of item sizes; returns the prefixes. Every item ends in
    eos."""
    rng = np.random.default_rng(0)
    prefixes = []
    for number, sizes in enumerate(files):
        tokens = rng.integers(4, len(DICTIONARY), sum(sizes), dtype=np.uint16)
        tokens[np.cumsum(sizes, dtype=int) - 1] = EOS
        prefixes.append(f"{directory}/{number}")
        tokens.tofile(f"{prefixes[-1]}.bin")
        write_index(f"{prefixes[-1]}.idx", np.array(sizes, np.int32), 8)
    return prefixes


def monolingual(blocks, **options) -> MonolingualDataset:
    return MonolingualDataset(
        blocks, blocks.sizes, DICTIONARY, shuffle=True, targets=["future"], **options
    )


def fairseqs(prefixes, length, items=None, **options) -> MonolingualDataset:
    indexed = preprocessed.indexed(prefixes)
    sizes = np.asarray(indexed.sizes)
    if items is not None:
        indexed, sizes = torch.utils.data.Subset(indexed, items), sizes[items]
    mode = {"pad": PAD, "eos": EOS, "break_mode": "none", "include_targets": True}
    return monolingual(TokenBlockDataset(indexed, sizes, length, **mode), **options)


def ours(prefixes, length, items=None, **options) -> MonolingualDataset:
    return monolingual(TokenBlocks(Tokens(prefixes, items), length, EOS), **options)


def batches_of(dataset, *args, **flags):
    return FairseqTask(SimpleNamespace()).get_batch_iterator(dataset, *args, **flags)


def same_items(a, b) -> None:
    assert len(a) == len(b)
    assert a.sizes.dtype == b.sizes.dtype
    assert a.sizes.tolist() == b.sizes.tolist()
    for k in range(len(a)):
        assert a[k]["id"] == b[k]["id"] == k
        assert torch.equal(a[k]["source"], b[k]["source"])
        assert torch.equal(a[k]["target"], b[k]["target"])


def some_items(files, seed: int) -> np.ndarray:
    """Runs of items in random order, all but one of them; a run may span two files."""
    rng = np.random.default_rng(seed)
    count = sum(map(len, files))
    runs = np.split(np.arange(count), np.sort(rng.integers(0, count, 4)))
    runs = [run for run in runs if len(run)]
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))[: max(1, len(runs) - 1)]])


@given(
    files=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=4),
    length=st.integers(1, 20),
    seed=st.none() | st.integers(0, 99),
)
@example(
    files=[[1], [1], [1]], length=2, seed=None
)  # one-token files: a block of two files, a short block
@example(files=[[4, 4], [8]], length=8, seed=None)  # blocks end where files end
@example(files=[[3]], length=20, seed=None)  # fewer tokens than a block
def test_every_block_equals_fairseqs(files, length, seed):
    with tempfile.TemporaryDirectory() as directory:
        prefixes = write(directory, files)
        items = None if seed is None else some_items(files, seed)
        blocks = ours(prefixes, length, items)
        same_items(blocks, fairseqs(prefixes, length, items))
        same_items(pickle.loads(pickle.dumps(blocks)), blocks)
        with pytest.raises(IndexError):
            blocks[len(blocks)]


@given(
    tokens=st.integers(1, 800),
    length=st.integers(1, 12),
    max_tokens=st.none() | st.integers(12, 300),
    max_sentences=st.integers(1, 40),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_batches_made_without_a_call_for_each_block_are_fairseqs(
    tokens, length, max_tokens, max_sentences, multiple
):
    blocks = TokenBlocks(range(tokens), length, EOS)
    options = (blocks, blocks.sizes, DICTIONARY)
    batches = []
    for kind in (LanguageModelDataset, MonolingualDataset):
        dataset = kind(*options, shuffle=True, targets=["future"])
        alma_batches = batches_of(
            dataset, max_tokens, max_sentences, required_batch_size_multiple=multiple
        )
        batches.append([batch.tolist() for batch in alma_batches.frozen_batches])
    assert batches[0] == batches[1]


def same_batches(alma_batches, peer) -> None:
    for a, b in zip(alma_batches, peer, strict=True):
        assert a["net_input"].keys() == b["net_input"].keys()
        for key in a["net_input"]:
            assert torch.equal(a["net_input"][key], b["net_input"][key])
        assert torch.equal(a["target"], b["target"])
        assert (a["id"].tolist(), a["ntokens"]) == (b["id"].tolist(), b["ntokens"])


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (1, {}),
        (0, {"add_bos_token": True}),
        (0, {"fixed_pad_length": 16, "pad_to_bsz": 8}),
    ],
)
def test_model_inputs_equal_fairseqs(tmp_path, workers, options):
    prefixes = write(tmp_path, [[7] * 40, [5] * 33])
    flags = {"seed": 5, "epoch": 3}
    alma_batches = batches_of(ours(prefixes, 16, **options), 64, num_workers=workers, **flags)
    peer = batches_of(fairseqs(prefixes, 16, **options), 64, **flags)
    same_batches([alma_batches.first_batch], [peer.first_batch])
    same_batches(alma_batches.next_epoch_itr(), peer.next_epoch_itr())


def test_workers_end_with_their_epoch(build, tmp_path):
    dataset = ours(write(tmp_path, [[9] * 500]), 8)
    batches = (
        build()[0]
        .get_batch_iterator(dataset, 32, num_workers=1, data_buffer_size=2)
        .next_epoch_itr()
    )
    before = multiprocessing.active_children()
    gc.disable()  # it would end forgotten workers, and wait 5 s for each
    try:
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - set(before)
        for _ in batches:
            pass
        deadline = time.monotonic() + 60
        while Path(f"/proc/{worker.pid}").exists():  # a thread of the loader waits for it
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()


def test_memory_does_not_grow_with_items_nor_pickles_with_tokens(tmp_path):
    prefixes = write(tmp_path, [[1] * 200_000])
    tracemalloc.start()
    dataset = ours(prefixes, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # of 400,000 bytes of tokens and 2,400,000 of index
    assert len(pickle.dumps(dataset.dataset)) < 2000


def test_files_without_items_are_skipped(tmp_path):
    prefixes = write(tmp_path, [[], [3, 2], [], [4]])
    for items in (None, np.array([2, 0])):
        same_items(ours(prefixes, 4, items), ours([prefixes[1], prefixes[3]], 4, items))


def test_a_smaller_output_dictionary_leaves_the_input_alone(tmp_path):
    prefixes = write(tmp_path, [[9] * 20])
    whole = ours(prefixes, 16)
    dataset = ours(prefixes, 16, tgt_vocab=TruncatedDictionary(DICTIONARY, 50))
    for k in range(len(dataset)):
        assert torch.equal(dataset[k]["source"], whole[k]["source"])
        expected = whole[k]["target"].where(whole[k]["target"] < 50, DICTIONARY.unk())
        assert torch.equal(dataset[k]["target"], expected)


@given(
    st.integers(1, 400),
    st.lists(st.integers(8, 300), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([0.1, 0.25, 0.5, 0.9]),
)
def test_replay_has_its_share_of_tokens_evenly_over_earlier_megabatches(
    size, earlier, length, share
):
    with tempfile.TemporaryDirectory() as folder:
        sizes = [[size], *([earlier_size] for earlier_size in earlier)]
        new, *past = (Tokens([prefix]) for prefix in write(folder, sizes))
        fresh = TokenBlocks(new, length, EOS)
        mixed = ReplayBlocks(fresh, past, share, seed=3)
        old = len(mixed) - len(fresh)
        assert abs(old * length - share / (1 - share) * size) <= length / 2 + 1e-6
        assert mixed.sizes.tolist() == [len(mixed[k][1]) for k in range(len(mixed))]
        for k in range(len(fresh)):
            assert all(torch.equal(a, b) for a, b in zip(mixed[k][:2], fresh[k][:2], strict=True))
        counts = [len(chosen) for chosen in mixed.chosen]
        assert max(counts) - min(counts) <= 1
        for chosen, tokens in zip(mixed.chosen, past, strict=True):
            uses = np.bincount(chosen, minlength=len(tokens) // length)
            assert uses.max() - uses.min() <= 1  # no block again before all others
        if old:
            number = int(mixed.chosen[0][0])
            blocks = TokenBlocks(past[0], length, EOS)
            assert torch.equal(mixed[len(fresh)][1], blocks[number][1])
        again = pickle.loads(pickle.dumps(ReplayBlocks(fresh, past, share, seed=3)))
        assert all(torch.equal(again[k][1], mixed[k][1]) for k in range(len(mixed)))


def test_each_stage_replays_other_blocks_and_the_same_after_a_resume(build):
    def chosen(stage: int) -> list[int]:
        task, _ = build("--stage", stage, "--replay-share", "0.5")
        task.load_dataset("train")
        return task.dataset("train").dataset.chosen[0].tolist()  # blocks of mega-batch 1

    assert chosen(2) == chosen(2)
    first = chosen(1)
    second = chosen(2)
    assert first[: len(second)] != second[: len(first)]


def test_replay_of_less_than_a_block_is_refused(tmp_path):
    new, past = (Tokens([prefix]) for prefix in write(tmp_path, [[40], [7]]))
    with pytest.raises(UserError, match="of 7 tokens is shorter than --tokens-per-sample 8"):
        ReplayBlocks(TokenBlocks(new, 8, EOS), [past], 0.5, seed=1)


def test_a_batch_says_whether_it_has_padding(tmp_path):
    blocks = TokenBlocks(Tokens(write(tmp_path, [[7] * 40])), 16, EOS)  # the last is short
    dataset = LanguageModelDataset(
        blocks, blocks.sizes, DICTIONARY, shuffle=True, targets=["future"]
    )
    last = len(dataset) - 1
    assert blocks.sizes[last] < 16
    assert [dataset.collater([dataset[0], dataset[k]])["padded"] for k in (1, last)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("options", [{}, {"fixed_pad_length": 20}, {"pad_to_bsz": 4}])
@pytest.mark.parametrize("chosen", [(), (1,), (0, 2, 1), (2, 0, 3)])  # 3: the short block
def test_a_batch_is_fairseqs(tmp_path, add_bos, options, chosen):
    blocks = TokenBlocks(Tokens(write(tmp_path, [[7] * 8])), 16, EOS)
    batches = []
    for kind in (LanguageModelDataset, MonolingualDataset):
        dataset = kind(
            blocks,
            blocks.sizes,
            DICTIONARY,
            shuffle=True,
            targets=["future"],
            add_bos_token=add_bos,
            **options,
        )
        batch = dataset.collater([dataset[min(k, len(dataset) - 1)] for k in chosen])
        batch.pop("padded", None)
        batches.append(batch)
    ours, fairseqs = batches
    assert ours.keys() == fairseqs.keys()
    if not chosen:
        return
    assert (ours["nsentences"], ours["ntokens"]) == (fairseqs["nsentences"], fairseqs["ntokens"])
    for name in ("id", "target"):
        assert torch.equal(ours[name], fairseqs[name])
        assert ours[name].dtype == fairseqs[name].dtype
    for name, tensor in fairseqs["net_input"].items():
        assert torch.equal(ours["net_input"][name], tensor)
        assert ours["net_input"][name].dtype == tensor.dtype


def test_blocks_of_one_length_are_stacked(tmp_path, monkeypatch):
    blocks = TokenBlocks(Tokens(write(tmp_path, [[7] * 8])), 16, EOS)
    dataset = LanguageModelDataset(
        blocks, blocks.sizes, DICTIONARY, shuffle=True, targets=["future"]
    )

    def row_by_row(self, samples):
        raise AssertionError("fairseq copies each row")

    monkeypatch.setattr(MonolingualDataset, "collater", row_by_row)
    assert dataset.collater([dataset[0], dataset[1]])["target"].shape == (2, 16)
