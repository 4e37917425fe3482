"""Backtest of staleness: losses of the models at hand as they were forecast at earlier periods."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.forecast import LEVELS, Array, interval
from alma.report.advice.staleness import StalenessFit, known_at
from alma.report.advice.text import DocumentPart, number
from alma.report.age import Losses
from alma.report.results import rounded
from alma.report.tables import Table

RULES = ("no staleness", "as last time")
NOTE = """\
At each period only models and held-out parts up to there are read. Forecasts are of the models at hand on \
each period to come; they are off by the mean absolute difference. Loss: "no staleness" is the loss of the \
model when it was new, "as last time" that on the last period. Extra loss, above the model that is trained \
until the period itself: "no staleness" is 0, "as last time" that on the last period."""
_OFF = ("forecast", *RULES)

Scores = dict[str, list[float]]
"""By level whether each interval held; by forecast and rule how far off each was."""


class StalenessOrigin(NamedTuple):
    """How the forecasts at one period turned out."""

    now: float
    losses: Scores
    extra: Scores


class StalenessBacktest(NamedTuple):
    """All periods of one stream or group."""

    title: str
    unit: str  # of losses; "": that of the file
    origins: list[StalenessOrigin]
    name: Callable[[float], str]  # of a period

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        heading = f"Backtest of staleness{self.unit and f' ({self.unit})'}: {self.title}"
        return [DocumentPart(heading, (), self._table(), [NOTE])]

    def _table(self) -> Table:
        held = [f"{level:.0%} interval held" for level in LEVELS]
        header = [
            f"{kind}: {name}"
            for kind in ("loss", "extra loss")
            for name in ("cells", *held, "off by", *RULES)
        ]
        rows = [[self.name(origin.now), *_cells([origin])] for origin in self.origins]
        return [["period", *header], *rows, ["all", *_cells(self.origins)]]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        each = [{"period": self.name(origin.now)} | summarize([origin]) for origin in self.origins]
        return {"title": self.title, "unit": self.unit, "all": summarize(self.origins), "origins": each}


def summarize(origins: Sequence[StalenessOrigin]) -> dict[str, Any]:
    """Number of cells, shares and means, for losses and extra losses; None of nothing."""
    found = {}
    for kind in ("losses", "extra"):
        scores = [getattr(origin, kind) for origin in origins]
        lists = {key: list(itertools.chain(*(each[key] for each in scores))) for key in scores[0]}
        means = {key: rounded(float(np.mean(values))) if values else None for key, values in lists.items()}
        found[kind] = {"cells": len(lists["forecast"])} | means
    return found


def _cells(origins: Sequence[StalenessOrigin]) -> list[str]:
    texts = []
    for found in summarize(origins).values():
        shares = [found[_key(level)] for level in LEVELS]
        texts += [str(found["cells"]), *("" if share is None else f"{share:.0%}" for share in shares)]
        texts += ["" if found[key] is None else number(found[key]) for key in _OFF]
    return texts


def _key(level: float) -> str:
    return f"coverage_{level:g}"


def look_back_on(
    title: str, unit: str, group: Sequence[Losses], name: Callable[[float], str]
) -> StalenessBacktest:
    """Forecasts at each period at which a model of `group` was trained (tenths, of more than ten), against
    what came. UserError: no model is old enough at a period before the last one.
    """
    origins: dict[float, StalenessOrigin] = {}
    for losses in group:
        count = len(losses.until)
        tenths = sorted({round(count * tenth / 10) for tenth in range(1, 11)} - {0})
        for now in (losses.until[i - 1] for i in tenths):
            origin = origins.setdefault(now, StalenessOrigin(now, _no_scores(), _no_scores()))
            _look_back(losses, origin)
    found = [origin for _, origin in sorted(origins.items()) if origin.losses["forecast"]]
    if not found:
        raise UserError(f"--backtest: {title}: too few models with a loss on their own period")
    return StalenessBacktest(title, unit, found, name)


def _no_scores() -> Scores:
    return {key: [] for key in (*map(_key, LEVELS), *_OFF)}


def _look_back(losses: Losses, origin: StalenessOrigin) -> None:
    """Add the scores of the models of one configuration, from what was known at the origin."""
    known = known_at(losses, origin.now)
    try:
        fit = StalenessFit(known)
    except UserError:
        return
    mean = np.mean(losses.seeds, axis=0)
    now = len(known.periods)  # index of the first column to come
    newest = {p: (i, j) for i, u in enumerate(losses.until) for j, p in enumerate(losses.periods) if u == p}
    fresh = {p: float(mean[cell]) for p, cell in newest.items()}
    for row, trained in enumerate(known.until):
        came = {p: float(mean[row, j]) for j, p in enumerate(losses.periods) if j >= now}
        came = {p: value for p, value in came.items() if np.isfinite(value)}
        draws = fit.coming_losses(row, list(came)) if came else None
        last = float(mean[row, now - 1])
        if draws is not None and trained in fresh:
            _score(origin.losses, draws, np.array(list(came.values())), (fresh[trained], last))
        later = {p: value - fresh[p] for p, value in came.items() if np.isfinite(fresh.get(p, np.nan))}
        before = last - fresh.get(known.periods[-1], np.nan)
        if later and np.isfinite(before):
            extra = fit.extra_losses(row, list(later))
            _score(origin.extra, extra, np.array(list(later.values())), (0.0, before))


def _score(scores: Scores, draws: Array, came: Array, rules: Sequence[float]) -> None:
    """Add forecasts of one model, and naive rules, against what came: draws (DRAWS, n), came (n,)."""
    for level in LEVELS:
        low, high = interval(draws, level)
        scores[_key(level)] += ((low <= came) & (came <= high)).tolist()
    forecasts: list[Array] = [np.median(draws, 0), *(np.full(len(came), rule) for rule in rules)]
    for key, forecast in zip(_OFF, forecasts, strict=True):
        scores[key] += abs(forecast - came).tolist()
