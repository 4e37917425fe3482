"""Number of updates and tokens of a stage whose training ends by `--max-epoch`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alma.epochs import batches_of, passes_in, replayed_blocks, updates_of_epoch
from alma.stages import Stage


@dataclass(frozen=True)
class Length:
    """Length of a training."""

    updates: int | None  # None: no limit, or unknown
    tokens: int | None = None  # tokens of all epochs; None: follows from the updates


def length_of(
    settings: Mapping[str, Any], sizes: Sequence[int], stage: Stage, replay: bool, share: float
) -> Length:
    """Length of the training of `stage` for --max-epoch epochs.

    settings: value of each flag of fairseq-train; sizes: tokens of each mega-batch; replay, share:
    --replay and --replay-share. Unknown without `sizes`, or if batches have no limit.
    """
    if not sizes:
        return Length(None)
    first = 1 if replay else stage.first
    new = sum(sizes[first - 1 : stage.last])
    length = settings["--tokens-per-sample"]
    blocks = -(-new // length)
    padding = blocks * length - new  # tokens by which the last new block is shorter
    if share and stage.index:
        blocks += replayed_blocks(share, new, length)
    limits = (settings["--batch-size"], settings["--max-tokens"], length)
    batches, kept = batches_of(blocks, *limits, settings["--required-batch-size-multiple"])
    if not batches:
        return Length(None)
    processes = settings["--distributed-world-size"] or 1
    share_of_process = -(-batches // processes)
    if settings["--grouped-shuffling"]:
        share_of_process = batches // processes
    epochs = range(1, settings["--max-epoch"] + 1)
    skip = settings["--skip-remainder-batch"]
    updates = 0
    for epoch in epochs:
        passes = passes_in(epoch, settings["--update-freq"])
        updates += updates_of_epoch(share_of_process, passes, skip)
    return Length(updates, None if skip else len(epochs) * (kept * length - padding))


def length_in_blocks(
    settings: Mapping[str, Any], sizes: Sequence[int], stage: Stage, replay: bool, share: float
) -> Length:
    """As `length_of`, for the engine transformers, whose updates all have full batches.

    The last update may therefore go beyond the last epoch.
    """
    if not sizes:
        return Length(None)
    targets = settings["--tokens-per-sample"]
    first = 1 if replay else stage.first
    new = sizes[first - 1 : stage.last]
    blocks = sum(-(-size // targets) for size in new)
    if share and stage.index:
        blocks += replayed_blocks(share, sum(new), targets)
    processes = settings["--distributed-world-size"] or 1
    batch = settings["--batch-size"] * settings["--update-freq"][0] * processes
    return Length(math.ceil(settings["--max-epoch"] * blocks / batch))
