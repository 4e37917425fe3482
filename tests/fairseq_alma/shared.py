"""Helpers of these tests."""

import json

import torch


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
    first, second = load(a)["model"], load(b)["model"]
    assert first.keys() == second.keys()
    for name in first:
        if exact:
            assert torch.equal(first[name], second[name]), name
        elif not name.endswith("k_proj.bias"):  # its gradient is rounding error, which Adam scales up
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-5, msg=name)


class Plain:
    """An optimizer that only runs backward, with a loss scale."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients."""
        (self.scale * loss).backward()
