"""Count the mega-batches of a fairseq-preprocess directory: `python -m fairseq_alma.reshard`."""

import json

from alma.errors import Parser, UserError, command


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.reshard",
        usage="%(prog)s DIR[:DIR...] [--megabatch-words N | --megabatch-tokens N] [--megabatch-seed S]",
        description="Print as JSON into how many mega-batches `--task alma_lm` cuts the output of "
        "fairseq-preprocess.",
        epilog="examples:\n  python -m fairseq_alma.reshard data-bin --megabatch-words 1000000",
    )
    add = made.add_argument
    add("data", metavar="DIR", help="output of fairseq-preprocess; join the shards of one corpus by ':'")
    words = "words of each mega-batch (default: 440000000 with GPT-2's ids and encoder.json)"
    add("--megabatch-words", type=int, default=0, metavar="N", help=words)
    add("--megabatch-tokens", type=int, default=0, metavar="N", help="tokens of each mega-batch")
    encoder = "GPT-2's encoder.json, if dict.txt has ids, not tokens (default: the one beside dict.txt)"
    add("--gpt2-encoder-json", default="", metavar="FILE", help=encoder)
    seed = "seed of the random order of documents (default: 1)"
    add("--megabatch-seed", type=int, default=1, metavar="S", help=seed)
    return made


@command
def main() -> None:
    """Print the number of mega-batches, and of the items in each."""
    given = parser().parse_args()
    from fairseq_alma.plugin import task  # seconds; fairseq must be imported before task

    made = task.AlmaLMTask.setup_task(task.AlmaLMConfig(dataset_impl=None, **vars(given)))
    if not made.is_cut():
        raise UserError(
            f"{given.data}: give --megabatch-words or --megabatch-tokens; for GPT-2's ids, "
            "--gpt2-encoder-json is enough"
        )
    cut = made.megabatches
    print(json.dumps({"megabatches": len(cut), "items": [len(items) for items in cut], "note": made.note}))


if __name__ == "__main__":
    main()
