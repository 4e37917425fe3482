"""Operations, bytes and FLOPs of an update, counted on the meta device."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from alma.flops import Shape


@pytest.fixture
def ledger(benchmark):
    """The module."""
    return benchmark("ledger")


@pytest.fixture
def counted(ledger):
    """`counted(work)`: operations and bytes of a call."""

    def count(work):
        with ledger.Ledger() as counter:
            work()
        return counter.count.total("operations"), counter.count.total("bytes")

    return count


def test_bytes_are_those_read_and_written(counted):
    x = torch.empty(100, 10, device="meta")
    size = 4000
    assert counted(lambda: x + x.t()[0, 0]) == (1, 2 * size + 4)
    assert counted(lambda: x.view(10, 100).t()) == (0, 0)
    assert counted(lambda: torch.empty_like(x)) == (0, 0)
    assert counted(lambda: x.mul_(2)) == (1, 2 * size)
    assert counted(lambda: x.zero_()) == (1, size)
    assert counted(lambda: x.copy_(x.half())) == (2, size + size // 2 + size // 2 + size)
    assert counted(lambda: torch.mul(x, x, out=x)) == (1, 3 * size)
    assert counted(lambda: x + x[:1].expand(100, 10)) == (1, 2 * size + 40)
    assert counted(lambda: torch._foreach_mul_([x, x], 2)) == (1, 4 * size)
    rows = torch.empty(5, dtype=torch.int64, device="meta")
    assert counted(lambda: x.index_select(0, rows)) == (1, 40 + 2 * 5 * 40)
    assert counted(lambda: x.index_add_(0, rows, x[:5])) == (1, 3 * (40 + 200))


def test_numbers_that_the_host_reads_are_waits(ledger):
    x = torch.empty(10, device="meta")
    with ledger.Ledger() as counter:
        counter.is_building = False
        assert bool(torch.isfinite(x.sum()))
        assert not bool(x.sum() == float("inf"))
        assert x.tolist() == [1] * 10
    assert counter.count.waits == 3


def test_a_gradient_is_of_the_kind_of_its_operation(ledger):
    """Of one that this module calls, and of one that the router calls."""
    from fairseq_alma.moe.router import Router

    x = torch.empty(64, 16, device="meta", requires_grad=True)
    with torch.device("meta"):
        router = Router(16, 4)
    with ledger.like_a_gpu(), ledger.Ledger() as counter:
        gates = router(x).gate_S
        middle = counter.count.by_kind["dispatch"].operations
        F.gelu(x * gates[:, None].exp()).sum().backward()
    parts = counter.count.by_kind
    assert middle > 5
    assert parts["dispatch"].operations > middle + 3
    assert parts["matmul"].operations == 3
    assert parts["gelu"].operations == 2
    assert counter.count.by_operator["other", "exp"].operations == 1
    # of exp and of x * gates
    assert counter.count.by_operator["other", "mul"].operations >= 3


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--criterion chunked_cross_entropy --bf16"])
def test_an_update_of_fairseqs_trainer(ledger, flags):
    """Its FLOPs are those of the formula; the second update is counted, which makes no states."""
    layers = "--decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 2"
    args = SimpleNamespace(
        arch="switch_gmoe_tiny", experts=4, tokens=2048, vocabulary=504, flags=f"{flags} {layers}"
    )
    now = ledger.count(args)
    earlier = ledger.count(args, ledger.before.CHANGES)
    shape = Shape(2, 64, 256, 504, 512, experts=4, moe_freq=2)
    for counted in (now, earlier):
        assert counted.by_kind["matmul"].flops == shape.training_flops(2048)
        for kind in ("attention", "loss", "gelu", "dispatch", "optimizer"):
            assert counted.by_kind[kind].operations > 0
    assert now.total("operations") <= earlier.total("operations")
    assert now.total("bytes") <= earlier.total("bytes")
    text = ledger.table({"before": earlier, "now": now})
    assert len({len(line) for line in text}) == 1
    assert [line[0] for line in text] == ["kind", *ledger.KINDS, "sum", "waits"]


@pytest.mark.thorough
def test_the_base_model_stays_within_its_goal(ledger):
    """Half the operations and bytes of the code before."""
    args = ledger.parser().parse_args([])
    now = ledger.count(args)
    earlier = ledger.count(args, ledger.before.CHANGES)
    assert now.total("operations") <= 700
    assert now.total("bytes") <= 75e9
    assert now.waits == 0
    assert earlier.total("operations") > 1000
    assert 115e9 < earlier.total("bytes") < 125e9
    assert earlier.waits == 5
