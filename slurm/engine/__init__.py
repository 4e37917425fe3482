"""Jobs on this machine and on SLURM; knows no learner."""
