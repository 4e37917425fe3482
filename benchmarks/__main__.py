"""`make bench`: benchmarks that take a few minutes on a CPU; prints tables and writes them as CSV.

`python -m benchmarks advice` makes the tables of docs/advice.md, in hours: those of
`advice_calibration` (how often `alma advise` sees a difference between equal learners), of
`cadence_calibration` (how often it says to retrain more often), and, of recorded runs, `backtest`
and `waiting_rule`. `retraining` compares rules of when to retrain on real streams,
`retraining_forecast` seals a forecast and scores it. `near_duplicates --text CORPUS` compares
`alma data` with other tools. All of these only run by name.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from alma.errors import Parser, command
from alma.files import make_directory
from alma.provenance import machine, versions
from benchmarks.timing import Table, show

# Imported when they run: the workers of data_prep import this module too, and their memory is
# measured.
BENCHMARKS = {
    "switch_ffn": "Switch FFN, forward + backward, ratios",
    "update": "An update through fairseq-train beside a plain loop",
    "transformers_engine": "Training by alma's engine beside transformers.Trainer run by hand",
    "loss": "Loss of the output layer, forward + backward, ratios of times",
    "vision_stage": "A stage of MNIST at B = 500",
    "training_memory": "Peak memory of a training step, counted on the meta device",
    "data_prep": "Text to mega-batches",
}
ALONE = (
    *(
        "advice",
        "advice_calibration",
        "backtest",
        "cadence_calibration",
        "decisions",
        "gpu",
        "ledger",
    ),
    *("near_duplicates", "retraining", "retraining_forecast", "waiting_rule"),
)
"""Run only by name, with flags of their own."""


def tables(name: str, repeats: int, text: list[str], gigabytes: float) -> Iterator[Table]:
    """Run a benchmark; yield each table when it is done."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    measure = benchmark.measure
    if name == "data_prep":
        yield from measure(repeats, text, gigabytes)
    elif name == "training_memory":
        yield Table(name, BENCHMARKS[name], measure())
        title = "Memory of one GPU in fp16 by the flags that save it, GB; V100 has 32"
        yield Table("training_memory_savings", title, benchmark.measure_savings())
    else:
        yield Table(name, BENCHMARKS[name], measure(repeats))


@command
def main() -> None:
    """Entry point of `python -m benchmarks`."""
    if set(sys.argv[1:2]) & set(ALONE):
        importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
        return
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"benchmarks to run: {' '.join(BENCHMARKS)} (default: all)",
    )
    add("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    add("--repeats", type=int, default=7, help="paired measurements per benchmark (default: 7)")
    text = "text for data_prep, as for `python -m data_prep` (default: installed documentation)"
    add("--text", nargs="+", default=[], metavar="CORPUS", help=text)
    made_up = "measure data_prep on G GB of made-up text instead"
    add("--gigabytes", type=float, default=0, metavar="G", help=made_up)
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {' '.join(sorted(unknown))}; there are {' '.join(BENCHMARKS)}")
    if args.repeats < 2:
        parser.error("--repeats is 2 or more, for quartiles")
    make_directory(args.out)
    hardware = machine()
    software = versions()
    torch_version = software.get("torch", "not installed")
    print(f"{hardware['cpu']}, {hardware['cores']} cores, 1 thread; torch {torch_version}")
    for name in args.names or BENCHMARKS:
        paired = "" if name == "training_memory" else "; medians and quartiles of paired runs"
        for table in tables(name, args.repeats, args.text, args.gigabytes):
            show(args.out, table._replace(title=table.title + paired))


if __name__ == "__main__":
    main()
