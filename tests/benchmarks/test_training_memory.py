"""Counted memory of a training step, and the estimate of `alma train`."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

CHUNKED = "--criterion chunked_cross_entropy"


@pytest.fixture
def memory(benchmark):
    """The module."""
    return benchmark("training_memory")


def test_storages_count_while_they_exist(memory):
    """A view is no storage of its own; an operation in place makes none."""
    with memory.MetaStorages() as live:
        first = torch.empty(100, device="meta")
        second = first.view(10, 10)[2:].add(1.0)
        second.mul_(2.0)
        assert live.bytes == 720
        del first, second
        gc.collect()
        assert (live.bytes, live.peak) == (0, 720)


def test_what_the_backward_pass_needs_is_counted(memory):
    """With and without the activations of three layers."""

    def peak(run):
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="meta") for _ in range(3)))
        with memory.MetaStorages() as live:
            x = torch.empty(1000, 64, device="meta", requires_grad=True)
            run(layers, x).sum().backward()
        return live.peak

    activations = peak(lambda layers, x: layers(x))
    recomputed = peak(lambda layers, x: checkpoint(layers, x, use_reentrant=False))
    assert activations >= 4 * 1000 * 64 * 4
    assert peak(lambda layers, x: layers(x).detach().requires_grad_()) < activations
    assert recomputed <= activations


@pytest.mark.parametrize(
    ("arch", "experts", "processes", "flags"),
    [
        ("switch_gmoe_base", 8, 1, f"--fp16 {CHUNKED}"),
        ("switch_gmoe_base", 8, 1, f"--fp16 {CHUNKED} --checkpoint-activations"),
        pytest.param("switch_gmoe_base", 8, 1, f"--bf16 {CHUNKED}", marks=pytest.mark.thorough),
        ("switch_gmoe_base", 8, 1, "--fp16 --members 2"),
        ("switch_gmoe_base", 8, 1, CHUNKED),
        pytest.param("switch_gmoe_large", 12, 8, "--fp16", marks=pytest.mark.thorough),
        ("switch_gmoe_base", 8, 4, f"--fp16 {CHUNKED} --moe-expert-parallel"),
        ("switch_gmoe_large", 4, 2, f"--fp16 {CHUNKED} --zero-sharding os"),
        ("switch_gmoe_large", 4, 8, f"--fp16 {CHUNKED} --zero-sharding os --offload-activations"),
    ],
)
def test_the_estimate_is_within_five_percent(memory, arch, experts, processes, flags):
    (row,) = memory.measure(20_000, [(arch, experts, processes, flags)])
    assert float(row["estimate / count"]) == pytest.approx(1, abs=0.05)


@pytest.mark.thorough
def test_the_table_of_what_fits(memory, monkeypatch):
    """On cards of 1.9 GB."""
    monkeypatch.setattr(memory, "V100", 1_900_000_000)
    flags = {"nothing": "", "os": "--zero-sharding os", "expert parallel": "--moe-expert-parallel"}
    monkeypatch.setattr(memory, "SAVINGS", flags)
    wide = "--decoder-layers 2 --decoder-embed-dim 1024 --decoder-ffn-embed-dim 4096"
    wide += " --decoder-attention-heads 8"
    models = {"dense": f"transformer_lm_gpt3_small {wide}", "tiny": "switch_gmoe_tiny"}
    one, two, one_tiny, two_tiny = memory.measure_savings(8_000, models, (1, 2))
    assert one["nothing"].endswith(" (too much)")
    assert [one["os"], one_tiny["os"], one_tiny["expert parallel"]] == ["-", "-", "-"]
    assert [one["expert parallel"], two["expert parallel"]] == ["-", "-"]
    gigabytes = [float(two[name].removesuffix(" (too much)")) for name in ("nothing", "os")]
    assert gigabytes[0] - gigabytes[1] == pytest.approx(4 * 0.0339, abs=0.11)  # of 33.9M weights
    assert float(two_tiny["expert parallel"]) <= float(two_tiny["nothing"])
