"""A training step of the paper's sizes on the meta device, where tensors have shapes but no values.

What needs a value on the host (`.item()`, `nonzero`) raises there: a GPU would make the host wait for it.
"""

import contextlib
from collections import Counter

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma import task as alma_task
from fairseq_alma.moe import dispatchers, layer, router
from fairseq_alma.moe.dispatchers import GroupedDispatcher, PaddedDispatcher
from fairseq_alma.moe.router import Router
from fairseq_alma.training import loss as loss_module

BATCH, LENGTH = 8, 512
TOKENS = BATCH * LENGTH
LAYOUTS = {
    "padded": lambda x_SD, routing, capacity: PaddedDispatcher(routing, capacity),
    "grouped": lambda x_SD, routing, capacity: GroupedDispatcher(routing),
}


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
        if name in ("mm", "addmm", "baddbmm", "_grouped_mm"):  # bmm: attention, one kernel on a GPU
            self.products[name, output.dtype] += 1
        return output


class WithoutAutocast:
    """torch without autocast, which it lacks for this device; it is off in these steps."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def autocast(self, *_, **__):
        return contextlib.nullcontext()

    def is_autocast_enabled(self, *_):
        return False


class PlainOptimizer:
    """What `train_step` needs of fairseq's optimizer."""

    def backward(self, loss):
        loss.backward()


@pytest.fixture
def step(stream, monkeypatch):
    """`step(arch, layout, *flags, dtype=, padded=)`: the operations and gradients of a training step."""
    for module in (alma_task, dispatchers, loss_module, router):
        monkeypatch.setattr(module, "torch", WithoutAutocast())

    def run(arch, layout, *flags, dtype=torch.float16, padded=False):
        monkeypatch.setattr(layer, "fastest_dispatcher", LAYOUTS[layout])
        parser = options.get_training_parser(default_task="alma_lm")
        words = [str(stream), "--task", "alma_lm", "--arch", arch, "--tokens-per-sample", str(LENGTH)]
        words += [
            "--optimizer",
            "adam",
            "--lr",
            "1e-3",
            "--max-update",
            "10",
            "--batch-size",
            str(BATCH),
            *flags,
        ]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
        task = tasks.setup_task(cfg.task)
        with torch.device("meta"):
            model = task.build_model(cfg.model).to(dtype)
            criterion = task.build_criterion(cfg.criterion)
            tokens = torch.empty(BATCH, LENGTH, dtype=torch.int64)
            sample = {"nsentences": BATCH, "ntokens": TOKENS, "target": tokens, "padded": padded}
            sample["net_input"] = {"src_tokens": tokens, "src_lengths": tokens[:, 0]}
        operations = Operations()
        with operations:
            loss, _, logging_output = task.train_step(sample, model, criterion, PlainOptimizer(), 0)
        assert loss.is_meta
        assert all(value.is_meta for value in logging_output.values() if isinstance(value, torch.Tensor))
        return operations, {name: p.grad for name, p in model.named_parameters()}

    return run


@pytest.mark.parametrize("arch", ["switch_gmoe_base", "switch_gmoe_large"])
@pytest.mark.parametrize(
    ("layout", "dtype", "flags"),
    [
        ("padded", torch.float16, ()),
        ("padded", torch.float16, ("--criterion", "chunked_cross_entropy")),
        ("padded", torch.float32, ("--criterion", "chunked_cross_entropy", "--checkpoint-activations")),
        ("grouped", torch.bfloat16, ("--criterion", "chunked_cross_entropy")),
        ("padded", torch.float16, ("--members", "2")),
    ],
)
def test_a_step_never_waits_for_the_gpu(step, arch, layout, dtype, flags):
    _, gradients = step(arch, layout, "--moe-expert-count", "8", *flags, dtype=dtype)
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients.values())


def test_a_batch_with_padding_does_not_wait_either(step):
    step("switch_gmoe_tiny", "padded", "--criterion", "chunked_cross_entropy", padded=True)


def test_a_wait_is_seen(step, monkeypatch):
    forward = Router.forward

    def waiting(*arguments):
        routing = forward(*arguments)
        routing.counts_E.max().item()
        return routing

    monkeypatch.setattr(Router, "forward", waiting)
    with pytest.raises(RuntimeError, match="meta"):
        step("switch_gmoe_tiny", "padded")


def test_unless_told_the_decoder_looks_for_padding(step):
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step("switch_gmoe_tiny", "padded", padded=None)


@pytest.mark.parametrize(("layout", "dtype"), [("padded", torch.float16), ("grouped", torch.bfloat16)])
def test_no_tensor_grows_with_tokens_times_experts(step, layout, dtype):
    """But for the router's (S, E) scores: with 64 experts tokens take the memory that they take with 16."""

    def elements(experts):
        operations, gradients = step(
            "switch_gmoe_base", layout, "--moe-expert-count", str(experts), dtype=dtype
        )
        weights = {tuple(gradient.shape) for gradient in gradients.values()}
        weights |= {(*shape[:-2], *shape[:-3:-1]) for shape in weights}  # transposed
        weights |= {(shape[0], 1, shape[1]) for shape in weights if len(shape) == 2}  # of a bias
        known = {(TOKENS, experts), (experts, TOKENS)} | weights
        return sum(torch.Size(shape).numel() for shape in operations.shapes if shape not in known)

    assert elements(64) < 1.01 * elements(16)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("padded", torch.float16), ("padded", torch.bfloat16), ("grouped", torch.bfloat16)]
)
def test_only_the_router_multiplies_in_fp32(step, layout, dtype):
    operations, _ = step("switch_gmoe_base", layout, "--moe-expert-count", "8", dtype=dtype)
    assert set(operations.products) >= {("mm", torch.float32), ("mm", dtype)}
    layers = 3  # Switch layers of the base model
    single = [count for (_, precision), count in operations.products.items() if precision == torch.float32]
    assert sum(single) == 3 * layers  # forward, and the gradients of tokens and weight
