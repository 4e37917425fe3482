"""The chunked loss beside torch's linear_cross_entropy (torch >= 2.13) and cross_entropy of all logits.

Forward and backward of the output layer of the paper's models: 1,536 tokens, V = 50,264, fp32, one thread;
3% of the targets are padding.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from alma.errors import UserError
from benchmarks.timing import spread
from fairseq_alma.training.loss import chunked_nll

TOKENS, VOCABULARY, CHUNK, PAD = 1536, 50_264, 1024, 1
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses() -> dict[str, Loss]:
    """By name: the summed loss of features (S, D), weight (V, D) and target (S,)."""
    if not hasattr(F, "linear_cross_entropy"):
        raise UserError(f"torch {torch.__version__} has no linear_cross_entropy: install 2.13 or newer")

    def torchs(**options) -> Loss:
        chosen = torch.nn.LinearCrossEntropyOptions(**options)
        return lambda x, weight, target: F.linear_cross_entropy(
            x, weight, target, reduction="sum", ignore_index=PAD, options=chosen
        )

    return {
        "chunked": lambda x, weight, target: chunked_nll(x, [weight], target, PAD, CHUNK)[0],
        "torch": torchs(),
        "torch, chunk 1024": torchs(batch_chunk_size=CHUNK),
        "cross_entropy": lambda x, weight, target: F.cross_entropy(
            F.linear(x, weight), target, ignore_index=PAD, reduction="sum"
        ),
    }


def seconds(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """Time of a forward and backward pass, and the gradient by the features."""
    x.grad = weight.grad = None
    started = time.perf_counter()
    loss(x, weight, target).backward()
    taken = time.perf_counter() - started
    assert x.grad is not None
    return taken, x.grad


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each D. A repeat runs all losses in turn; first comes a warm-up, which compares gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, compared = [], losses()
    progress = tqdm(total=2 * (repeats + 1), disable=None, unit="repeat")
    for dim in (512, 768):
        x = torch.randn(TOKENS, dim, requires_grad=True)
        weight = (torch.randn(VOCABULARY, dim) * dim**-0.5).requires_grad_()
        target = torch.randint(4, VOCABULARY, (TOKENS,)).masked_fill_(torch.rand(TOKENS) < 0.03, PAD)
        times: list[dict[str, float]] = []
        for repeat in range(repeats + 1):
            found = {name: seconds(loss, x, weight, target) for name, loss in compared.items()}
            times.append({name: taken for name, (taken, _) in found.items()})
            if not repeat:
                for name, (_, gradient) in found.items():
                    torch.testing.assert_close(gradient, found["chunked"][1], msg=f"gradients of {name}")
            progress.update()
        others = [name for name in compared if name != "chunked"]
        row: dict[str, Any] = {"D": dim, "chunked s": f"{min(each['chunked'] for each in times[1:]):.2f}"}
        row |= {f"{name} / chunked": spread([t[name] / t["chunked"] for t in times[1:]]) for name in others}
        rows.append(row)
    torch.set_num_threads(threads)
    return rows
