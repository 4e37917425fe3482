"""Runs of language models."""
