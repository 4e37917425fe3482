"""Updates of `--max-epoch` as planned by the launcher, and as fairseq makes its batches."""

import json
from dataclasses import replace

import numpy as np
import pytest
from launcher import SMALL, read_requests

from alma.epochs import batches_of
from alma.stages import stages
from alma.stream import Stream
from slurm.engine.machine import Machine
from slurm.lm.checks import megabatch_sizes
from slurm.lm.epochs import length_of
from slurm.lm.estimate import estimate
from slurm.lm.placement import place
from slurm.lm.plan import make_plan

CPU = Machine((), 10**12)
TINY = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 64 --batch-size 8 --update-freq 2
""".split()
SETTINGS = {
    "--tokens-per-sample": 64,
    "--batch-size": 8,
    "--max-tokens": None,
    "--required-batch-size-multiple": 8,
    "--distributed-world-size": 1,
    "--update-freq": [2],
    "--grouped-shuffling": False,
    "--skip-remainder-batch": False,
    "--max-epoch": 2,
}


@pytest.mark.parametrize(
    ("batch_size", "multiple"), [(8, 8), (24, 8), (16, 4), (3, 1), (5, 8), (8, 1)]
)
def test_batches_are_fairseqs(batch_size, multiple):
    from fairseq.data.data_utils import batch_by_size

    for blocks in range(multiple, 120):
        sizes = np.full(blocks, 64)
        sizes[0] = 7  # fairseq sorts by length: the short block comes first
        order = np.arange(blocks)
        batches = batch_by_size(order, sizes.item, sizes, None, batch_size, multiple)
        expected = len(batches), sum(map(len, batches))
        assert batches_of(blocks, batch_size, None, 64, multiple) == expected, blocks
        if batch_size % multiple == 0:
            limit = batch_size * 64 + 5
            batches = batch_by_size(order, sizes.item, sizes, limit, None, multiple)
            expected = len(batches), sum(map(len, batches))
            assert batches_of(blocks, None, limit, 64, multiple) == expected, blocks


def test_updates_counted_by_hand():
    """Blocks of 64 tokens: 17, 33 and 9."""
    sizes = (17 * 64, 32 * 64 + 1, 9 * 64)
    schedule = stages(3)

    def lengths(replay=False, share=0.0, **flags):
        settings = SETTINGS | {
            f"--{name.replace('_', '-')}": value for name, value in flags.items()
        }
        return [length_of(settings, sizes, stage, replay, share) for stage in schedule]

    plain = lengths()
    assert [length.updates for length in plain] == [2 * 1, 2 * 2, 2 * 1]
    # Of 33 blocks 32 are in batches, among them the short one of 1 token.
    assert [length.tokens for length in plain] == [2 * 16 * 64, 2 * (32 * 64 - 63), 2 * 8 * 64]
    assert [length.updates for length in lengths(update_freq=[2, 1])] == [1 + 2, 2 + 4, 1 + 1]
    assert [length.updates for length in lengths(distributed_world_size=2)] == [2, 2, 2]
    on_two = lengths(distributed_world_size=2, update_freq=[1])
    assert [length.updates for length in on_two] == [length.updates for length in plain]
    assert [length.updates for length in lengths(skip_remainder_batch=True)] == [0, 2, 0]
    assert [length.updates for length in lengths(replay=True)] == [2 * 1, 2 * 3, 2 * 4]
    assert [length.updates for length in lengths(share=0.5)] == [2 * 1, 2 * 4, 2 * 1]


def sizes_of(stream) -> list[int]:
    return [part.tokens for part in Stream.load(stream).megabatches]


def test_a_dry_run_has_the_updates_of_the_epochs(launcher):
    out = launcher.run("--dry-run", flags=(*SMALL, *"--tokens-per-sample 2 --max-epoch 3".split()))[
        1
    ]
    sizes = sizes_of(launcher.folder / "stream")
    settings = SETTINGS | {"--tokens-per-sample": 2, "--update-freq": [3], "--max-epoch": 3}
    lengths = [length_of(settings, sizes, stage, False, 0) for stage in stages(len(sizes))]
    updates = sum(length.updates for length in lengths)
    assert updates
    assert out.splitlines()[-1].split()[4] == f"{updates:,}"


def test_a_plan_by_epochs(stream):
    """Updates, tokens and FLOPs of its estimate; one schedule has the warm-up of its first
    stage."""
    sizes = sizes_of(stream)
    lengths = [length_of(SETTINGS, sizes, stage, False, 0) for stage in stages(len(sizes))]

    def planned(*words: str):
        flags = (*TINY, "--max-epoch", "2")
        (request,) = read_requests(
            [str(stream), "--learner", "sm", "--out", "R", *words, "--", *flags]
        )
        request = place(request, CPU)
        return make_plan(replace(request, sizes=megabatch_sizes(request)), len(sizes))

    costs = estimate(planned(), 1000, CPU).costs
    for cost, length in zip(costs, lengths, strict=True):
        assert (cost.updates, cost.tokens) == (length.updates, length.tokens)
        assert cost.flops == cost.shape.training_flops(length.tokens)
    for number, spec in enumerate(planned("--schedule", "continuous").stages):
        (training,) = spec.trainings
        assert "--max-update" not in training.arguments
        warmup = training.arguments[training.arguments.index("--warmup-updates") + 1]
        assert warmup == str(lengths[0].updates // 10)
        assert training.earlier == sum(length.updates for length in lengths[:number])


def test_too_few_checkpoints_of_the_epochs_are_refused(launcher):
    flags = (*SMALL, *"--tokens-per-sample 2 --max-epoch 1 --save-interval-updates 500".split())
    error = launcher.run("--average", "last:4", "--dry-run", code=2, flags=flags)[1]
    assert "--average last:4 needs 4 checkpoints of each stage" in error


def test_a_run_trains_as_long_as_planned(stream, forked, tmp_path):
    words = ("--schedule", "continuous", "--stages", "2", "--replay-share", ".3")
    run = ("--learner", "sm", "--out", tmp_path / "run", *words, "--", *TINY, "--max-epoch", "2")
    forked.launch(stream, *run)
    sizes = sizes_of(stream)
    for stage in stages(len(sizes))[:2]:
        length = length_of(SETTINGS, sizes, stage, False, 0.3)
        result = tmp_path / f"run/stage_{stage.index:02d}/result.json"
        (trained,) = json.loads(result.read_text())["training"]
        assert (trained["updates"], trained["tokens"]) == (length.updates, length.tokens)
