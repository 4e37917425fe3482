"""The launcher: runs of language models and sweeps of image runs, on this machine and on SLURM."""
