"""Learners of images on a stream of mega-batches: `run(MegaBatchStream("digits"), "ens", "runs/ens")`."""

from vision.data import MegaBatchStream
from vision.run import run  # the function: loading its module first keeps the name `vision.run` for it

__all__ = ["MegaBatchStream", "run"]
