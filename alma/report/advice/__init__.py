"""Advice from records: forecasts, and what to do with the mega-batches to come."""
