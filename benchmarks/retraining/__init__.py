"""Rules that decide when to retrain, compared by total cost on real streams."""

from benchmarks.retraining.main import main

__all__ = ["main"]
