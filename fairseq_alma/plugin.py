"""Register the task, the archs and the criterion with fairseq.

A script that imports fairseq gets these names and nothing else; `hooks` are installed when a command starts.
"""

from fairseq import options

from fairseq_alma import compat, hooks, switch_lm, task
from fairseq_alma.training import loss

__all__ = ["loss", "switch_lm", "task"]

compat.replace(options, "get_parser", hooks.install_first)
