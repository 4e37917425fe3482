"""An epoch of text with replay, as docs/concepts.md states it:
old blocks are added to the new ones."""

import pytest

from alma.stream import Stream

LENGTH = 64


def drawn(build, *flags: str) -> tuple[int, list[int]]:
    """New tokens of an epoch of the third stage, and blocks of each mega-batch that are replayed.

    Every block is in the epoch once.
    """
    task, _ = build("--stage", "2", *flags)
    task.load_dataset("train")
    data = task.dataset("train")
    batches = task.get_batch_iterator(data, max_tokens=8 * LENGTH, seed=1).next_epoch_itr()
    ids = [number for batch in batches for number in batch["id"].tolist()]
    assert sorted(ids) == list(range(len(data)))
    replayed = list(map(len, getattr(data.dataset, "chosen", [])))
    tokens = sum(len(data[number]["target"]) for number in ids)
    return tokens - LENGTH * sum(replayed), replayed


def test_an_epoch_adds_old_blocks_to_the_new_ones(build, stream):
    sizes = [part.tokens for part in Stream.load(stream).megabatches]
    new = sizes[2]
    assert drawn(build) == (new, [])
    assert drawn(build, "--replay") == (sum(sizes), [])
    for share in (0.25, 0.5, 0.75):
        old = round(new * share / (1 - share) / LENGTH)
        flags = ("--replay-share", str(share))
        assert drawn(build, *flags) == (new, [old - old // 2, old // 2])
        assert drawn(build, *flags, "--replay-from", "recent") == (new, [old])
    task, _ = build("--stage", "0")  # the launcher gives no share there
    task.load_dataset("train")
    assert len(task.dataset("train")) == -(-sizes[0] // LENGTH)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_replay_leaves_validation_and_test_as_they_are(build, split):
    sizes = set()
    for flags in ((), ("--replay",), ("--replay-share", "0.5")):
        task, _ = build("--stage", "2", *flags)
        task.load_dataset(split)
        sizes.add(int(task.dataset(split).sizes.sum()))
    assert len(sizes) == 1
