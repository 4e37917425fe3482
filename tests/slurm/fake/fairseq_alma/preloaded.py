"""Stand-in for the libraries of a stage: imports nothing."""
