"""The engine as a trainer of `alma train`: train or evaluate the task in a stage.json.

Usage: python -m transformers_alma FLAGS PATH/stage.json
"""

import os
import sys

from alma.errors import command
from alma.trainer import StageTask
from transformers_alma import worker


@command
def main() -> None:
    """Do the task whose path is the last word; the words before it are flags."""
    if worker.is_worker():
        worker.begin()
    else:
        worker.clean(os.environ)
    task = StageTask.read(sys.argv[-1])
    words = sys.argv[1:-1]
    from transformers.utils import logging  # imports torch

    from transformers_alma.arguments import parse

    logging.disable_progress_bar()  # of files: lines of a log, and no work is long there
    arguments = parse(words)
    if task.action == "evaluate":
        from transformers_alma.evaluation import evaluate

        evaluate(task, arguments)
        return
    if arguments.has_several_processes and not worker.is_worker():
        from transformers_alma.launch import run_processes

        sys.exit(run_processes(task, arguments, words))
    if not worker.is_worker():
        worker.use_one_gpu(os.environ)
    from transformers_alma.training import train

    train(task, arguments)


if __name__ == "__main__":
    main()
