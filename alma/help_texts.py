"""Help of options that several commands share."""

DATA_ROOT = "folder of the image data sets (default: data)"
JOBS = "runs at a time (default: 1)"
RUNS = "a run directory, or a folder that contains run directories"
SEEDS = "one run for each seed of a list or range, such as 1,5 or 0-2"
SIZE = "size of the experiment, one of its `sizes`, such as small"
WORKERS = "processes (default: one for each core of this machine)"
