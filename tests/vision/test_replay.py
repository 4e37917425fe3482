"""Replay by share: `--replay-share`, `--replay-from`."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alma.stages import stages
from tests.vision.conftest import CPU, jobs
from vision import MegaBatchStream, run
from vision.data import Dataset, Images
from vision.learners import LEARNERS
from vision.stage_data import StageData
from vision.train import Drawing, Replay, minibatches

STREAM = MegaBatchStream("digits", 20)
FAST = {"hidden": 4, "epochs": 2, "waiting_time": 5}


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 200),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 0.95]),
    st.integers(0, 99),
)
def test_an_epoch_and_a_validation_sample_have_their_share_evenly_over_earlier_megabatches(
    earlier, new, share, seed
):
    replay = Replay(tuple(earlier), new, share)
    epoch = replay.draw(torch.Generator().manual_seed(seed)).numpy()
    sample = replay.sample(np.random.RandomState(seed))
    assert (sample == replay.sample(np.random.RandomState(seed))).all()
    for drawn in (epoch, sample):
        old = drawn[drawn < sum(earlier)]
        fresh = drawn[drawn >= sum(earlier)]
        assert (len(drawn), len(old)) == (new, min(round(share * new), max(1, new - 1)))
        assert len(set(fresh.tolist())) == len(fresh)
        assert max(fresh, default=0) < sum(earlier) + new
        whose = np.searchsorted(np.cumsum(earlier), old, side="right")
        counts = np.bincount(whose, minlength=len(earlier))
        assert counts.max() - counts.min() <= 1
    for k, size in enumerate(earlier):  # of the sample: none is repeated needlessly
        assert len(set(old[whose == k].tolist())) == min(counts[k], size)


@pytest.mark.parametrize(
    ("options", "share", "source", "counts"),
    [
        ("none", 0, None, {3: 180}),
        ("--replay", 0, None, {1: 180, 2: 180, 3: 180}),
        ("--replay-share .5", 0.5, "all", {1: 45, 2: 45, 3: 90}),
        ("--replay-share .8", 0.8, "all", {1: 72, 2: 72, 3: 36}),
        ("--replay-share .5 --replay-from recent", 0.5, "recent", {2: 90, 3: 90}),
    ],
)
def test_in_an_epoch_old_images_replace_new_ones(options, share, source, counts):
    """As docs/concepts.md states it, with the numbers of minibatches; labels are numbers of
    images."""
    labels = torch.arange(600)
    images = Images(torch.zeros(600, 1, 1, 1, dtype=torch.uint8), labels)
    stream = MegaBatchStream(Dataset("digits", images, images, 600, (0.0,), (1.0,)), 3, seed=4)
    data = StageData(stream, stages(3, 1, options == "--replay", source), CPU, share)
    settings = LEARNERS["sm"].settings_class(batch_size=20, augment=False)
    drawing = Drawing(replay=data.replay(2))
    generator = torch.Generator().manual_seed(0)
    epochs = []
    for _ in range(2):
        batches = list(minibatches(data.train(2), settings, [generator], drawing))
        assert len(batches) == sum(counts.values()) / 20
        epochs.append(torch.cat([batch.labels for batch in batches]).tolist())
    for epoch in epochs:
        of = {t: [k for k in epoch if k in set(stream.split(t)[0].tolist())] for t in (1, 2, 3)}
        assert {t: len(drawn) for t, drawn in of.items() if drawn} == counts
        assert len(set(of[3])) == counts[3]  # none is repeated
    if share:
        assert {*epochs[0]} != {*epochs[1]}  # drawn anew


def test_every_new_example_is_drawn_as_often():
    replay = Replay((7, 20), 40, 0.5)
    generator = torch.Generator().manual_seed(0)
    counts = sum(torch.bincount(replay.draw(generator), minlength=67) for _ in range(400))[27:]
    assert counts.min() > 150
    assert counts.max() < 250  # 200 are expected, with a standard deviation of 10


@pytest.mark.parametrize("source", ["all", "recent"])
def test_validation_has_the_share_of_training_and_as_many_images_as_without_replay(source):
    """Labels are the numbers of images: none of a training part is used for validation."""
    labels = torch.arange(1000)
    images = Images(torch.zeros(1000, 1, 1, 1, dtype=torch.uint8), labels)
    stream = MegaBatchStream(Dataset("digits", images, images, 1000, (0.0,), (1.0,)), 10, seed=4)
    schedule = stages(10, 2, replay_from=source)
    data = StageData(stream, schedule, CPU, 0.5)
    for stage in schedule:
        valid = data.valid(stage.index).labels.tolist()
        assert valid == data.valid(stage.index).labels.tolist()
        assert len(valid) == 20
        held_out = {t: set(stream.split(t)[1].tolist()) for t in stage.train_on}
        new = set().union(*(held_out[t] for t in range(stage.first, stage.last + 1)))
        assert set(valid) <= set().union(*held_out.values())
        assert len(new & set(valid)) == (10 if stage.index else 20)
        counts = [len(held_out[t] & set(valid)) for t in stage.earlier]
        assert not counts or max(counts) - min(counts) <= 1


def test_a_stage_replays_all_earlier_megabatches_or_the_recent_ones():
    def replayed(source):
        data = StageData(STREAM, stages(20, 5, replay_from=source), CPU, 0.5)
        assert data.replay(0) is None
        replayed = data.replay(2)
        assert sum(replayed.earlier) + replayed.new == len(data.train(2).labels)
        return replayed.earlier

    sizes = tuple(len(STREAM.split(t)[0]) for t in range(1, 11))
    assert replayed("all") == sizes
    assert replayed("recent") == sizes[5:]


def test_compute_is_that_of_no_replay_and_the_config_records_it(tmp_path):
    plain = run(STREAM, out=tmp_path / "plain", **FAST)
    shared = run(STREAM, out=tmp_path / "shared", replay_share=0.5, **FAST)
    flops = [[row["extra"]["flops"] for row in played.rows] for played in (plain, shared)]
    assert any("validation" in row for row in flops[0])
    assert flops[0] == flops[1]
    assert shared.rows[-1]["trained_on"] == list(range(1, 21))
    assert plain.rows[-1]["value"] != shared.rows[-1]["value"]
    assert shared.config["replay_share"] == 0.5
    assert not {"replay_share", "replay_from"} & plain.config.keys()


def test_firefly_grows_on_an_epoch_and_not_on_all_data(tmp_path):
    flops = []
    for share in (0, 0.5):
        played = run(STREAM, out=tmp_path / str(share), learner="ff", replay_share=share, **FAST)
        flops.append([row["extra"].get("flops", {}).get("growth", 0) for row in played.rows])
    assert max(flops[0]) > 0
    assert max(flops[1]) < 1.3 * max(
        flops[0]
    )  # networks grow differently; on all data it is 4 times as much


def test_a_sweep_may_have_a_baseline_without_replay():
    planned = jobs("--replay-share", "0,.5", "--replay-from", "recent")
    assert [job.options["replay_share"] for job in planned] == [0, 0.5]
