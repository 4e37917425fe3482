"""The chunked loss beside torch's linear_cross_entropy (torch >= 2.13) and cross_entropy of all
logits.

Forward and backward of the output layer of the paper's models: 1,536 tokens, V = 50,264, fp32, one
thread; 3% of the targets are padding.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.timing import Rows, one_thread, ratios, turns
from fairseq_alma.training.loss import chunked_nll

TOKENS = 1536
VOCABULARY = 50_264
CHUNK = 1024
PAD = 1


def gradient(loss: str, x: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
    """The gradient of a summed loss by features (S, D); weight (V, D), target (S,)."""
    x.grad = weight.grad = None
    common: dict[str, Any] = {"ignore_index": PAD, "reduction": "sum"}
    if loss == "chunked":
        total, _ = chunked_nll(x, [weight], target, PAD, CHUNK)
    elif loss == "torch":
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
        total = F.linear_cross_entropy(x, weight, target, options=options, **common)
    else:
        total = F.cross_entropy(F.linear(x, weight), target, **common)
    total.backward()
    return x.grad


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each D; the gradients of all losses are compared first."""
    torch.manual_seed(0)
    rows = []
    for dim in tqdm((512, 768), disable=None, unit="width"):
        x = torch.randn(TOKENS, dim, requires_grad=True)
        weight = (torch.randn(VOCABULARY, dim) * dim**-0.5).requires_grad_()
        target = torch.randint(4, VOCABULARY, (TOKENS,)).masked_fill_(
            torch.rand(TOKENS) < 0.03, PAD
        )
        names = ("chunked", "torch", "cross_entropy")
        passes = {name: partial(gradient, name, x, weight, target) for name in names}
        expected = passes["chunked"]()
        for name, work in passes.items():
            torch.testing.assert_close(work(), expected, msg=f"gradients of {name}")
        measured = turns(passes, repeats)
        row = {"D": dim, "chunked s": f"{min(turn['chunked'] for turn in measured):.2f}"}
        rows.append(
            row | {f"{name} / chunked": ratios(measured, name, "chunked") for name in names[1:]}
        )
    return rows
