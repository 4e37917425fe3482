"""Speed and memory, always against a named peer in the same run."""
