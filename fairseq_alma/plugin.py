"""Register the task, the archs and the criterion with fairseq.

A script that imports fairseq gets these registrations and np.compat, nothing else: the changes in
`hooks` are installed when a fairseq command starts.
"""

import types

import numpy as np
from fairseq import options

from fairseq_alma import compat, hooks, switch_lm, task  # noqa: F401
from fairseq_alma.training import loss  # noqa: F401

if not hasattr(np, "compat"):
    # TokenBlockDataset's break mode "eos" (fairseq-interactive, `score` of a hub model) uses
    # np.compat.long, gone in NumPy 2. No upstream issue known; unnecessary once fairseq supports
    # NumPy 2.
    np.compat = types.SimpleNamespace(long=np.int64)  # type: ignore[attr-defined]  # noqa: NPY201
compat.replace(options, "get_parser", hooks.install_first)
