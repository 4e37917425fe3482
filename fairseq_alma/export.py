"""A checkpoint for Hugging Face: python -m fairseq_alma.export CKPT --out DIR [--tokenizer STREAM]

DIR is what transformers loads by `AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`: the
weights, config.json, and modeling_alma.py, which computes what fairseq computes. With --tokenizer it is also
what `AutoTokenizer.from_pretrained(DIR)` loads.
"""

from pathlib import Path

from alma.errors import Parser, command
from fairseq_alma.defaults import WEIGHTS


@command
def main() -> None:
    """Entry point of `python -m fairseq_alma.export`."""
    parser = Parser(prog="python -m fairseq_alma.export", description="Make a Hugging Face model.")
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="of a switch_gmoe* or transformer_lm, or combined")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    add("--tokenizer", type=Path, metavar="STREAM", help="the stream that it was trained on")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="average: those of --store-ema")
    options = parser.parse_args()
    from fairseq_alma.hugging_face import export  # and fairseq: seconds

    export(options.checkpoint, options.out, options.tokenizer, options.weights)
    print(f"{options.out}: load it with AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)")


if __name__ == "__main__":
    main()
