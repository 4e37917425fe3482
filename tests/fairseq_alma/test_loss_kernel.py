"""The loss kernel computes what PyTorch's operators compute, without a copy of the logits."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fairseq_alma.training import loss, loss_kernel
from tests.fairseq_alma import kernel_on_a_cpu

pytest.importorskip("triton")

LIMITS = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}
"""Of gradients: the interpreter cuts bf16 off where a GPU rounds."""


@pytest.fixture(scope="module")
def results() -> dict:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", kernel_on_a_cpu.__name__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [f"{k}x{v}" for k, v in kernel_on_a_cpu.SHAPES])
def test_losses_and_gradients_of_rows_are_those_of_log_softmax(results, dtype, shape):
    row = results[f"rows {dtype} {shape}"]
    assert row["nll"] < 1e-5
    assert row["gradient"] < LIMITS[dtype]
    if dtype == "fp16":
        assert row["equal gradients"] > 0.998  # one rounding apart where exponentials are
    assert row["the same"], "the two ways to the gradient differ"
    assert row["logits kept"], "the loss alone changed the logits"
    assert row["padding is zero"]


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 1e-3)])
def test_criteria_have_the_loss_and_gradients_that_they_had(results, dtype, limit):
    assert results[f"chunked {dtype}"] < limit
    assert results[f"whole {dtype}"] < limit


@pytest.fixture
def choice(caplog, monkeypatch):
    """`choice(device_type, failure)`: whether the kernel is used where a trial of it has that
    `failure`, and what the log says."""

    def choose(device_type: str, failure: str = "") -> tuple[bool, list[str]]:
        loss_kernel.is_used.cache_clear()
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level("INFO"):

            def trial(*arguments):
                if failure:
                    raise RuntimeError(failure)

            patch.setattr(loss_kernel, "losses_and_gradient_", trial)
            patch.setattr(torch, "zeros", lambda *_, **__: None)
            patch.setattr(torch, "ones", lambda *_, **__: None)
            used = loss_kernel.is_used(device_type)
            loss_kernel.is_used(device_type)  # the log names it once
        return used, caplog.messages

    yield choose
    loss_kernel.is_used.cache_clear()


def test_only_a_gpu_on_which_triton_works_has_the_kernel(choice, monkeypatch):
    assert choice("cuda") == (True, ["loss: one Triton kernel for loss and gradient"])
    assert choice("cpu") == (False, ["loss: PyTorch's operators (no GPU)"])
    failed = choice("cuda", "no C compiler\nlook here")
    assert failed == (False, ["loss: PyTorch's operators (Triton fails: no C compiler)"])
    monkeypatch.setattr(loss_kernel.importlib.util, "find_spec", lambda name: None)
    assert choice("cuda") == (False, ["loss: PyTorch's operators (Triton is not installed)"])


def test_the_operations_have_shapes_without_values():
    """So that torch.compile and counts on the meta device know them."""
    logits = torch.empty(5, 301, device="meta", dtype=torch.bfloat16)
    target = torch.empty(5, device="meta", dtype=torch.int64)
    factor = torch.empty((), device="meta")
    nll, log_sum = loss_kernel.row_losses(logits, target, 1)
    assert (nll.shape, log_sum.dtype) == ((5,), torch.float32)
    assert loss_kernel.losses_and_gradient_(logits, target, factor, 1).shape == (5,)
    assert loss_kernel.logits_to_gradient_(logits, target, log_sum, factor, 1) is None


def test_a_criterion_on_a_gpu_keeps_no_copy_of_the_logits(monkeypatch):
    """On the meta device, where the kernel is used as on a GPU: nothing of V columns in fp32."""
    features = torch.empty(64, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(4000, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    target = torch.empty(64, device="meta", dtype=torch.int64)
    wide: list[torch.dtype] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (4000,):
                    wide.append(tensor.dtype)
            return output

    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.no_grad())
    with Watch():
        logits = features @ weight.t()
        loss_kernel.WholeLoss.apply(logits, target, 1)[0].backward()
        loss._run(
            features.detach(), [weight.detach()], target, 1, 16, (), torch.ones((), device="meta")
        )
    assert wide
    assert set(wide) == {torch.bfloat16}


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [70, 80, 90])  # V100, A100, H100
def test_the_kernels_compile_for_a_gpu_and_read_several_logits_at_a_time(
    capability, monkeypatch, tmp_path
):
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fairseq_alma.training import loss_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", capability, 32)
    block = loss_kernel._block(torch.empty(1, 50_264, device="meta"))
    types = {"logits": "*fp16", "target": "*i64", "nll": "*fp32", "log_sums": "*fp32"}
    types |= {"factors": "*fp32", "pad": "i32"}
    of_both = {"vocabulary": 50_264, "BLOCK": block}
    cases = [
        (loss_triton.losses, {**of_both, "HAS_LOG_SUM": True, "HAS_GRADIENT": False}),
        (loss_triton.losses, {**of_both, "HAS_LOG_SUM": False, "HAS_GRADIENT": True}),
        (loss_triton.gradient, of_both),
    ]
    for function, constants in cases:
        names = function.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        aligned = {(0,): [["tt.divisibility", 16]]}
        source = ASTSource(function, signature, values, aligned)
        kernel = compiled(source, target=target, options={"num_warps": loss_kernel._WARPS})
        assert ".v4." in kernel.asm["ptx"]
        assert kernel.asm["cubin"]
