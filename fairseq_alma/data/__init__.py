"""What a stage trains on: blocks of tokens."""
