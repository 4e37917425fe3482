"""The tokens of a stage, in blocks and batches."""
