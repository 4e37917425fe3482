"""Test models that exist on every period of dated data: `alma matrix`."""
