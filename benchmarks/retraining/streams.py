"""The streams of the benchmark, and their matrices in files that `alma advise --matrix` reads."""

import csv
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.report.advice.law import Array
from alma.report.advice.matrix import read_groups
from benchmarks.retraining import (
    cifar_stream,
    forecast_stream,
    image_stream,
    language_stream,
    text_stream,
)
from benchmarks.retraining.history import RetrainingStream
from benchmarks.retraining.inputs import HOW_TO_CLONE, Inputs

_SEALED = 0.2  # share of the periods
_LEAST_PERIODS = 24


@dataclass(frozen=True)
class Source:
    """How the matrix of a stream is made."""

    column: str
    """The metric, as `alma advise` names it."""
    make: Callable[[Inputs], tuple[list[str], Array]]
    """Periods, and values (models, periods)."""
    files: tuple[str, ...] = ()
    """Needed below the data root."""
    packages: tuple[str, ...] = ()
    """Needed beside ALMA's own."""
    needs_curl: bool = False
    """Whether it is made from the history of curl."""
    is_made: bool = False
    """Whether its drift is made."""
    is_sealed: bool = False
    """Whether no choice may see its end."""


_GIT = ("dated/git_log.jsonl.zst",)
_RFCS = ("dated/rfc_eighth.jsonl.zst",)
_BEIGE = ("dated/beige_book.jsonl.zst",)
_MNIST = ("MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-labels-idx1-ubyte.gz")
SOURCES = {
    "git-areas": Source(
        "error (%)", text_stream.git_areas, _GIT, ("sklearn", "zstandard"), is_sealed=True
    ),
    "beige-book": Source(
        "bits-per-byte", language_stream.beige_book, _BEIGE, ("zstandard",), is_sealed=True
    ),
    "curl-areas": Source(
        "error (%)", text_stream.curl_areas, packages=("sklearn",), needs_curl=True
    ),
    "rfcs": Source("bits-per-byte", language_stream.rfcs, _RFCS, ("zstandard",)),
    "co2": Source("MAPE (%)", forecast_stream.co2, packages=("statsmodels",), is_sealed=True),
    "elnino": Source("MAPE (%)", forecast_stream.elnino, packages=("statsmodels",)),
    "shares": Source("MAPE (%)", forecast_stream.shares, packages=("river",)),
    "turnover": Source("MAPE (%)", forecast_stream.turnover, packages=("statsmodels",)),
    "water-flow": Source("MAPE (%)", forecast_stream.water_flow, packages=("river",)),
    "approval": Source("MAPE (%)", forecast_stream.approval, packages=("river",)),
    "mnist-rotation": Source(
        "error (%)", image_stream.rotation, _MNIST, ("sklearn",), is_made=True
    ),
    "mnist-classes": Source("error (%)", image_stream.classes, _MNIST, ("sklearn",), is_made=True),
    "mnist-labels": Source("error (%)", image_stream.labels, _MNIST, ("sklearn",), is_made=True),
    "cifar-light": Source(
        "error (%)", cifar_stream.light, cifar_stream.FILES, ("sklearn",), is_made=True
    ),
}
"""By name. TiC-LM's published table is not among them: it has models of 7 months, not 24."""


class RefusedMatrixError(UserError):
    """`alma advise --matrix` refuses the matrix of a stream."""


def missing(name: str, inputs: Inputs) -> str:
    """What the matrix of a stream cannot be made without; empty if nothing is missing."""
    source = SOURCES[name]
    absent = [package for package in source.packages if not importlib.util.find_spec(package)]
    if absent:
        return f"package {' and '.join(absent)}: install it"
    if source.needs_curl and inputs.curl is None:
        return f"history of curl: {HOW_TO_CLONE}"
    files = [inputs.data / file for file in source.files if not (inputs.data / file).is_file()]
    return f"file {files[0]}: give --data" if files else ""


def matrix_file(name: str, inputs: Inputs, cache: Path) -> Path:
    """The CSV file of a stream's matrix; made unless it is there."""
    path = cache / f"{name}.csv"
    if path.is_file():
        return path
    make_directory(cache)
    source = SOURCES[name]
    periods, values = source.make(inputs)
    write_matrix(path, source.column, periods, values)
    return path


def write_matrix(path: Path, column: str, periods: list[str], values: Array) -> None:
    """Write a line for each model and period."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trained_until", "tested_on", column])
    for i, until in enumerate(periods):
        for j, at in enumerate(periods):
            writer.writerow([until, at, f"{values[i, j]:.6g}"])
    with atomic_write(path, "w") as file:
        file.write(text.getvalue())


def read_stream(name: str, path: Path) -> RetrainingStream:
    """The stream of a file.

    UserError: it has gaps, or fewer than 24 periods; RefusedMatrixError: see there.
    """
    try:
        group = read_groups([path])[0]
    except UserError as error:
        raise RefusedMatrixError(f"alma advise --matrix refuses {error}") from error
    losses = group.losses
    values = np.array(losses.seeds[0])
    periods = len(losses.periods)
    if losses.until != losses.periods or not np.isfinite(values).all():
        raise UserError(f"{path}: a model of each period on each period: delete the file")
    if periods < _LEAST_PERIODS:
        raise UserError(f"{path}: {periods} periods, {_LEAST_PERIODS} are the least")
    sealed = 0
    if name in SOURCES and SOURCES[name].is_sealed:
        sealed = round(_SEALED * periods)
    return RetrainingStream(name, values, group.metric, group.period, sealed)
