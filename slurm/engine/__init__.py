"""Jobs on SLURM: submission, dependencies, queue, child processes, locks. Independent of what a job does."""
