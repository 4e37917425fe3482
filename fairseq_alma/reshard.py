"""Count the mega-batches of a fairseq-preprocess directory: `python -m fairseq_alma.reshard DIR …`."""

import json

from alma.errors import Parser, UserError, command


@command
def main() -> None:
    """Print into how many mega-batches a fairseq-preprocess directory is cut, as JSON."""
    parser = Parser(prog="python -m fairseq_alma.reshard", description=main.__doc__)
    parser.add_argument("data", help="output of fairseq-preprocess; join several directories by ':'")
    parser.add_argument("--megabatch-words", type=int, default=0)
    parser.add_argument("--megabatch-tokens", type=int, default=0)
    parser.add_argument("--megabatch-seed", type=int, default=1)
    given = parser.parse_args()
    if not (given.megabatch_words or given.megabatch_tokens):
        raise UserError("give --megabatch-words or --megabatch-tokens")
    from fairseq_alma.plugin import task  # seconds; fairseq must be imported before task

    cut = task.AlmaLMTask.setup_task(task.AlmaLMConfig(dataset_impl=None, **vars(given))).megabatches
    print(json.dumps({"megabatches": len(cut), "items": [len(items) for items in cut]}))


if __name__ == "__main__":
    main()
