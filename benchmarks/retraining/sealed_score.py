"""Score a sealed forecast (`benchmarks.retraining.sealed_forecast`) when its periods have come."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import read_file
from alma.report.losses import Losses
from benchmarks.retraining.sealed_forecast import (
    FORMAT,
    PLAN,
    Matrix,
    hash_of_forecast,
    hash_of_losses,
    losses_between,
)
from benchmarks.retraining.time_axis import TimeAxis


def read_forecast(path: Path) -> dict[str, Any]:
    """A forecast. UserError: it cannot be read, was edited, or is of another version."""
    try:
        forecast = json.loads(read_file(path))
    except ValueError:
        forecast = None
    if not isinstance(forecast, dict) or "sha256" not in forecast:
        raise UserError(f"{path}: not a forecast of `retraining_forecast write`")
    if forecast["sha256"] != hash_of_forecast(forecast):
        raise UserError(f"{path}: edited since it was written: get the file that was committed")
    if forecast["format"] != FORMAT:
        raise UserError(
            f"{path}: format {forecast['format']}: score it with ALMA {forecast['alma']}"
        )
    return forecast


def score_forecast(forecast: dict[str, Any], matrix: Matrix) -> dict[str, Any]:
    """How well a forecast held, ready to be written as JSON.

    UserError: the history is not the one that the forecast saw, or no period has come.
    """
    axis = matrix.axis
    losses = matrix.group.losses
    first = axis.number(forecast["first_of_history"])
    last = axis.number(forecast["last_of_history"])
    history = losses_between(losses, first, last)
    if hash_of_losses(history) != forecast["sha256_of_history"]:
        raise UserError(
            f"the losses from {forecast['first_of_history']} to {forecast['last_of_history']} are "
            "not those that the forecast saw: give the matrix that it was written from, with the "
            "periods since"
        )
    scores = []
    for rule in forecast["rules"]:
        actual = _actual_losses(rule, forecast["periods"], losses, axis)
        scores.append(_score_of(rule, actual, forecast))
    if not any(score["periods"] for score in scores):
        periods = forecast["periods"]
        raise UserError(
            f"no loss of the periods to come, {periods[0]} to {periods[-1]}, of a model that the "
            "forecast names: test the deployed model on them first"
        )
    return {
        "forecast": forecast["sha256"],
        "scored": datetime.now(UTC).isoformat(timespec="seconds"),
        "rules": scores,
        "savings": _scored_savings(scores, forecast["savings"]),
    }


def _actual_losses(
    rule: dict[str, Any], periods: Sequence[str], losses: Losses, axis: TimeAxis
) -> list[float]:
    """The loss of the deployed model of each period; NaN where it was not tested."""
    values = np.mean(losses.seeds, axis=0)
    actual = []
    for until, period in zip(rule["trained_until"], periods, strict=True):
        model = axis.number(until)
        tested = axis.number(period)
        if model in losses.until and tested in losses.periods:
            row = losses.until.index(model)
            actual.append(float(values[row, losses.periods.index(tested)]))
        else:
            actual.append(math.nan)
    return actual


def _score_of(
    rule: dict[str, Any], actual: list[float], forecast: dict[str, Any]
) -> dict[str, Any]:
    """The score of one rule; costs are null until all periods are there."""
    held = 0
    errors = []
    naive_errors = []
    for (mean, low, high), loss in zip(rule["losses"], actual, strict=True):
        if math.isfinite(loss):
            held += low <= loss <= high
            errors.append(abs(loss - mean))
            naive_errors.append(abs(loss - forecast["last_loss"]))
    of_trainings = forecast["price"] * rule["trainings"]
    is_whole = len(errors) == len(actual)
    return {
        "rule": rule["rule"],
        "trainings": rule["trainings"],
        "periods": len(errors),
        "held": held,
        "off_by": float(np.mean(errors)) if errors else None,
        "as_last_time_off_by": float(np.mean(naive_errors)) if errors else None,
        "forecast_cost": sum(mean for mean, _, _ in rule["losses"]) + of_trainings,
        "cost": sum(actual) + of_trainings if is_whole else None,
        "losses": [loss if math.isfinite(loss) else None for loss in actual],
    }


def _scored_savings(
    scores: Sequence[dict[str, Any]], forecast: dict[str, list[float] | None]
) -> dict[str, dict[str, Any]]:
    """What the plan saved against each other rule, beside the forecast."""
    cost_by_rule = {score["rule"]: score["cost"] for score in scores}
    savings = {}
    for rule, interval in forecast.items():
        saving = None
        if cost_by_rule[rule] is not None and cost_by_rule[PLAN] is not None:
            saving = cost_by_rule[rule] - cost_by_rule[PLAN]
        savings[rule] = {"forecast": interval, "saving": saving}
    return savings


def as_markdown(forecast: dict[str, Any], score: dict[str, Any]) -> str:
    """The score as a table."""
    lines = [
        f"{forecast['model']}, {forecast['periods'][0]} to {forecast['periods'][-1]}, price "
        f"{forecast['price']:g}, written {forecast['written']}. Unit: {forecast['unit']}.",
        "",
        "| rule | trainings | in 90% intervals | off by | as last time | cost forecast | cost "
        "| plan saves, forecast | plan saves |",
        "|" + "---|" * 9,
    ]
    for row in score["rules"]:
        saved = score["savings"].get(row["rule"], {"forecast": None, "saving": None})
        expected = ""
        if saved["forecast"]:
            mean, low, high = saved["forecast"]
            expected = f"{mean:.3g} [{low:.3g}, {high:.3g}]"
        cells = [
            row["rule"],
            str(row["trainings"]),
            f"{row['held']} of {row['periods']}",
            _number(row["off_by"]),
            _number(row["as_last_time_off_by"]),
            _number(row["forecast_cost"]),
            _number(row["cost"]),
            expected,
            _number(saved["saving"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
