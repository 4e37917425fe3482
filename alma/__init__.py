"""The ALMA protocol, shared by language models and images. It imports neither torch nor fairseq."""
