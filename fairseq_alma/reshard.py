"""Count the mega-batches of a fairseq-preprocess directory: `python -m fairseq_alma.reshard`."""

import json

from alma.errors import Parser, UserError, command


def parser() -> Parser:
    """The command line, except for fairseq's flags."""
    return Parser(
        prog="python -m fairseq_alma.reshard",
        usage="%(prog)s DIR[:DIR...] [--megabatch-words N] [flags of fairseq-train]",
        description="Print as JSON into how many mega-batches `--task alma_lm` cuts the output of "
        "fairseq-preprocess. Join the shards of one corpus by ':'.",
        epilog="examples:\n  python -m fairseq_alma.reshard data-bin --megabatch-words 1000000",
        allow_abbrev=False,
    )


@command
def main() -> None:
    """Print the number of mega-batches, and of the items and tokens in each."""
    _, words = parser().parse_known_args()
    from fairseq import options, tasks  # seconds

    of_training = options.get_training_parser(default_task="alma_lm")
    args = options.parse_args_and_arch(of_training, words)
    task = tasks.setup_task(args)
    if not task.is_cut():
        flags = "--megabatch-words or --megabatch-tokens"
        exception = "for GPT-2's ids, --gpt2-encoder-json is enough"
        raise UserError(f"{args.data}: give {flags}; {exception}")
    cut = task.megabatches
    counts = {"megabatches": len(cut), "items": [len(items) for items in cut]}
    print(json.dumps({**counts, "tokens": task.megabatch_tokens(), "note": task.note}))


if __name__ == "__main__":
    main()
