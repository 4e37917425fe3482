"""The paper's figures of image runs."""
