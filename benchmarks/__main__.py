"""`make bench`: what can be measured on a CPU in a few minutes, printed and written as CSV."""

import csv
from pathlib import Path

from alma.errors import Parser, command
from alma.files import make_directory
from alma.provenance import machine, versions
from alma.report import as_text
from benchmarks import stage_start, switch_ffn, train_speed, vision_stage

BENCHMARKS = {
    "switch_ffn": ("Switch FFN, forward + backward, ratios", switch_ffn.measure),
    "stage_start": ("Start of a language-model stage, streams of random tokens", stage_start.measure),
    "vision_stage": ("A stage of MNIST at B = 500, w = 1", vision_stage.measure),
    "train_speed": ("Training by fairseq-train, whole processes", train_speed.measure),
}


@command
def main() -> None:
    """Entry point of `python -m benchmarks`."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--repeats", type=int, default=7, help="paired measurements of each (default: 7)")
    args = parser.parse_args()
    make_directory(args.out)
    hardware, software = machine(), versions()
    print(f"{hardware['cpu']}, {hardware['cores']} cores, 1 thread; torch {software['torch']}")
    for name, (title, measure) in BENCHMARKS.items():
        rows = measure(args.repeats)
        with open(args.out / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        print(f"\n{title}; medians of paired runs, with their quartiles")
        print(as_text([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


if __name__ == "__main__":
    main()
