"""The plain loop beside which an update is timed."""

from alma.flops import Shape
from benchmarks import update


def test_the_plain_model_has_the_parameters_of_the_switch_transformer():
    """But for two rows of fairseq's positions, which stand for padding."""
    sizes = {"vocabulary": update.VOCABULARY, "positions": update.TIME, "experts": update.EXPERTS}
    ours = Shape(layers=2, dim=16, hidden=64, moe_freq=1, **sizes)
    plain = sum(p.numel() for p in update.PlainModel(16).parameters())
    assert plain == ours.parameters - 2 * 16


def test_the_plain_loop_trains():
    assert update.plain(16, 1) > 0
