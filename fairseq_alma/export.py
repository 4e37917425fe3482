"""Export a checkpoint to Hugging Face: `python -m fairseq_alma.export CKPT --out DIR [--tokenizer STREAM]`.

`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` loads the result: the weights, config.json
and modeling_alma.py, the model's code. With --tokenizer, `AutoTokenizer.from_pretrained(DIR)` works too.
"""

from pathlib import Path

from alma.errors import Parser, command
from fairseq_alma.defaults import WEIGHTS


@command
def main() -> None:
    """Export to Hugging Face."""
    parser = Parser(prog="python -m fairseq_alma.export", description=main.__doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a switch_gmoe*, transformer_lm or combined model")
    add("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    add("--tokenizer", type=Path, metavar="STREAM", help="export the tokenizer of the training stream too")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="average: the --store-ema weights")
    options = parser.parse_args()
    from fairseq_alma.hugging_face import export  # fairseq: seconds to import

    export(options.checkpoint, options.out, options.tokenizer, options.weights)
    print(f"{options.out}: load it with AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)")


if __name__ == "__main__":
    main()
