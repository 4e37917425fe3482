"""Write a model for other programs: `alma export`.

The wing that knows a model writes it. This module reads which wing that is, and imports it only
then.
"""

import importlib
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from alma.averages import WEIGHTS_HELP, weights
from alma.errors import Parser, UserError, command, require_extra
from alma.records import Run

_EXAMPLES = """\
examples:
  alma export runs/gmoe --out gmoe_hf
  alma export runs/gmoe --t 3 --out gmoe_3_hf
  alma export runs/digits --out digits_onnx --onnx
  alma export stage_03/checkpoint_best.pt --out stage_hf --tokenizer stream
  alma export stage_03/checkpoint_last.pt --out average_hf --weights average
"""


class Exporter(NamedTuple):
    """Writes one kind of model."""

    module: str  # has `export(model, out, **options)`, which prints what it wrote
    options: tuple[str, ...]  # of the command line, that it takes beside --out
    extra: str | None = None  # the optional dependencies of ALMA without which it is not imported


IMAGES = Exporter("vision.export", ("t", "onnx"), "images")
TRAINER = Exporter("fairseq_alma.trainer_export", ("t", "tokenizer"))
TRANSFORMERS = Exporter("transformers_alma.export", ("t",), "transformers")
FAIRSEQ = Exporter("fairseq_alma.export", ("t", "tokenizer", "weights"), "text")


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="alma export",
        usage="%(prog)s {RUN | CHECKPOINT} --out DIR [options]",
        description="Export a language model to a directory that Hugging Face's "
        "AutoModelForCausalLM and, with --tokenizer, AutoTokenizer load. A run of `alma images` "
        "becomes safetensors and, with --onnx, ONNX.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    text = (
        "a run of `alma train`: the model of its last stage or of --t, with its tokenizer; or a "
        "checkpoint of arch switch_gmoe* or transformer_lm"
    )
    add("model", metavar="RUN|CHECKPOINT", help=text)
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    text = "stream that the model was trained on; its tokenizer is exported too"
    add("--tokenizer", type=Path, metavar="STREAM", help=text)
    text = "of a run: the model after mega-batch N, if its files are there (default: the newest)"
    add("--t", type=int, metavar="N", help=text)
    add("--onnx", action="store_true", help="of images: write model.onnx too")
    text = f"{WEIGHTS_HELP}; of RUN: those it evaluates"
    add("--weights", type=weights, metavar="WEIGHTS", help=text)
    return command_line


def exporter_of(model: str) -> Exporter:
    """The exporter of a run or a checkpoint. UserError: run.json is damaged."""
    if not Path(model, "run.json").is_file():
        return FAIRSEQ
    config = Run.read(model).config
    if "dataset" in config:
        return IMAGES
    if config.get("engine"):
        return TRANSFORMERS
    return TRAINER if config.get("trainer") else FAIRSEQ


def _check(options: Namespace, exporter: Exporter) -> None:
    """UserError: an option is of another kind of model, or there is no model."""
    if not Path(options.model).exists():
        raise UserError(f"{options.model}: no such run or checkpoint; `alma status` lists runs")
    if options.onnx and exporter is not IMAGES:
        raise UserError(f"{options.model}: --onnx is for runs of `alma images`: leave it out")
    if options.t is not None and not Path(options.model, "run.json").is_file():
        raise UserError(f"{options.model}: --t is for runs: give the checkpoint of that stage")
    if options.tokenizer and exporter is IMAGES:
        raise UserError(f"{options.model}: --tokenizer is for language models: leave it out")
    if options.tokenizer and exporter is TRANSFORMERS:
        raise UserError(f"{options.model}: its model has a tokenizer: leave out --tokenizer")
    if options.weights and exporter is not FAIRSEQ:
        raise UserError(f"{options.model}: --weights is for models of fairseq: leave it out")


@command
def main() -> None:
    """Export a model by the wing that knows it."""
    options = parser().parse_args()
    exporter = exporter_of(options.model)
    _check(options, exporter)
    if exporter.extra:
        require_extra(exporter.extra, "alma export")
    accepted = {name: getattr(options, name) for name in exporter.options}
    importlib.import_module(exporter.module).export(options.model, options.out, **accepted)


if __name__ == "__main__":
    main()
