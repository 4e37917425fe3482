"""Forecasts that are refit or not: MAPE of ridge regressions on measured series.

A model is fitted to the newest steps of a window, and forecasts one step ahead from the newest
values; no held-out part is needed, since the model of a period is only compared on it with older
ones. Series of statsmodels: co2 of Mauna Loa by week, the sea's temperature off Peru and turnover
of electrical equipment by month. Series of river: the flow in a water pipe by hour, with outages of
the pipe, and the mean absolute change of ten shares by day, whose own values are too near 0 for
percent. River's ratings of a president are no forecast: a model tells the average of the day's
polls from five pollsters.
"""

import csv
import gzip
import importlib.util
from pathlib import Path

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.inputs import Inputs

_RIDGE = 1e-6
"""Of the mean square of an input."""


def co2(inputs: Inputs) -> tuple[list[str], Array]:
    """Quarters of 13 weeks as numbers, and MAPE; 4 years to fit, 8 lags."""
    path = _packaged("statsmodels", "datasets/co2/co2.csv")
    rows = path.read_text().splitlines()[1:]
    values = [float(row.split(",")[1] or "nan") for row in rows]
    return _numbered(matrix_of_mape(_filled(values), 13, 208, 8))


def elnino(inputs: Inputs) -> tuple[list[str], Array]:
    """Years of 12 months as numbers, and MAPE; 8 years to fit, 6 lags."""
    path = _packaged("statsmodels", "datasets/elnino/elnino.csv")
    values: list[float] = []
    for row in csv.reader(path.read_text().splitlines()[1:]):
        values.extend(float(cell) for cell in row[1:13])
    return _numbered(matrix_of_mape(_filled(values), 12, 96, 6))


def shares(inputs: Inputs) -> tuple[list[str], Array]:
    """Months of 21 days as numbers, and MAPE of the mean absolute change; a year to fit, 5 lags."""
    path = _packaged("river", "datasets/sp500.csv.gz")
    values = []
    for row in csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines()[1:]):
        values.append(float(np.mean(np.abs([float(cell) for cell in row[1:11]]))))
    return _numbered(matrix_of_mape(_filled(values), 21, 252, 5))


def turnover(inputs: Inputs) -> tuple[list[str], Array]:
    """Quarters of 3 months as numbers, and MAPE; 5 years to fit, 12 lags."""
    path = _packaged("statsmodels", "datasets/elec_equip/elec_equip.csv")
    values = [float(row.split(",")[1]) for row in path.read_text().splitlines()[1:]]
    return _numbered(matrix_of_mape(_filled(values), 3, 60, 12))


def water_flow(inputs: Inputs) -> tuple[list[str], Array]:
    """Days of 24 hours as numbers, and MAPE; 2 weeks to fit, 24 lags."""
    path = _packaged("river", "datasets/water-flow.csv")
    values = [float(row.split(",")[1]) for row in path.read_text().splitlines()[1:]]
    return _numbered(matrix_of_mape(_filled(values), 24, 336, 24))


def approval(inputs: Inputs) -> tuple[list[str], Array]:
    """Weeks as numbers, and MAPE; 13 weeks to fit."""
    path = _packaged("river", "datasets/trump_approval.csv.gz")
    rows = list(csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines()[1:]))
    values = np.array(rows, dtype=float)
    return _numbered(matrix_of_regressions(values[:, 2:], values[:, 1], 7, 91))


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
    """`matrix_of_regressions` of a series on its newest values.

    series  values (steps,)
    lags    values that predict the next one
    """
    newest = np.lib.stride_tricks.sliding_window_view(series, lags)[:-1]
    unknown = np.full((lags, lags), np.nan)
    return matrix_of_regressions(np.vstack([unknown, newest]), series, size, window)


def matrix_of_regressions(inputs: Array, targets: Array, size: int, window: int) -> Array:
    """MAPE of the model of each period on each period, (models, periods).

    inputs   of each step, (steps, inputs); the first ones may be NaN, all in the unit of `targets`
    targets  (steps,)
    size     steps a period; the first period ends with the first whole window
    window   steps to fit
    """
    unknown = int(np.isnan(inputs).any(1).sum())
    first = -(-max(window, unknown) // size)
    count = len(targets) // size
    errors = np.empty((count - first, count - first))
    for until in range(first, count):
        end = (until + 1) * size
        used = slice(max(unknown, end - window), end)
        level = float(targets[used].mean())
        design = np.column_stack([inputs[used] - level, np.full(len(targets[used]), level)])
        gram = design.T @ design
        ridge = _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        weights = np.linalg.solve(gram + ridge, design.T @ (targets[used] - level))
        every_input = np.column_stack([inputs - level, np.full(len(inputs), level)])
        wrong = np.abs(every_input @ weights + level - targets) / np.abs(targets)
        for at in range(first, count):
            errors[until - first, at - first] = 100 * wrong[at * size :][:size].mean()
    return errors
