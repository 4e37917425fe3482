"""Registers the task, the archs and the criterion, and has fairseq's commands start with the work-arounds.

A script that only imports fairseq gets the names and nothing else.
"""

from fairseq import options

from fairseq_alma import compat, ensemble, switch_lm, task
from fairseq_alma.training import loss

__all__ = ["ensemble", "loss", "switch_lm", "task"]

options.get_parser = compat.at_entry(options.get_parser)
