"""Forecasts of retraining that are sealed before the periods come, and scored afterwards.

A forecast has the plan of least expected cost at a price, and for it, for retraining every period
and for never the loss of the deployed model in each period to come. It has the SHA-256 of the
losses that it saw, and of itself: scoring (`sealed_score`) refuses if either changed. Whoever can
edit the file can also write a new hash, so publish the hash, or commit the file, before the periods
come.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from alma import __version__
from alma.errors import UserError
from alma.files import atomic_write
from alma.report.advice.law import Law
from alma.report.advice.matrix import LossGroup, read_groups
from alma.report.advice.plan import NEVER
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses, MeanOverSeeds
from benchmarks.retraining.time_axis import TimeAxis, axis_of

FORMAT = 1
"""Of the file."""
PLAN = "plan"
EVERY = "every period"
_LEAST_SERVED = 6
"""Losses of deployed models from which their level is forecast."""


@dataclass(frozen=True)
class Matrix:
    """The losses of one model, with labels of time."""

    group: LossGroup
    axis: TimeAxis


class Schedule(NamedTuple):
    """When a rule trains in the periods to come."""

    rule: str
    first: int
    """Periods until the first training; the number of periods: none."""
    every: int

    def models(self, count: int) -> list[int | None]:
        """Of each period to come the period until which its model is trained; None: the present.

        Periods count from 1, the first one to come; 0 is now.
        """
        models = []
        newest = None
        for ended in range(count):
            if ended >= self.first and (ended - self.first) % self.every == 0:
                newest = ended
            models.append(newest)
        return models


def read_matrix(paths: Sequence[Path]) -> Matrix:
    """The matrix in files. UserError: they cannot be read, or have several groups."""
    groups = read_groups(paths)
    if len(groups) > 1:
        names = ", ".join(group.losses.label for group in groups)
        raise UserError(f"several models: {names}: leave one in the file")
    return Matrix(groups[0], axis_of(paths))


def history_of(matrix: Matrix, until: str, models: int) -> Losses:
    """The losses up to a period.

    until   newest period; empty: the newest one in the matrix
    models  use only so many newest models, and the periods since the first of them; 0: all

    UserError: there is no such period.
    """
    losses = matrix.group.losses
    last = losses.periods[-1]
    if until:
        last = matrix.axis.number(until)
        if last not in losses.periods:
            raise UserError(f"--until {until}: no model was tested on this period")
    untils = [time for time in losses.until if time <= last]
    first = -math.inf
    if 0 < models <= len(untils):
        first = untils[-models]
    return losses_between(losses, first, last)


def losses_between(losses: Losses, first: float, last: float) -> Losses:
    """The losses of models and periods between two times, both included."""
    rows = [i for i, until in enumerate(losses.until) if first <= until <= last]
    columns = [j for j, period in enumerate(losses.periods) if first <= period <= last]
    values = np.array(losses.seeds)[:, rows][:, :, columns]
    seeds = tuple(tuple(map(tuple, seed)) for seed in values.tolist())
    until = tuple(losses.until[i] for i in rows)
    periods = tuple(losses.periods[j] for j in columns)
    return replace(losses, until=until, periods=periods, seeds=seeds)


def hash_of_losses(losses: Losses) -> str:
    """SHA-256 of all losses, in a form that neither the order of lines nor further ones change."""
    lines = []
    for number, seed in enumerate(losses.seeds):
        for until, row in zip(losses.until, seed, strict=True):
            for period, loss in zip(losses.periods, row, strict=True):
                if math.isfinite(loss):
                    lines.append(f"{number} {until!r} {period!r} {loss!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def hash_of_forecast(forecast: dict[str, Any]) -> str:
    """SHA-256 of a forecast without its own hash."""
    content = {key: value for key, value in forecast.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_forecast(
    matrix: Matrix, price: float, periods: int, until: str = "", models: int = 0
) -> dict[str, Any]:
    """The forecast, ready to be written as JSON.

    price    of a training, in the unit of the losses times periods
    periods  to come

    `until` and `models` as in `history_of`. UserError: too few losses for a law.
    """
    history = history_of(matrix, until, models)
    group = matrix.group
    retraining = Retraining(
        history, group.metric, group.period, price=price, periods_to_come=periods
    )
    size = group.period.size
    last = max(history.periods[-1], history.until[-1])
    to_come = [matrix.axis.label(last + size * at) for at in range(1, periods + 1)]
    plan = retraining.plan
    first = periods if plan.first is None else plan.first
    is_older = history.until[-1] < last  # so that a training now would make a newer model
    schedules = [
        Schedule(PLAN, first, plan.every),
        Schedule(EVERY, 0 if is_older else 1, 1),
        Schedule(NEVER, periods, 1),
    ]
    levels = _levels(retraining, periods)
    rules = []
    for schedule in schedules:
        rules.append(_forecast_of(schedule, retraining, levels, matrix.axis, last))
    forecast = {
        "format": FORMAT,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "alma": __version__,
        "model": history.label,
        "unit": group.metric.unit,
        "price": price,
        "first_of_history": matrix.axis.label(min(history.until[0], history.periods[0])),
        "last_of_history": matrix.axis.label(last),
        "models_of_history": len(history.until),
        "sha256_of_history": hash_of_losses(history),
        "last_loss": _last_loss(history),
        "periods": to_come,
        "rules": rules,
        "savings": {
            NEVER: _saving(plan.savings.get(NEVER)),
            EVERY: _saving(plan.savings.get(f"retraining every {group.period.noun}")),
        },
    }
    return {**forecast, "sha256": hash_of_forecast(forecast)}


def _saving(saving: MeanOverSeeds | None) -> list[float] | None:
    """Mean, low and high; None: the plan is the same, or there is no interval."""
    if saving is None or not saving.low <= saving.high:
        return None
    return list(saving)


def _last_loss(history: Losses) -> float:
    """The newest loss of a model on a period after its training."""
    values = np.mean(history.seeds, axis=0)
    for j in reversed(range(len(history.periods))):
        for i in reversed(range(len(history.until))):
            if history.until[i] < history.periods[j] and np.isfinite(values[i, j]):
                return float(values[i, j])
    raise UserError("no model was tested after its training")


class Level(NamedTuple):
    """The forecast loss of a deployed model in a period to come, what age adds taken out."""

    mean: float
    deviation: float


def _levels(retraining: Retraining, periods: int) -> list[Level]:
    """The level in each period to come, by a local level (Harvey, 1989) fitted to past ones.

    UserError: there are few past losses, or no statsmodels.
    """
    laws = retraining.laws
    served = []
    for j, period in enumerate(retraining.losses.periods):
        older = np.flatnonzero(laws.until < period)
        if len(older):
            i = older[-1]
            served.append(float(laws.values[i, j] - laws.whole.extra(laws.ages[i, j])))
    measured = np.array(served)[np.isfinite(served)]
    if len(measured) < _LEAST_SERVED:
        raise UserError(
            f"{len(measured)} periods have a loss of a model trained shortly before, "
            f"{_LEAST_SERVED} are the least: test more models on the next period"
        )
    try:
        from statsmodels.tsa.statespace.structural import UnobservedComponents  # optional
    except ImportError:
        raise UserError("a forecast needs statsmodels: pip install statsmodels") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few values: the fit converges slowly
        fitted = UnobservedComponents(measured, "llevel").fit(disp=False)
    ahead = fitted.get_forecast(periods)
    levels = []
    for mean, deviation in zip(ahead.predicted_mean, ahead.se_mean, strict=True):
        levels.append(Level(float(mean), float(deviation)))
    return levels


def _forecast_of(
    schedule: Schedule, retraining: Retraining, levels: list[Level], axis: TimeAxis, last: float
) -> dict[str, Any]:
    """The models in service, and mean, low and high loss of each period to come."""
    size = retraining.period.size
    present = retraining.losses.until[-1]
    quantile = float(stdtrit(retraining.laws.freedom, 0.95))
    trained = []
    losses = []
    for at, model in enumerate(schedule.models(len(levels)), 1):
        until = present if model is None else last + size * model
        trained.append(axis.label(until))
        age = last + size * at - until

        def extra(law: Law, age: float = age, at: int = at) -> float:
            ahead = last + size * at - retraining.losses.periods[-1]
            return float(retraining.laws.extra(law, age, ahead))

        estimate = retraining.laws.estimate(extra)
        level = levels[at - 1]
        error = (estimate.high - estimate.mean) / quantile
        half = quantile * math.hypot(error, level.deviation)
        mean = level.mean + estimate.mean
        interval = MeanOverSeeds(mean, mean - half, mean + half)
        losses.append(list(interval.within(*retraining.metric.limits)))
    trainings = len(set(trained) - {axis.label(present)})
    return {
        "rule": schedule.rule,
        "trainings": trainings,
        "trained_until": trained,
        "losses": losses,
    }


def write_new(path: Path, content: dict[str, Any]) -> None:
    """Write JSON into a new file, whole or not at all. UserError: the file is there."""
    refuse_to_overwrite(path)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with atomic_write(temporary) as file:
            file.write(_as_text(content))
        os.link(temporary, path)  # unlike a rename, fails if another process made the file
    except FileExistsError:
        refuse_to_overwrite(path)
    finally:
        temporary.unlink(missing_ok=True)


def _as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each rule."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if key == "rules":
            rules = [json.dumps(rule, ensure_ascii=False, allow_nan=False) for rule in value]
            text = "[\n" + ",\n".join(rules) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def refuse_to_overwrite(path: Path) -> None:
    """UserError: the file is there, or its folder is not."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists, and a forecast is never overwritten: give another name")
    if not path.parent.is_dir():
        raise UserError(f"no folder {path.parent}: make it")
