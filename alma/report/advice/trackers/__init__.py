"""Trackers of experiments: values from their runs, records and decisions into them."""
