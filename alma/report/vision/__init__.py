"""Reports of image runs: the paper's figures."""
