"""Export a model to Hugging Face: `alma export`.

`AutoModelForCausalLM.from_pretrained(DIR)` loads a dense model, a GPT-2. A Switch Transformer,
whose code is modeling_alma.py, needs `trust_remote_code=True`. With a tokenizer, `AutoTokenizer`
loads that, too.
"""

import os
import shlex
import sys
from pathlib import Path

from alma.errors import Parser, UserError, command, require_package
from alma.markers import read_marker, read_record
from alma.records import Run
from alma.stream import is_stream
from fairseq_alma.defaults import WEIGHTS_HELP, weights

_EXAMPLES = """\
examples:
  alma export runs/gmoe --out gmoe_hf
  alma export runs/digits --out digits_onnx --onnx
  alma export stage_03/checkpoint_best.pt --out stage_hf --tokenizer stream
  alma export stage_03/checkpoint_last.pt --out average_hf --weights average
"""


def parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m fairseq_alma.export",
        usage="%(prog)s {RUN | CHECKPOINT} --out DIR [options]",
        description="Export a language model to a directory that Hugging Face's "
        "AutoModelForCausalLM and, with --tokenizer, AutoTokenizer load. A run of `alma images` "
        "becomes safetensors and, with --onnx, ONNX.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    kinds = "a run of `alma train`: the model of its last stage, with its tokenizer; "
    kinds += "or a checkpoint of arch switch_gmoe* or transformer_lm"
    add("model", metavar="RUN|CHECKPOINT", help=kinds)
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    tokenizer = "stream that the model was trained on; its tokenizer is exported too"
    add("--tokenizer", type=Path, metavar="STREAM", help=tokenizer)
    add(
        "--t",
        type=int,
        metavar="N",
        help="of images: the model after mega-batch N, kept by --save-stages",
    )
    add("--onnx", action="store_true", help="of images: write model.onnx too")
    add(
        "--weights",
        type=weights,
        metavar="WEIGHTS",
        help=f"{WEIGHTS_HELP}; of RUN: those it evaluates",
    )
    return parser


def deployed_by(run: Path) -> str:
    """The checkpoint that `run` deploys: the one evaluated after its last finished stage.

    Raises UserError if no stage is finished, or if the stage deploys an ensemble.
    """
    stages = sorted(folder for folder in run.glob("stage_*") if (folder / "result.json").is_file())
    if not stages:
        raise UserError(
            f"{run}: no stage has finished yet; see `alma status {shlex.quote(str(run))}`"
        )
    markers = sorted(stages[-1].rglob("trained.json"))
    paths = [str(marker.parent / read_marker(marker)["checkpoint"]) for marker in markers]
    result = read_record(stages[-1] / "result.json", {"training": list}, ["training"])
    models = len(result["training"])
    if not paths:
        raise UserError(
            f"{stages[-1]}: no training is complete there: rerun the command that trained it"
        )
    if models != 1:
        remedy = f"give a checkpoint, such as {paths[-1]}, and its stream as --tokenizer"
        raise UserError(
            f"{run} deploys an ensemble of {models} models, and export takes one: {remedy}"
        )
    return paths[0]


def _evaluated_weights(run: Run) -> str:
    """The value of --weights with which `run` evaluates its checkpoints."""
    average = str(run.config.get("average", ""))
    if average.startswith("last:"):
        return average
    return "average" if average else "trained"


@command
def main() -> None:
    """Export to Hugging Face."""
    options = parser().parse_args()
    is_run = (Path(options.model) / "run.json").is_file()
    if is_run and "dataset" in Run.read(options.model).config:  # a run on images
        os.execv(sys.executable, [sys.executable, "-P", "-m", "vision.export", *sys.argv[1:]])
    if options.onnx or options.t is not None:
        raise UserError(f"{options.model}: --t and --onnx are for runs of `alma images`")
    require_package("transformers", "alma export", "export")
    path = options.model
    tokenizer = options.tokenizer
    chosen_weights = options.weights or "trained"
    if is_run:
        if not options.weights:
            chosen_weights = _evaluated_weights(Run.read(path))
        path = deployed_by(Path(path))
    from fairseq_alma.checkpoint import memory_map  # torch: seconds to import
    from fairseq_alma.hugging_face import export

    if is_run and tokenizer is None:
        task = memory_map(path)["cfg"]["task"]
        data = Path(task["data"])
        if not data.is_dir():
            raise UserError(
                f"{data}: the stream of {options.model} is not here; give it as --tokenizer"
            )
        foreign = any(
            (data / name).is_file() for name in ("tokenizer.json", "vocab.json")
        )  # of a model
        tokenizer = (
            data if is_stream(data) and (task.get("end_token", -1) >= 0 or not foreign) else None
        )
    export(path, options.out, tokenizer, chosen_weights)
    has_code = (options.out / "modeling_alma.py").is_file()
    remote = ", trust_remote_code=True" if has_code else ""
    print(f"{options.out}: load it with AutoModelForCausalLM.from_pretrained(…{remote})")


if __name__ == "__main__":
    main()
