"""The Triton kernel of the loss, against PyTorch's in double precision.

Triton's interpreter runs it on a CPU. It is chosen when Triton is imported, so it needs a process
of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.training import loss_kernel

PAD = 1
CASES = [  # tokens, vocabulary
    (1, 7),
    (5, 301),
    (4, 16_385),
    (3, 50_264),
]
LIMITS = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Largest relative difference of a gradient in half precision: one unit in the last place."""


def inputs(tokens, vocabulary, dtype, device="cpu"):
    """Logits (K, V), some of them -inf, and targets (K,), the first of several is padding."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(tokens, vocabulary)).to(dtype)
    logits[:, [0, vocabulary - 1]] = -torch.inf
    target = torch.randint(2, vocabulary - 1, (tokens,))
    if tokens > 1:
        target[0] = PAD
    return logits.to(device), target.to(device)


def compare(dtype, device="cpu"):
    """Losses and gradients of all cases, of a chunk and of all logits."""
    for tokens, vocabulary in CASES:
        logits, target = inputs(tokens, vocabulary, dtype, device)
        for scale in (1.0, 128.0):
            factor = torch.tensor(scale, device=device)
            exact = logits.double().requires_grad_()
            expected = F.cross_entropy(exact, target, ignore_index=PAD, reduction="none")
            (expected.sum() * scale).backward()
            expected = expected.detach().float()
            gradient = exact.grad.to(dtype)
            of_chunk = logits.clone()
            nll = loss_kernel.losses_and_gradient_(of_chunk, target, factor, PAD)
            leaf = logits.clone().requires_grad_()
            total, of_tokens = loss_kernel.WholeLoss.apply(leaf.clone(), target, PAD)
            (total * factor).backward()
            for losses in (nll, of_tokens):
                torch.testing.assert_close(losses, expected, rtol=1e-6, atol=2e-6)
            for by_logits in (of_chunk, leaf.grad):
                assert by_logits.dtype == gradient.dtype == dtype
                limits = {"rtol": LIMITS[dtype], "atol": 1e-6 * scale}
                torch.testing.assert_close(by_logits, gradient, **limits)
                assert not by_logits[target == PAD].any()
                assert not by_logits[:, [0, -1]].any()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_equals_pytorch_in_double_precision_in_tritons_interpreter():
    code = "import tests.fairseq_alma.test_loss_kernel as t; [t.compare(d) for d in t.LIMITS]"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
def test_the_kernel_equals_pytorch_in_double_precision_on_a_gpu(dtype):
    compare(dtype, "cuda")


def test_the_operations_have_shapes_on_the_meta_device():
    logits = torch.empty(3, 11, dtype=torch.bfloat16, device="meta")
    target = torch.empty(3, dtype=torch.int64, device="meta")
    scale = torch.empty((), device="meta")
    version = logits._version
    nll = loss_kernel.losses_and_gradient_(logits, target, scale, PAD)
    assert (nll.shape, nll.dtype, nll.is_meta) == ((3,), torch.float32, True)
    assert logits._version > version  # autograd sees that the logits were overwritten
