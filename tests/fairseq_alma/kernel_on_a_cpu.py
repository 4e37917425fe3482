"""The kernels of `training.loss_kernel` by Triton's interpreter, for test_loss_kernel.py.

A process of its own: Triton reads TRITON_INTERPRET when it is imported. Prints JSON: for each case
the largest difference to PyTorch's operators.
"""

import itertools
import json

import torch
from torch import Tensor

from fairseq_alma.training import loss, loss_kernel
from fairseq_alma.training.loss_kernel import (
    WholeLoss,
    logits_to_gradient_,
    losses_and_gradient_,
    row_losses,
)

PAD = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(7, 37), (1, 301), (2, 50_264), (3, 8192), (2, 8193)]
FACTOR = 128.0


def use_kernels(used: bool) -> None:
    loss_kernel.is_used = lambda device_type: used


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Relative to the factor of the gradient."""
    return (actual.float() - expected.float()).abs().max().item() / FACTOR


def rows(dtype: torch.dtype, tokens: int, vocabulary: int) -> dict[str, object]:
    """Losses and gradients of logits, some of which are -inf; a target is padding."""
    logits = (3 * torch.randn(tokens, vocabulary)).to(dtype)
    logits[:, [0, 1, 3]] = -torch.inf
    target = torch.randint(4, vocabulary, (tokens,))
    if tokens > 2:
        target[1] = PAD
    factor = torch.tensor(FACTOR)
    use_kernels(False)
    nll, by_logits = loss.loss_and_gradient(logits.clone(), target, PAD, True, factor)
    assert by_logits is not None
    at_once = logits.clone()
    nll_at_once = losses_and_gradient_(at_once, target, factor, PAD)
    nll_alone, log_sum = row_losses(logits, target, PAD)
    before = logits.clone()
    in_backward = logits.clone()
    logits_to_gradient_(in_backward, target, log_sum, factor, PAD)
    return {
        "nll": (nll_alone - nll).abs().max().item(),
        "gradient": largest_difference(at_once, by_logits),
        "equal gradients": (at_once == by_logits).float().mean().item(),
        "the same": torch.equal(at_once, in_backward) and torch.equal(nll_at_once, nll_alone),
        "logits kept": torch.equal(before, logits),
        "padding is zero": not at_once[target == PAD].any().item(),
    }


def gradients(loss_of, *leaves: Tensor) -> list[Tensor]:
    """The loss, and the gradients of 3 times it."""
    for leaf in leaves:
        leaf.grad = None
    total = loss_of()
    (3 * total).backward()
    return [total.detach(), *(leaf.grad for leaf in leaves)]


def chunked(dtype: torch.dtype, dims: tuple[int, ...]) -> float:
    """The largest relative difference of loss and gradients of the criterion in chunks."""
    features = torch.randn(20, sum(dims)).to(dtype).requires_grad_()
    weights = [torch.randn(301, dim).to(dtype).requires_grad_() for dim in dims]
    target = torch.randint(4, 301, (20,))
    target[::7] = PAD
    results = []
    chunks = loss._chunks
    loss._chunks = lambda target, pad, chunk: (torch.arange(len(target)).split(chunk), True)
    for used in (False, True):
        use_kernels(used)
        results.append(
            gradients(
                lambda: loss.chunked_nll(features, weights, target, PAD, 6, [0, 3])[0],
                features,
                *weights,
            )
        )
    loss._chunks = chunks
    differences = []
    for expected, actual in zip(*results, strict=True):
        norm = expected.float().norm()
        differences.append(((actual.float() - expected.float()).norm() / norm).item())
    return max(differences)


def whole(dtype: torch.dtype) -> float:
    """The same of all logits of a linear layer."""
    features = torch.randn(20, 8).to(dtype).requires_grad_()
    weight = torch.randn(301, 8).to(dtype).requires_grad_()
    target = torch.randint(4, 301, (20,))
    target[::7] = PAD

    def expected() -> Tensor:
        probs = torch.log_softmax(features @ weight.t(), -1, dtype=torch.float32)
        return torch.nn.functional.nll_loss(probs, target, ignore_index=PAD, reduction="sum")

    def actual() -> Tensor:
        return WholeLoss.apply(features @ weight.t(), target, PAD)[0]

    pairs = zip(
        gradients(expected, features, weight), gradients(actual, features, weight), strict=True
    )
    return max(((b.float() - a.float()).norm() / a.float().norm()).item() for a, b in pairs)


def main() -> None:
    torch.manual_seed(0)
    results: dict[str, object] = {}
    for (name, dtype), (tokens, vocabulary) in itertools.product(DTYPES.items(), SHAPES):
        results[f"rows {name} {tokens}x{vocabulary}"] = rows(dtype, tokens, vocabulary)
    for name, dtype in DTYPES.items():
        results[f"chunked {name}"] = max(chunked(dtype, (16,)), chunked(dtype, (8, 5)))
        results[f"whole {name}"] = whole(dtype)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
