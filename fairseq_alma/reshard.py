"""How many mega-batches a fairseq-preprocess directory gives: `python -m fairseq_alma.reshard DIR …`."""

import json

from alma.errors import Parser, UserError, command
from fairseq_alma.task import AlmaLMConfig, AlmaLMTask


@command
def main() -> None:
    """Print how many mega-batches a fairseq-preprocess directory gives, as JSON."""
    parser = Parser(prog="python -m fairseq_alma.reshard", description=main.__doc__)
    parser.add_argument("data", help="directory that fairseq-preprocess wrote; several joined by ':'")
    parser.add_argument("--megabatch-words", type=int, default=0)
    parser.add_argument("--megabatch-tokens", type=int, default=0)
    parser.add_argument("--megabatch-seed", type=int, default=1)
    given = parser.parse_args()
    if not (given.megabatch_words or given.megabatch_tokens):
        raise UserError("give --megabatch-words or --megabatch-tokens")
    task = AlmaLMTask.setup_task(AlmaLMConfig(dataset_impl=None, **vars(given)))
    parts = task.cut()
    print(json.dumps({"megabatches": len(parts), "items": [len(part) for part in parts]}))


if __name__ == "__main__":
    main()
