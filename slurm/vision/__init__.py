"""Sweeps of image runs."""
