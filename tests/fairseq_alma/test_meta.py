"""A training step of the paper's sizes on the meta device, where tensors have shapes but no values.

What needs a value on the host (`.item()`, `nonzero`) raises there:
a GPU would make the host wait for it.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.moe.router import Router
from tests.fairseq_alma.shared import Plain

TOKENS = 8 * 512
HALF = {torch.float16: ["--fp16"], torch.bfloat16: ["--bf16"], torch.float32: []}


class Operations(TorchDispatchMode):
    """Records the outputs and the matrix products of a step."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.products: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.shapes.append(tuple(tensor.shape))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "baddbmm"):
            self.products[name, output.dtype] += 1
        return output


@pytest.fixture
def step(stream, benchmark):
    """`step(arch, *flags, dtype=, padded=)`: the operations and gradients of a training step."""
    memory = benchmark("training_memory")

    def run(arch, *flags, dtype=torch.float16, padded=False):
        words = memory.words(str(stream), arch, *HALF[dtype], *flags)
        with memory.like_a_gpu():
            step = memory.Step(words, processes=1)
            step.sample["padded"] = padded
            with Operations() as operations:
                loss, _, logging_output = step.task.train_step(
                    step.sample, step.model, step.criterion, Plain(), 0
                )
        assert loss.is_meta
        assert all(
            value.is_meta for value in logging_output.values() if isinstance(value, torch.Tensor)
        )
        return operations, {name: p.grad for name, p in step.model.named_parameters()}

    return run


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        (torch.float16, ()),
        (torch.float16, ("--criterion", "chunked_cross_entropy")),
        (torch.float32, ("--criterion", "chunked_cross_entropy", "--checkpoint-activations")),
        (torch.bfloat16, ("--criterion", "chunked_cross_entropy")),
        (torch.float16, ("--members", "2")),
    ],
)
def test_a_step_never_waits_for_the_gpu(step, dtype, flags):
    padded = "chunked_cross_entropy" in flags
    _, gradients = step(
        "switch_gmoe_base", "--moe-expert-count", "8", *flags, dtype=dtype, padded=padded
    )
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients.values())


def test_a_wait_is_seen(step, monkeypatch):
    forward = Router.forward

    def waiting(*arguments):
        routing = forward(*arguments)
        routing.counts_E.max().item()
        return routing

    monkeypatch.setattr(Router, "forward", waiting)
    with pytest.raises(RuntimeError, match="meta"):
        step("switch_gmoe_tiny")


def test_unless_told_the_decoder_looks_for_padding(step):
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step("switch_gmoe_tiny", padded=None)


def test_no_tensor_grows_with_tokens_times_experts(step):
    """But for the router's (S, E) scores: with 64 experts tokens take the memory that they take
    with 16."""

    def elements(experts):
        operations, gradients = step("switch_gmoe_base", "--moe-expert-count", str(experts))
        weights = {tuple(gradient.shape) for gradient in gradients.values()}
        weights |= {(*shape[:-2], *shape[:-3:-1]) for shape in weights}  # transposed
        weights |= {(shape[0], 1, shape[1]) for shape in weights if len(shape) == 2}  # of a bias
        shapes = {(TOKENS, experts), (experts, TOKENS)} | weights
        return sum(torch.Size(shape).numel() for shape in operations.shapes if shape not in shapes)

    assert elements(64) < 1.01 * elements(16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_only_the_router_multiplies_in_fp32(step, dtype):
    operations, _ = step("switch_gmoe_base", "--moe-expert-count", "8", dtype=dtype)
    assert set(operations.products) >= {("mm", torch.float32), ("mm", dtype)}
    layers = 3  # Switch layers of the base model
    single = [
        count for (_, precision), count in operations.products.items() if precision == torch.float32
    ]
    assert sum(single) == 3 * layers  # forward, and the gradients of tokens and weight
