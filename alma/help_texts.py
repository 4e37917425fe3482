"""Help of options that several commands share."""

RUNS = "a run directory, or a folder that contains run directories"
WAITING_TIME = "mega-batches that arrive before each stage (default: 1)"
REPLAY = "train on all mega-batches received so far, not only on the new ones"
SEED = "seed of the initial weights and of the data order (default: 0)"
SEEDS = "one run for each seed of a list or range, such as 1,5 or 0-2"
WORKERS = "processes (default: one for each core of this machine)"
CONTEXT_WINDOW = "evaluate each token with at least N tokens of context, where the text has them (default: 0)"
