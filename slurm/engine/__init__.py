"""Jobs on SLURM: submission, dependencies, queue, child processes. Independent of what a job
does."""
