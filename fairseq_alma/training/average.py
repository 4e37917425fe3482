"""fairseq's --store-ema: an exponential moving average of the weights, kept in every checkpoint.

No upstream issue is known for what fairseq's own does wrong with our models, and we do instead: it averages
tied weights twice an update, and fails on integer buffers; in half precision it loses most updates to
rounding; a new stage goes on with the average of the one before, or fails if that has none.
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
    """fairseq's EMA over each parameter once, in fp32 (--ema-fp32 is implied); buffers are the model's."""

    def __init__(self, model: torch.nn.Module, config, device=None):
        super().__init__(model, config, device)
        self.model.float()

    def build_fp32_params(self, state_dict=None) -> None:
        """Nothing: the average itself is in fp32."""

    @torch.no_grad()
    def _step_internal(self, new_model: torch.nn.Module, updates=None) -> None:
        for average, weight in zip(self.model.parameters(), new_model.parameters(), strict=True):
            average.lerp_(weight.to(average.dtype), 1 - self.decay)
        for mine, buffer in zip(self.model.buffers(), new_model.buffers(), strict=True):
            mine.copy_(buffer)


@contextmanager
def postponed(trainer) -> Iterator[None]:
    """Keep `trainer` from reading an average while it loads a checkpoint: `begin` does afterwards."""
    wanted = trainer.cfg.ema.store_ema
    with open_dict(trainer.cfg):
        trainer.cfg.ema.store_ema = False
    try:
        yield
    finally:
        with open_dict(trainer.cfg):
            trainer.cfg.ema.store_ema = wanted


def begin(trainer, extra_state: dict[str, Any] | None) -> None:
    """Go on with the average in `extra_state`; where training begins, start it from the model's weights.

    A new stage begins, and so does one that was grown: its average has nothing of the stage before.
    """
    kept = (extra_state or {}).pop("ema", None)
    if not trainer.cfg.ema.store_ema:
        return
    updates = trainer.get_num_updates()
    trainer._ema = WeightAverage(trainer.get_model(), trainer.cfg.ema, trainer.device)
    if updates and kept:
        trainer.ema.restore(kept)
        trainer.ema.update_freq_counter = updates % trainer.cfg.ema.ema_update_freq
    else:
        logger.info(f"the average of the weights starts from those after update {updates}")
