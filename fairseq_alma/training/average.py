"""fairseq's --store-ema: an exponential moving average of the weights, saved in every checkpoint.

Works around fairseq's own, which averages tied weights twice per update, fails on integer buffers, loses most
updates to rounding in half precision, and starts a new stage from the previous stage's average, or fails if
there is none. No upstream issue known; unnecessary once fairseq averages each parameter once, in fp32.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.models.ema import EMA
from omegaconf import open_dict

logger = logging.getLogger(__name__)


class WeightAverage(EMA):
    """The average of each parameter once, in fp32 (--ema-fp32 is implied); buffers are copied."""

    def __init__(self, model: torch.nn.Module, config, device=None):
        super().__init__(model, config, device)
        self.model.float()

    def build_fp32_params(self, state_dict=None) -> None:
        """No second copy: the average itself is in fp32."""

    @torch.no_grad()
    def _step_internal(self, new_model: torch.nn.Module, updates=None) -> None:
        for average, weight in zip(self.model.parameters(), new_model.parameters(), strict=True):
            average.lerp_(weight.to(average.dtype), 1 - self.decay)
        for copy, buffer in zip(self.model.buffers(), new_model.buffers(), strict=True):
            copy.copy_(buffer)


@contextmanager
def postponed(trainer) -> Iterator[None]:
    """Load a checkpoint into `trainer` without its average; `begin` restores that afterwards."""
    wanted = trainer.cfg.ema.store_ema
    with open_dict(trainer.cfg):
        trainer.cfg.ema.store_ema = False
    try:
        yield
    finally:
        with open_dict(trainer.cfg):
            trainer.cfg.ema.store_ema = wanted


def begin(trainer, extra_state: dict[str, Any] | None) -> None:
    """Resume the average in `extra_state`, or start one from the model's weights if training starts.

    Training starts with every stage, grown or not: no average spans two stages.
    """
    saved = (extra_state or {}).pop("ema", None)
    if not trainer.cfg.ema.store_ema:
        return
    updates = trainer.get_num_updates()
    trainer._ema = WeightAverage(trainer.get_model(), trainer.cfg.ema, trainer.device)
    if updates and saved:
        trainer.ema.restore(saved)
        trainer.ema.update_freq_counter = updates % trainer.cfg.ema.ema_update_freq
    else:
        logger.info(f"the weight average starts from the weights after update {updates}")
