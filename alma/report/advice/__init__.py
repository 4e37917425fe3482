"""Advice from records: the front, forecasts, and what to do with the mega-batch to come."""

MEASURES = ("average", "final", "cer")
"""By which configurations are compared: mean of the metric over t = 1, 2, ..., its last value, or its sum."""
