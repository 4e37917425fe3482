"""Help of options that several commands share."""

DATA_ROOT = "folder of the image data sets (default: data)"
JOBS = "runs at a time (default: 1)"
RUNS = "a run directory, or a folder that contains run directories"
WAITING_TIME = "mega-batches that arrive before each stage (default: 1)"
REPLAY = "train on all mega-batches received so far, not only on the new ones"
REPLAY_SHARE = (
    "share of each stage's tokens or images that comes from earlier mega-batches, such as .5 (default: 0)"
)
REPLAY_FROM = "with --replay-share: all earlier mega-batches evenly, or the recent ones, of the stage before"
SEED = "seed of the initial weights and of the data order (default: 0)"
SEEDS = "one run for each seed of a list or range, such as 1,5 or 0-2"
SIZE = "size of the experiment: a file in sizes/ beside it, such as small"
WORKERS = "processes (default: one for each core of this machine)"
CONTEXT_WINDOW = "evaluate each token with at least N tokens of context, where the text has them (default: 0)"
