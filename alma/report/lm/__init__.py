"""The paper's tables and figures of language models."""
