"""Advice from records: the front, forecasts, and what to do with the mega-batch to come."""

MEASURES = {
    "coming": "mean over the mega-batches to come, waiting included",
    "average": "mean over all t from 1 on: counts the past, and untrained models",
    "final": "value after the last mega-batch: ignores the months that a stale model serves",
    "cer": "sum over all t from 1 on: counts the past, and untrained models",
}
"""By which configurations are compared: `--by`."""
