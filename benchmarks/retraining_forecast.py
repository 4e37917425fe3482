"""Forecast the periods to come before they come, and score the forecast afterwards.

    python -m benchmarks retraining_forecast write may.json --matrix accuracy.csv --price 3
    python -m benchmarks retraining_forecast score may.json --matrix accuracy.csv

The matrix is a CSV file as `alma advise --matrix` reads it. The forecast has the plan of least cost
at the price, and the loss of the deployed model in each period to come, with intervals, under this
plan, retraining every period, and never. It holds the SHA-256 of the losses it saw and of itself:
publish the one it prints, or commit the file, before the periods come. `score` reads the matrix
with the new periods; it refuses if the history or the forecast changed.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, count
from benchmarks.retraining import sealed_forecast as sealed
from benchmarks.retraining import sealed_score


def main(arguments: Sequence[str]) -> None:
    """Entry point of `python -m benchmarks retraining_forecast`."""
    parser = Parser(prog="python -m benchmarks retraining_forecast", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="write|score")
    write = commands.add_parser("write", prog=f"{parser.prog} write", help="write a new forecast")
    score = commands.add_parser("score", prog=f"{parser.prog} score", help="score a forecast")
    for command in (write, score):
        command.add_argument("forecast", type=Path, metavar="FILE", help="the forecast, JSON")
        matrix = "losses, as for `alma advise --matrix`"
        command.add_argument("--matrix", type=Path, required=True, metavar="CSV", help=matrix)
    add = write.add_argument
    price = "of a training, in the unit of the losses times periods"
    add("--price", type=float, required=True, metavar="P", help=price)
    add("--periods", type=count, default=12, metavar="N", help="to come (default: 12)")
    add("--until", default="", metavar="TIME", help="newest period to see (default: all)")
    models = "use only so many newest models and the periods since the first of them (default: all)"
    add("--models", type=count, default=0, metavar="N", help=models)
    out = "write the score as JSON into this new file"
    score.add_argument("--out", type=Path, metavar="FILE", help=out)
    options = parser.parse_args(arguments)
    if options.command == "score":
        _score(options.forecast, options.matrix, options.out)
        return
    if not 0 < options.price < math.inf:
        raise UserError(f"--price {options.price:g}: give a number above 0")
    sealed.refuse_to_overwrite(options.forecast)
    forecast = sealed.make_forecast(
        sealed.read_matrix([options.matrix]),
        options.price,
        options.periods,
        options.until,
        options.models,
    )
    sealed.write_new(options.forecast, forecast)
    trainings = forecast["rules"][0]["trainings"]
    periods = forecast["periods"]
    print(f"{options.forecast}: {periods[0]} to {periods[-1]}, {trainings} trainings by the plan")
    print(f"SHA-256 of the forecast: {forecast['sha256']}")


def _score(path: Path, matrix: Path, out: Path | None) -> None:
    """Print the score of a forecast, and write it if `out` is given."""
    if out is not None:
        sealed.refuse_to_overwrite(out)
    forecast = sealed_score.read_forecast(path)
    score = sealed_score.score_forecast(forecast, sealed.read_matrix([matrix]))
    if out is not None:
        sealed.write_new(out, score)
    print(sealed_score.as_markdown(forecast, score))
