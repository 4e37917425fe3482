"""The fairseq plug-in: importing it registers its task, its archs and its criterion."""

from fairseq_alma import compat, ensemble, loss, switch_lm, task

compat.install()

__all__ = ["compat", "ensemble", "loss", "switch_lm", "task"]
