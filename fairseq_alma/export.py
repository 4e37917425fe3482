"""Export a checkpoint to Hugging Face: `alma export`.

`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` loads the result: the weights, config.json
and modeling_alma.py, the model's code. With --tokenizer, `AutoTokenizer.from_pretrained(DIR)` works too.
"""

from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.stream import is_stream
from fairseq_alma.defaults import WEIGHTS_HELP, weights
from fairseq_alma.run_models import models_of

_EXAMPLES = """\
examples:
  alma export runs/gmoe --out gmoe_hf
  alma export stage_03/checkpoint_best.pt --out stage_hf --tokenizer stream
  alma export ensemble.pt --out ensemble_hf --weights average
"""


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.export",
        usage="%(prog)s {RUN | CHECKPOINT} --out DIR [options]",
        description="Export a language model to a directory that Hugging Face's AutoModelForCausalLM and, "
        "with --tokenizer, AutoTokenizer load.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    kinds = (
        "a run of `alma train`: the model of its last stage, with its tokenizer; or a checkpoint of arch "
        "switch_gmoe* or transformer_lm, or an ensemble made by `alma combine`"
    )
    add("model", metavar="RUN|CHECKPOINT", help=kinds)
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    tokenizer = "stream that the model was trained on; its tokenizer is exported too"
    add("--tokenizer", type=Path, metavar="STREAM", help=tokenizer)
    add("--weights", type=weights, metavar="WEIGHTS", help=f"{WEIGHTS_HELP}; of RUN: those it evaluates")
    return made


def _of_run(run: str, tokenizer: Path | None, weights: str | None) -> tuple[str, Path | None, str]:
    """The checkpoint, tokenizer and weights of a run. UserError: several models, or as `models_of`."""
    models = models_of(run, tokenizer, weights)
    if len(models.paths) > 1:
        raise UserError(
            f"{run} deploys {len(models.paths)} models: combine them by `alma combine "
            f"{' '.join(models.paths)} --out FILE`, then export FILE"
        )
    if not is_stream(models.stream) and not models.stream.is_dir():
        raise UserError(f"{models.stream}: the stream of {run} is not here; give its folder as --tokenizer")
    return models.paths[0], models.stream if is_stream(models.stream) else None, models.weights


@command
def main() -> None:
    """Export to Hugging Face."""
    options = parser().parse_args()
    from fairseq_alma.hugging_face import export  # fairseq: seconds to import

    path, tokenizer, chosen = options.model, options.tokenizer, options.weights or "trained"
    if (Path(path) / "run.json").is_file():
        path, tokenizer, chosen = _of_run(path, tokenizer, options.weights)
    export(path, options.out, tokenizer, chosen)
    print(f"{options.out}: load it with AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)")


if __name__ == "__main__":
    main()
