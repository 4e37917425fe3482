"""The chunked loss beside torch's linear_cross_entropy (torch >= 2.13) and cross_entropy of all logits.

Forward and backward of the output layer of the paper's models: 1,536 tokens, V = 50,264, fp32, one thread;
3% of the targets are padding.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from alma.errors import UserError
from benchmarks.timing import Rows, one_thread, ratios, turns
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


def gradient(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> Tensor | None:
    """The gradient by the features, after a forward and backward pass."""
    x.grad = weight.grad = None
    loss(x, weight, target).backward()
    return x.grad


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each D; the gradients of all losses are compared first."""
    torch.manual_seed(0)
    rows = []
    for dim in tqdm((512, 768), disable=None, unit="width"):
        x = torch.randn(TOKENS, dim, requires_grad=True)
        weight = (torch.randn(VOCABULARY, dim) * dim**-0.5).requires_grad_()
        target = torch.randint(4, VOCABULARY, (TOKENS,)).masked_fill_(torch.rand(TOKENS) < 0.03, PAD)
        passes = {name: partial(gradient, loss, x, weight, target) for name, loss in losses().items()}
        expected = passes["chunked"]()
        for name, work in passes.items():
            torch.testing.assert_close(work(), expected, msg=f"gradients of {name}")
        measured = turns(passes, repeats)
        others = [name for name in passes if name != "chunked"]
        row = {"D": dim, "chunked s": f"{min(turn['chunked'] for turn in measured):.2f}"}
        rows.append(row | {f"{name} / chunked": ratios(measured, name, "chunked") for name in others})
    return rows
