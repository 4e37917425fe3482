"""The ALMA protocol, shared by language models and images. It imports neither torch nor fairseq."""

__version__ = "0.1.0"
