"""Number of updates and tokens in whole epochs (`--max-epoch`).

Used both to plan a training and within it, so that the two agree.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alma.batches import tokens_of

if TYPE_CHECKING:
    import numpy as np

WARMUP = 500
"""Updates of linear warm-up before the linear decay to 0; at most a tenth of all updates."""


def warmup_of(updates: int) -> int:
    """Updates of warm-up of a schedule of so many updates."""
    return min(WARMUP, updates // 10)


def replayed_blocks(share: float, tokens: int, length: int) -> int:
    """Blocks of earlier mega-batches that are `share` of all tokens, beside `tokens` new ones.

    `alma.stages` describes replay.
    """
    return round(share / (1 - share) * tokens / length)


def draw_replayed(
    replayed: int, whole_blocks: Sequence[int], rng: "np.random.Generator"
) -> list["np.ndarray"]:
    """Numbers of the replayed blocks of each earlier mega-batch, which has so many whole blocks.

    Each mega-batch gives equally many, up to one; one with too few repeats them.
    """
    import numpy as np

    drawn = []
    for position, available in enumerate(whole_blocks):
        count = replayed // len(whole_blocks)
        if position < replayed % len(whole_blocks):
            count += 1
        passes = -(-count // available)
        blocks = [np.empty(0, np.int64)]
        blocks += [rng.permutation(available) for _ in range(passes)]
        drawn.append(np.concatenate(blocks)[:count])
    return drawn


def batches_of(
    blocks: int, batch_size: int | None, max_tokens: int | None, length: int, multiple: int
) -> tuple[int, int]:
    """Batches of one epoch over blocks of `length` tokens, and the blocks in them.

    `multiple` is --required-batch-size-multiple. fairseq drops a last batch whose size is no
    multiple of it, unless the whole epoch has fewer blocks than `multiple` (`AlmaLMTask`). If
    --batch-size is above `multiple` and no multiple of it, fairseq's batches near the end of an
    epoch may differ from this count.
    """
    if blocks < multiple:
        multiple = 1
    size = (tokens_of(1, batch_size, max_tokens, length, multiple) or 0) // length
    if not size:
        return 0, 0
    full, rest = divmod(blocks, size)
    batches = [size] * full
    whole = rest // multiple * multiple if size > multiple else 0
    batches += [rest_size for rest_size in (whole, rest - whole) if rest_size]
    if batches[-1] % multiple:
        batches.pop()
    return len(batches), sum(batches)


def updates_of_epoch(batches: int, passes: int, skip_remainder: bool) -> int:
    """Updates of an epoch of `batches` in each process, `passes` (--update-freq) in an update.

    skip_remainder: --skip-remainder-batch, with which fairseq leaves out the last batch, then the
    last update if it is not full.
    """
    if skip_remainder:
        return max(0, batches - 1) // passes
    return -(-batches // passes)


def passes_in(epoch: int, update_freq: Sequence[int]) -> int:
    """The --update-freq of an epoch, from 1; the last number holds for all later epochs."""
    return update_freq[min(epoch, len(update_freq)) - 1]
