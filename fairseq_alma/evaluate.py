"""Evaluate the models of a stage: `python -m fairseq_alma.evaluate`.

Accepts fairseq-eval-lm's flags and writes its perplexity, summed in double precision, and the other
fields of a run's records. The probabilities of several checkpoints are averaged (ensemble; paper,
section 4.1). `--untrained` accepts fairseq-train's flags instead and evaluates the model as
initialised.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from alma.averages import WEIGHTS_HELP, weights
from alma.errors import Parser, UserError, command, number_list
from alma.files import make_directory, write_json_atomic
from alma.options import add_options, options_of
from alma.protocol import TextOptions

if TYPE_CHECKING:
    from fairseq_alma import stage_record

_EXAMPLES = """\
examples:
  python -m fairseq_alma.evaluate stream --path best.pt --gen-subset test --out t4.json
  python -m fairseq_alma.evaluate stream --untrained --arch switch_gmoe_tiny --seed 1 --out t0.json
"""


def parser() -> Parser:
    """The command line, except for fairseq's flags."""
    parser = Parser(
        prog="python -m fairseq_alma.evaluate",
        usage="%(prog)s STREAM --path CHECKPOINT[:CHECKPOINT...] --gen-subset test --out FILE "
        "[options]\n"
        "       %(prog)s STREAM --untrained --out FILE [options] [flags of fairseq-train]",
        description="Evaluate language models on a stream and write the fields of a run's record. "
        "Accepts all flags of fairseq-eval-lm too; the probabilities of several checkpoints are "
        "averaged.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    untrained = "evaluate the model that fairseq-train would start from; give its flags"
    add("--untrained", action="store_true", help=untrained)
    seeds = "with --untrained: an ensemble with a model for each seed of a list or range, "
    seeds += "such as 1,5 or 0-2"
    add("--seeds", type=number_list, default=[], metavar="LIST", help=seeds)
    add("--weights", type=weights, default="trained", metavar="WEIGHTS", help=WEIGHTS_HELP)
    held_out = "evaluate on the held-out parts of these mega-batches alone, a list or range such "
    held_out += "as 7 or 5-7, from 1 on"
    add("--held-out", type=number_list, metavar="LIST", help=held_out)
    item_losses = "write the losses of single documents of held-out parts to RUN/held_out"
    add("--item-losses", type=Path, metavar="RUN", help=item_losses)
    add("--valid", action="store_true", help="evaluate on the validation set of the stream too")
    context = [options_of(TextOptions)["context_window"]]
    add_options(parser, context, TextOptions, changes={"context_window": {"default": 0}})
    return parser


@command
def main() -> None:
    """Evaluate a stage."""
    options, arguments = parser().parse_known_args()
    if options.untrained and options.weights != "trained":
        problem = "needs a checkpoint: an untrained model has no average"
        raise UserError(f"--weights {options.weights} {problem}")
    from fairseq_alma import stage_record  # fairseq: seconds to import
    from fairseq_alma.training import tensorboard

    window = options.context_window
    if options.untrained:
        loaded = stage_record.build_untrained(arguments, options.seeds, window)
    else:
        loaded = stage_record.load_trained(arguments, options.weights, window)
    if options.held_out is not None:
        _test_on_held_out(options, arguments, loaded)
        return
    record = stage_record.measure(loaded, options.valid, options.item_losses)
    if options.weights != "trained":
        trained = stage_record.load_trained(arguments, "trained", window)
        raw = stage_record.measure(trained, options.valid)
        names = ("nll", "perplexity", "valid", "matrix")
        record["raw"] = {name: raw[name] for name in names if raw.get(name) is not None}
    make_directory(options.out.absolute().parent)
    logdir = loaded.cfg.common.tensorboard_logdir
    if logdir:
        path = loaded.paths[-1] if loaded.paths else None
        tensorboard.add_evaluation(logdir, loaded.cfg.dataset.gen_subset, record, path)
    write_json_atomic(options.out, record)
    result = f"perplexity {record['perplexity']:.2f} over {record['tokens']:,} tokens"
    print(f"{result}; written to {options.out}")


def _test_on_held_out(
    options: argparse.Namespace, arguments: list[str], loaded: "stage_record.Loaded"
) -> None:
    """Evaluate on --held-out alone, and write the cells of the evaluation matrix to --out."""
    from fairseq_alma import stage_record

    began = time.monotonic()
    cells = stage_record.on_held_out(loaded, options.held_out, options.item_losses)
    if options.weights != "trained":
        trained = stage_record.load_trained(arguments, "trained", options.context_window)
        raw_cells = stage_record.on_held_out(trained, options.held_out)
        for cell, raw in zip(cells, raw_cells, strict=True):
            cell["raw"] = raw["value"]
    make_directory(options.out.absolute().parent)
    record = {"held_out": cells, "seconds": time.monotonic() - began}
    write_json_atomic(options.out, record)
    values = ", ".join(f"{cell['value']:.2f}" for cell in cells)
    print(f"perplexity {values}; written to {options.out}")


if __name__ == "__main__":
    main()
