"""Count the mega-batches of a fairseq-preprocess directory: `python -m fairseq_alma.reshard`."""

import json

from alma.errors import Parser, UserError, command


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.reshard",
        usage="%(prog)s DIR[:DIR...] {--megabatch-words N | --megabatch-tokens N} [--megabatch-seed S]",
        description="Print as JSON into how many mega-batches `--task alma_lm` cuts the output of "
        "fairseq-preprocess.",
        epilog="examples:\n  python -m fairseq_alma.reshard data-bin --megabatch-words 1000000",
    )
    add = made.add_argument
    add("data", metavar="DIR", help="output of fairseq-preprocess; join the shards of one corpus by ':'")
    add("--megabatch-words", type=int, default=0, metavar="N", help="words of each mega-batch")
    add("--megabatch-tokens", type=int, default=0, metavar="N", help="tokens of each mega-batch")
    encoder = "GPT-2's encoder.json; --megabatch-words needs it if dict.txt has ids, not tokens"
    add("--gpt2-encoder-json", default="", metavar="FILE", help=encoder)
    seed = "seed of the random order of documents (default: 1)"
    add("--megabatch-seed", type=int, default=1, metavar="S", help=seed)
    return made


@command
def main() -> None:
    """Print the number of mega-batches, and of the items in each."""
    given = parser().parse_args()
    if not (given.megabatch_words or given.megabatch_tokens):
        raise UserError("give --megabatch-words or --megabatch-tokens")
    from fairseq_alma.plugin import task  # seconds; fairseq must be imported before task

    cut = task.AlmaLMTask.setup_task(task.AlmaLMConfig(dataset_impl=None, **vars(given))).megabatches
    print(json.dumps({"megabatches": len(cut), "items": [len(items) for items in cut]}))


if __name__ == "__main__":
    main()
