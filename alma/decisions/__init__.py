"""Decisions from the record of one run: `alma due`, `alma gate`."""
