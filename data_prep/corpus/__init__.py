"""Text that every machine has, as JSON lines for `alma data`: `alma corpus RECIPE`.

A recipe is a module with `documents(source, left_out)`, which yields each document and counts in `left_out`
what is none, and an entry in `recipes.RECIPES`.
"""
