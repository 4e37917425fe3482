"""The fairseq plug-in: importing it registers the task `alma_lm` and the archs `switch_gmoe*`."""

from fairseq_alma import compat, ensemble, switch_lm, task

compat.install()

__all__ = ["compat", "ensemble", "switch_lm", "task"]
