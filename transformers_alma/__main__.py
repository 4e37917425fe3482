"""The engine as a trainer of `alma train`: train or evaluate the task in a stage.json.

Usage: python -m transformers_alma FLAGS PATH/stage.json
"""

import os
import sys

from alma.errors import command
from alma.trainer import StageTask


@command
def main() -> None:
    """Do the task whose path is the last word; the words before it are flags."""
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
    processes = arguments.engine.num_processes or 1
    if processes > 1 and "RANK" not in os.environ:
        from transformers_alma.launch import run_processes

        sys.exit(run_processes(task, arguments.engine, words))
    from transformers_alma.training import train

    train(task, arguments)


if __name__ == "__main__":
    main()
