"""Helpers of these tests."""

import json

import torch
import torch.nn.functional as F
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_alma.moe.layer import SwitchFFN

DIM = 8
HIDDEN = 16
"""Of `make_layer`."""


def make_layer(experts: int, capacity_factor: float = 1.0) -> SwitchFFN:
    """A small Switch layer, the same for the same number of experts."""
    torch.manual_seed(experts)
    identity = torch.nn.Identity()
    layer = SwitchFFN(DIM, HIDDEN, experts, capacity_factor, F.gelu, identity)
    torch.nn.init.normal_(layer.router.weight)
    return layer


def config_of(*words):
    """fairseq's config of the words after `fairseq-train`."""
    parser = options.get_training_parser(default_task="alma_lm")
    return convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, list(map(str, words)))
    )


def load(path) -> dict:
    """A checkpoint."""
    return torch.load(path, weights_only=True)


def changed(path, out, change):
    """Write the checkpoint `path` as `out` after `change(state)`; returns `out`."""
    state = load(path)
    change(state)
    torch.save(state, out)
    return out


def logged(output: str, tag: str) -> list[dict]:
    """The JSON records that fairseq logged under a tag (train_inner, valid, ...)."""
    lines = (line.split(f"{tag}:", 1)[-1] for line in output.splitlines() if f":{tag}:" in line)
    return [json.loads(line) for line in lines if line.startswith("{")]


def assert_same_model(a, b, exact: bool = True) -> None:
    """Equal weights of two checkpoints; up to rounding if not `exact`."""
    first = load(a)["model"]
    second = load(b)["model"]
    assert first.keys() == second.keys()
    for name in first:
        if exact:
            assert torch.equal(first[name], second[name]), name
        elif not name.endswith(
            "k_proj.bias"
        ):  # its gradient is rounding error, which Adam scales up
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-5, msg=name)


def assert_same_training(first, second) -> None:
    """Assert that two checkpoints have the same training state, bit for bit; times may differ."""
    assert_same_model(first, second)
    a = load(first)
    b = load(second)
    history = [state["optimizer_history"][-1]["num_updates"] for state in (a, b)]
    assert history[0] == history[1]
    torch.testing.assert_close(a["last_optimizer_state"], b["last_optimizer_state"], rtol=0, atol=0)
    torch.testing.assert_close(
        a["extra_state"].get("ema"), b["extra_state"].get("ema"), rtol=0, atol=0
    )
    for name in ("best", "val_loss", "train_iterator"):
        assert a["extra_state"].get(name) == b["extra_state"].get(name), name
    entries = [state["extra_state"]["AlmaLMTask"] for state in (a, b)]
    for name in entries[0].keys() - {"seconds", "peak_memory"}:
        assert entries[0][name] == entries[1][name], name


class Plain:
    """An optimizer that only runs backward."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients."""
        loss.backward()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result
