"""Text that every machine has, as JSON lines for `alma data`: `alma corpus RECIPE`."""
