"""Reports of language models: the paper's tables and figures."""
