"""Evaluate a stage: `python -m fairseq_alma.evaluate STREAM --path CKPT[:CKPT...] --gen-subset test --out F`.

Takes fairseq-eval-lm's flags and gives its perplexity, summed in double precision, together with what the
run records need; several checkpoints are an ensemble, whose members' probabilities are averaged (paper,
section 4.1). `--untrained` takes fairseq-train's flags instead and evaluates the model as initialised.
"""

from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.files import make_directory, write_json_atomic
from fairseq_alma.defaults import WEIGHTS


@command
def main() -> None:
    """Command line: the options below are ours, all others are fairseq's."""
    parser = Parser(prog="python -m fairseq_alma.evaluate", description=main.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="where the result goes, as JSON")
    add("--untrained", action="store_true", help="evaluate the model of a fairseq-train command line")
    add("--seeds", metavar="S[,S...]", help="with --untrained: a model for each, as an ensemble")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="average: those of --store-ema")
    add("--valid", action="store_true", help="evaluate on the validation split, too")
    add("--context-window", type=int, default=0, metavar="N", help="as in fairseq-eval-lm")
    own, arguments = parser.parse_known_args()
    try:
        seeds = [int(seed) for seed in own.seeds.split(",")] if own.seeds else []
    except ValueError:
        raise UserError(f"--seeds {own.seeds}: give whole numbers, such as 1,1001") from None
    if own.untrained and own.weights == "average":
        raise UserError("--weights average is of a checkpoint: an untrained model has no average")
    from fairseq_alma.stage_record import measure_trained, measure_untrained  # and fairseq: seconds

    if own.untrained:
        record = measure_untrained(arguments, seeds, own.context_window, own.valid)
    else:
        record = measure_trained(arguments, own.weights, own.context_window, own.valid)
    make_directory(own.out.absolute().parent)
    write_json_atomic(own.out, record)
    print(f"perplexity {record['perplexity']:.2f} over {record['tokens']:,} tokens; written to {own.out}")


if __name__ == "__main__":
    main()
