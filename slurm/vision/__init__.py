"""Sweeps of image runs: what an element of the array job does."""
