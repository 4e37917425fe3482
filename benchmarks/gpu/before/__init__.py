"""The code of 0324bce that later changes replaced, for `python -m benchmarks gpu ladder` and
`ledger`: what each of them gains is seen beside it.

Where a change replaced fairseq's own code, that code comes back; ours is copied here.
"""

import contextlib
import importlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from fairseq import optim, utils
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from alma import averages
from benchmarks.gpu.before import attention, dispatch, loss
from fairseq_alma import hooks
from fairseq_alma.training import weight_average

CHANGES = ("gelu", "foreach", "loss", "waits", "dispatch")
"""Their names, in the order in which the ladder puts them back."""


class Earlier(NamedTuple):
    """Code that takes the place of an attribute."""

    owner: str
    """A module, or a class of one as `module:Class`."""
    name: str
    code: Any


@contextlib.contextmanager
def without(changes: Collection[str]) -> Iterator[None]:
    """Put the earlier code of some changes in place."""
    hooks.install()  # it would put today's code on top
    with contextlib.ExitStack() as stack:
        for change in changes:
            for earlier in EARLIER[change]():
                patch = mock.patch.object(owner_of(earlier.owner), earlier.name, earlier.code)
                stack.enter_context(patch)
        yield


def owner_of(name: str) -> Any:
    """The module or class of an `Earlier`."""
    module, _, kind = name.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, kind) if kind else owner


def gelu() -> list[Earlier]:
    """fairseq's gelu goes to fp32 and back."""
    return [Earlier("fairseq.utils", "get_activation_fn", inspect.unwrap(utils.get_activation_fn))]


def foreach() -> list[Earlier]:
    """fairseq loops over tensors to zero gradients, copy them, take their norm, copy weights."""
    optimizer = "fairseq_alma.training.precision:FP16Optimizer"
    fairseqs = optim.FP16Optimizer
    loops = [
        Earlier(optimizer, name, getattr(fairseqs, name))
        for name in ("zero_grad", "_sync_fp16_grads_to_fp32", "_sync_fp32_params_to_fp16")
    ]
    norm = Earlier("fairseq.utils", "clip_grad_norm_", inspect.unwrap(utils.clip_grad_norm_))
    average = "fairseq_alma.training.weight_average:WeightAverage"
    return [*loops, norm, Earlier(average, "_step_internal", _average)]


@torch.no_grad()
def _average(
    self: weight_average.WeightAverage, new_model: torch.nn.Module, updates: int | None = None
) -> None:
    """Average one tensor after another."""
    if self.decay:
        self.updates += 1
    share = averages.share(max(1, self.updates), self.decay, self.eta)
    for average, weight in zip(self.model.parameters(), new_model.parameters(), strict=True):
        average.lerp_(weight.to(average.dtype), share)
    for copy, buffer in zip(self.model.buffers(), new_model.buffers(), strict=True):
        copy.copy_(buffer)


def losses() -> list[Earlier]:
    """fairseq's loss copies the logits to fp32; so does the chunked one."""
    whole = "fairseq.criterions.cross_entropy:CrossEntropyCriterion"
    of_fairseq = inspect.unwrap(CrossEntropyCriterion.compute_loss)
    chunked = "fairseq_alma.training.loss:ChunkedCrossEntropyCriterion"
    return [
        Earlier(whole, "compute_loss", of_fairseq),
        Earlier(chunked, "compute_loss", loss.compute_loss),
    ]


def waits() -> list[Earlier]:
    """fairseq tests each norm and logs each update on the host."""
    optimizer = "fairseq_alma.training.precision:FP16Optimizer"
    return [
        Earlier("fairseq_alma.training.late", "of", _nothing_late),
        Earlier(optimizer, "clip_grad_norm", optim.FP16Optimizer.clip_grad_norm),
    ]


def _nothing_late(trainer: Any) -> None:
    """Of no trainer are updates read late."""
    del trainer


def diet() -> list[Earlier]:
    """More operations in a Switch layer, and two more in the backward pass of attention."""
    return [
        Earlier("fairseq_alma.moe.layer:SwitchFFN", "forward", dispatch.forward),
        Earlier("fairseq_alma.switch_lm:CausalSelfAttention", "forward", attention.forward),
    ]


EARLIER = {
    "gelu": gelu,
    "foreach": foreach,
    "loss": losses,
    "waits": waits,
    "dispatch": diet,
}
