"""Register the task, the archs, the criterion and the optimizer with fairseq.

A script that imports fairseq gets these names and nothing else; `hooks` are installed when a command starts.
"""

from fairseq import options

from fairseq_alma import compat, ensemble, hooks, switch_lm, task
from fairseq_alma.training import loss, schedule_free

__all__ = ["ensemble", "loss", "schedule_free", "switch_lm", "task"]

compat.replace(options, "get_parser", hooks.install_first)
