"""Imports the libraries of a stage's commands; `slurm.engine.forks` forks these commands from a
process that has done so. Importing torch and fairseq takes longer than a short stage trains."""

import fairseq.checkpoint_utils
import fairseq.options
import fairseq.trainer
import torch._dynamo  # the first optimizer imports it

__all__ = ["fairseq", "torch"]
