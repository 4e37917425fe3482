"""fairseq's --store-ema: a moving average of the weights, saved in every checkpoint.

The rule is in `alma.averages`; the initial weights do not enter the average. fairseq's own average
has four faults: it averages tied weights twice per update, fails on integer buffers, rounds in half
precision, and starts a new stage from the previous stage's average. No upstream issue known;
unnecessary once fairseq averages each parameter once, in fp32.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fairseq.models.ema import EMA
from torch import Tensor

from alma import averages
from alma.errors import UserError

logger = logging.getLogger(__name__)

_COPIED = 2**26


class WeightAverage(EMA):
    """The average of each parameter once, in fp32 (--ema-fp32 is implied); buffers are copied."""

    def __init__(self, model, config, device=None, updates: int = 0, eta: float | None = None):
        """`updates`: number of updates in a restored average, else 0; `eta`: as --ema-poly."""
        super().__init__(model, config, device)
        self.model.float()
        self.updates = updates
        self.eta = eta
        self.is_late = False  # whether `step` waits for `catch_up`, see `training.late`
        self.due: tuple[torch.nn.Module, int] | None = None  # the arguments of that step

    def build_fp32_params(self, state_dict=None) -> None:
        """No second copy: the average itself is in fp32."""

    def step(self, new_model: torch.nn.Module, updates: int) -> None:
        """Average the weights after an update; if `is_late`, in `catch_up`."""
        if not self.is_late:
            super().step(new_model, updates)
            return
        starts = updates >= self.config.ema_start_update
        self._set_decay(self.config.ema_decay if starts else 0)  # fairseq logs it now
        self.due = (new_model, updates)

    def catch_up(self) -> None:
        """Average the weights after the last update, which have not changed since."""
        if self.due is not None:
            super().step(*self.due)
            self.due = None

    @torch.no_grad()
    def _step_internal(self, new_model: torch.nn.Module, updates=None) -> None:
        if self.decay:  # 0 before --ema-start-update: then the average copies the weights
            self.updates += 1
        share = averages.share(max(1, self.updates), self.decay, self.eta)
        pairs = zip(self.model.parameters(), new_model.parameters(), strict=True)
        for group in _groups(pairs):
            in_fp32 = [weight.float() for _, weight in group]
            torch._foreach_lerp_([average for average, _ in group], in_fp32, share)
        copies = list(self.model.buffers())
        if copies:
            torch._foreach_copy_(copies, list(new_model.buffers()))


def _groups(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs of an average and a weight, in groups for one kernel.

    A group ends once it has _COPIED numbers, the size of the fp32 copy of half-precision weights.
    """
    group: list[tuple[Tensor, Tensor]] = []
    numbers = 0
    for average, weight in pairs:
        group.append((average, weight))
        numbers += weight.numel()
        if numbers >= _COPIED:
            yield group
            group = []
            numbers = 0
    if group:
        yield group


def begin(trainer, extra_state: dict[str, Any] | None) -> None:
    """Resume the average in `extra_state`, or start one if training starts.

    With --schedule stage every stage, grown or not, starts an average: none spans two stages.
    UserError: --ema-poly is negative, or --store-ema is missing.
    """
    saved = (extra_state or {}).pop("ema", None)
    config = trainer.cfg.ema
    task = trainer.task
    eta = task.args.ema_poly
    if eta is not None and not (config.store_ema and eta >= 0):
        raise UserError(f"--ema-poly {eta:g}: give a number from 0, and --store-ema")
    if not config.store_ema:
        return
    updates = trainer.get_num_updates()
    resumes = updates and saved
    if not resumes:
        task.average_from = updates
        logger.info(f"the weight average starts after update {updates}")
    calls = updates - task.average_from
    copied = max(0, config.ema_start_update - 1 - task.average_from)
    averaged = max(0, calls // config.ema_update_freq - copied // config.ema_update_freq)
    trainer._ema = WeightAverage(trainer.get_model(), config, trainer.device, averaged, eta)
    if resumes:
        trainer.ema.restore(saved)
        trainer.ema.update_freq_counter = calls % config.ema_update_freq
