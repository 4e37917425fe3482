"""Evaluate a stage: `python -m fairseq_alma.evaluate STREAM --path CKPT[:CKPT...] --gen-subset test --out F`.

Accepts fairseq-eval-lm's flags and writes its perplexity, summed in double precision, and the other fields
of a run's records. The probabilities of several checkpoints are averaged (ensemble; paper, section 4.1).
`--untrained` accepts fairseq-train's flags instead and evaluates the model as initialised.
"""

from pathlib import Path

from alma.errors import Parser, UserError, command, number_list
from alma.files import make_directory, write_json_atomic
from fairseq_alma.defaults import WEIGHTS


@command
def main() -> None:
    """Evaluate a stage. All options not listed here are fairseq's."""
    parser = Parser(prog="python -m fairseq_alma.evaluate", description=main.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    add("--untrained", action="store_true", help="evaluate the model of a fairseq-train command line")
    add("--seeds", type=number_list, default=[], metavar="LIST", help="with --untrained: a model per seed")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="average: the --store-ema weights")
    add("--valid", action="store_true", help="evaluate on the validation split as well")
    add("--context-window", type=int, default=0, metavar="N", help="as in fairseq-eval-lm")
    own, arguments = parser.parse_known_args()
    if own.untrained and own.weights == "average":
        raise UserError("--weights average needs a checkpoint: an untrained model has no average")
    from fairseq_alma import stage_record  # fairseq: seconds to import
    from fairseq_alma.training import tensorboard

    if own.untrained:
        loaded = stage_record.build_untrained(arguments, own.seeds)
    else:
        loaded = stage_record.load_trained(arguments, own.weights, own.context_window)
    record = stage_record.measure(loaded, own.context_window, own.valid)
    make_directory(own.out.absolute().parent)
    if logdir := loaded.cfg.common.tensorboard_logdir:
        path = loaded.paths[-1] if loaded.paths else None
        tensorboard.add_evaluation(logdir, loaded.cfg.dataset.gen_subset, record, path)
    write_json_atomic(own.out, record)
    print(f"perplexity {record['perplexity']:.2f} over {record['tokens']:,} tokens; written to {own.out}")


if __name__ == "__main__":
    main()
