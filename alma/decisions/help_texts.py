"""Help that `alma due` and `alma gate` share."""

RUN = "a run directory, or a folder with one run"
JSON = "print a JSON object in place of the line; its fields are in docs/decisions.md"
EXIT_CODES = "Exit code: 0 yes, 1 no, 3 no evidence, 2 bad input."
