"""Which rule decides best when to retrain: total costs on real streams.

    python -m benchmarks retraining --data data --cache cache --out results

Each stream's matrix, every model on every period, is made once and kept as CSV in --cache, which
`alma advise --matrix` reads. Costs are kept by stream in --out, so that a run that was stopped goes
on with the next stream. It needs `river`, `statsmodels`, `scikit-learn` and `zstandard`.
"""

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from alma.errors import Parser, UserError, count
from alma.files import atomic_write, make_directory
from benchmarks.retraining.costs import RuleCost, costs_of, read_costs, write_costs
from benchmarks.retraining.inputs import HOW_TO_CLONE, Inputs
from benchmarks.retraining.rules import RULES
from benchmarks.retraining.streams import (
    SOURCES,
    RefusedMatrixError,
    matrix_file,
    missing,
    read_stream,
)
from benchmarks.retraining.table import as_markdown, by_stream, cells_of, is_made_stream


class Places(NamedTuple):
    """Where files lie."""

    inputs: Inputs
    cache: Path
    """Matrices."""
    out: Path
    """Costs and tables."""


def main(arguments: Sequence[str]) -> None:
    """Entry point of `python -m benchmarks retraining`."""
    parser = Parser(prog="python -m benchmarks retraining", description=__doc__)
    add = parser.add_argument
    root = "data root, with dated/, MNIST/ and cifar-10-batches-bin/ (default: data)"
    add("--data", type=Path, default=Path("data"), metavar="DIR", help=root)
    curl = f"git directory of curl's history, for curl-areas ({HOW_TO_CLONE})"
    add("--curl", type=Path, metavar="DIR", help=curl)
    cache = "matrices (default: benchmarks/results/retraining/matrices)"
    results = Path("benchmarks/results/retraining")
    add("--cache", type=Path, default=results / "matrices", metavar="DIR", help=cache)
    add("--out", type=Path, default=results, metavar="DIR", help="costs and tables")
    names = f"streams, of {', '.join(SOURCES)} (default: all)"
    add("--streams", type=lambda text: text.split(","), default=list(SOURCES), help=names)
    add("--starts", type=count, default=5, metavar="N", help="most start points (default: 5)")
    add("--workers", type=count, default=2, metavar="N", help="processes (default: 2)")
    sealed = "score the sealed ends of streams alone, which no choice has seen"
    add("--sealed", action="store_true", help=sealed)
    options = parser.parse_args(arguments)
    if not importlib.util.find_spec("river"):
        raise UserError("the rules ADWIN, Page-Hinkley and KSWIN need river: pip install river")
    unknown = [name for name in options.streams if name not in SOURCES]
    if unknown:
        raise UserError(f"no stream {unknown[0]}: --streams takes {', '.join(SOURCES)}")
    inputs = Inputs(options.data, options.curl)
    inputs.check()
    chosen = []
    for name in options.streams:
        gap = ""
        if not (options.cache / f"{name}.csv").is_file():
            gap = missing(name, inputs)
        if gap:
            print(f"left out: {name} (no {gap})")
        elif not options.sealed or SOURCES[name].is_sealed:
            chosen.append(name)
    if not chosen:
        raise UserError("no stream has its data: give --data, the root of dated/ and MNIST/")
    make_directory(options.out)
    with ProcessPoolExecutor(options.workers) as pool:
        tasks = []
        for name in chosen:
            places = Places(inputs, options.cache, options.out)
            tasks.append(pool.submit(_costs, name, places, options.starts, options.sealed))
        rows = []
        for name, task in zip(chosen, tasks, strict=True):
            try:
                rows += task.result()
            except RefusedMatrixError as error:
                print(f"left out: {name} ({error})")
    if not rows:
        raise UserError("no stream is left: see above")
    kind = "sealed" if options.sealed else "table"
    text = as_markdown(rows)
    with atomic_write(options.out / f"{kind}.md", "w") as file:
        file.write(text)
    write_costs(options.out / f"{kind}.csv", rows)
    _write_means(options.out / f"{kind}_by_stream.csv", rows)
    print(text)


def _write_means(path: Path, rows: Sequence[RuleCost]) -> None:
    """Write the mean cost of each rule on each stream, for docs/figures/retraining.py."""
    cells = cells_of(rows)
    lines = ["stream,drift,rule,over_best"]
    for rule in RULES:
        for stream, mean in by_stream(cells, rule).items():
            drift = "made" if is_made_stream(stream) else "real"
            lines.append(f'{stream},{drift},"{rule}",{mean:.4f}')
    with atomic_write(path, "w") as file:
        file.write("\n".join(lines) + "\n")


def _costs(name: str, places: Places, starts: int, sealed: bool) -> list[RuleCost]:
    """The costs on a stream, read if they are there."""
    kind = "sealed" if sealed else "costs"
    path = places.out / f"{kind}-{name}-{starts}.csv"
    if not path.is_file():
        stream = read_stream(name, matrix_file(name, places.inputs, places.cache))
        write_costs(path, costs_of(stream, starts, sealed))
    return read_costs(path)
