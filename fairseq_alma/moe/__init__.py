"""The Switch layer: router, experts, dispatch, expert parallelism, growth."""
