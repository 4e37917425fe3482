"""--optimizer adamw_schedulefree: Schedule-Free AdamW (Defazio et al. 2024) by its library, schedulefree.

Gradients are computed at y; x, a weighted mean of all z, is validated and saved. The parameters are y during
an update and x at all other times, so that validation, saving, --store-ema and growth need no change. To go
to x only for them would round y: a run stopped by a signal would end with other bits than one that is not.
"""

import argparse
import ast
from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from alma.errors import UserError, require_package
from fairseq_alma.defaults import SCHEDULE_FREE, flag

_HALF = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16", "amp")


@dataclass
class ScheduleFreeConfig(FairseqDataclass):
    """The flags of AdamW, by the names of fairseq's Adam."""

    adam_betas: Any = flag((0.9, 0.999), "beta 1, y's share of x, and beta 2")
    adam_eps: float = flag(1e-8, "added to the root of the second moment")
    weight_decay: float = flag(0.0, "weight decay, at y")
    lr: list[float] = field(default=II("optimization.lr"))


@register_optimizer(SCHEDULE_FREE, dataclass=ScheduleFreeConfig)
class AdamWScheduleFree(FairseqOptimizer):
    """The library's optimizer; --lr-scheduler fixed sets its learning rate, with warm-up.

    As in the library, each z counts in x by the square of the largest learning rate so far.
    """

    def __init__(self, cfg: ScheduleFreeConfig, params):
        import schedulefree

        super().__init__(cfg)
        self._optimizer = schedulefree.AdamWScheduleFree(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The library's arguments."""
        return {
            "lr": self.cfg.lr[0],
            "betas": _betas(self.cfg.adam_betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def zero_grad(self) -> None:
        """x -> y: fairseq calls it at the start of each update."""
        super().zero_grad()
        self._optimizer.train()

    def step(self, closure=None, scale: float = 1.0, groups=None) -> None:
        """Update, then y -> x."""
        super().step(closure, scale, groups)
        self._optimizer.eval()


def check(args: argparse.Namespace) -> None:
    """UserError: options of fairseq-train that Schedule-Free cannot be trained with, or no library."""
    name = f"--optimizer {SCHEDULE_FREE}"
    require_package("schedulefree", name)
    if args.lr_scheduler != "fixed":
        raise UserError(
            f"{name} has a constant learning rate: give --schedule stage or continuous, and not "
            f"--lr-scheduler {args.lr_scheduler}"
        )
    if used := [each for each in _HALF if getattr(args, each)]:
        raise UserError(f"{name} trains in fp32: leave out --{used[0].replace('_', '-')}")
    if not 0 < _betas(args.adam_betas)[0] < 1:
        raise UserError(f"--adam-betas {args.adam_betas}: {name} needs the first one in (0, 1)")


def _betas(given: Any) -> tuple[float, float]:
    """Of a config: a tuple, or its text."""
    return ast.literal_eval(given) if isinstance(given, str) else tuple(given)
