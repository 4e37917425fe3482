"""Export a checkpoint to Hugging Face: `alma export`.

`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` loads the result: the weights, config.json
and modeling_alma.py, the model's code. With --tokenizer, `AutoTokenizer.from_pretrained(DIR)` works too.
"""

from pathlib import Path

from alma.errors import Parser, command
from fairseq_alma.defaults import WEIGHTS_HELP, weights

_EXAMPLES = """\
examples:
  alma export runs/gmoe/stage_03/checkpoint_best.pt --out gmoe_hf --tokenizer stream
  alma export ensemble.pt --out ensemble_hf --weights average
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.export",
        usage="%(prog)s CHECKPOINT --out DIR [options]",
        description="Export a language model to a directory that Hugging Face's AutoModelForCausalLM and, "
        "with --tokenizer, AutoTokenizer load.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    kinds = "a model of arch switch_gmoe* or transformer_lm, or an ensemble made by `alma combine`"
    add("checkpoint", metavar="CHECKPOINT", help=kinds)
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    tokenizer = "stream that the model was trained on; its tokenizer is exported too"
    add("--tokenizer", type=Path, metavar="STREAM", help=tokenizer)
    add("--weights", type=weights, default="trained", metavar="WEIGHTS", help=WEIGHTS_HELP)
    return made


@command
def main() -> None:
    """Export to Hugging Face."""
    options = parser().parse_args()
    from fairseq_alma.hugging_face import export  # fairseq: seconds to import

    export(options.checkpoint, options.out, options.tokenizer, options.weights)
    print(f"{options.out}: load it with AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)")


if __name__ == "__main__":
    main()
