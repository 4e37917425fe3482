"""Forecasts that are refit or not: MAPE of autoregressions on three measured series.

A model is a ridge regression on the newest values of a window, one step ahead; no held-out part is
needed, since the model of a period is only compared on it with older ones. Series: co2 of Mauna Loa
by week and the sea's temperature off Peru by month (statsmodels), and the mean absolute change of
ten shares by day (river), whose own values are too near 0 for percent. river's water flow is left
out: a day with an outage has an error of 51% beside .3%, which `alma advise --matrix` takes for a
typo.
"""

import csv
import gzip
import importlib.util
from pathlib import Path

import numpy as np

from alma.report.advice.law import Array

_RIDGE = 1e-6
"""Of the mean square of an input."""


def co2(data: Path) -> tuple[list[str], Array]:
    """Quarters of 13 weeks as numbers, and MAPE; 4 years to fit, 8 lags."""
    path = _packaged("statsmodels", "datasets/co2/co2.csv")
    rows = path.read_text().splitlines()[1:]
    values = [float(row.split(",")[1] or "nan") for row in rows]
    return _numbered(matrix_of_mape(_filled(values), 13, 208, 8))


def elnino(data: Path) -> tuple[list[str], Array]:
    """Years of 12 months as numbers, and MAPE; 8 years to fit, 6 lags."""
    path = _packaged("statsmodels", "datasets/elnino/elnino.csv")
    values: list[float] = []
    for row in csv.reader(path.read_text().splitlines()[1:]):
        values.extend(float(cell) for cell in row[1:13])
    return _numbered(matrix_of_mape(_filled(values), 12, 96, 6))


def shares(data: Path) -> tuple[list[str], Array]:
    """Months of 21 days as numbers, and MAPE of the mean absolute change; a year to fit, 5 lags."""
    path = _packaged("river", "datasets/sp500.csv.gz")
    values = []
    for row in csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines()[1:]):
        values.append(float(np.mean(np.abs([float(cell) for cell in row[1:11]]))))
    return _numbered(matrix_of_mape(_filled(values), 21, 252, 5))


def _packaged(package: str, name: str) -> Path:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package, name=package)
    return Path(spec.origin).parent / name


def _filled(values: list[float]) -> Array:
    """The values, with missing ones between their neighbours."""
    series = np.array(values)
    at = np.arange(len(series))
    measured = np.isfinite(series)
    return np.interp(at, at[measured], series[measured])


def _numbered(errors: Array) -> tuple[list[str], Array]:
    return [str(number) for number in range(1, len(errors) + 1)], errors


def matrix_of_mape(series: Array, size: int, window: int, lags: int) -> Array:
    """MAPE of one step ahead of the model of each period on each period, (models, periods).

    series  values (steps,)
    size    steps a period; the first period ends with the first whole window
    window  steps to fit
    lags    values that predict the next one
    """
    inputs = np.lib.stride_tricks.sliding_window_view(series, lags)[:-1]
    targets = series[lags:]
    first = -(-max(window, lags) // size)
    count = len(series) // size
    errors = np.empty((count - first, count - first))
    for until in range(first, count):
        end = (until + 1) * size - lags
        used = slice(max(0, end - window), end)
        level = float(targets[used].mean())
        design = np.column_stack([inputs[used] - level, np.full(len(targets[used]), level)])
        gram = design.T @ design
        ridge = _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        weights = np.linalg.solve(gram + ridge, design.T @ (targets[used] - level))
        every_input = np.column_stack([inputs - level, np.full(len(inputs), level)])
        wrong = np.abs(every_input @ weights + level - targets) / np.abs(targets)
        for at in range(first, count):
            errors[until - first, at - first] = 100 * wrong[at * size - lags :][:size].mean()
    return errors
