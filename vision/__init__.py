"""Learners of images on a stream of mega-batches: `run(MegaBatchStream("digits"), learner="ens", out="runs/ens")`."""

from vision.data import MegaBatchStream
from vision.experiment import run

__all__ = ["MegaBatchStream", "run"]
