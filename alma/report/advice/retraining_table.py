"""How often to retrain, as a document with a table of cadences and as a record for JSON."""

import math
from collections.abc import Sequence
from typing import Any

from alma.report.advice.amounts import rounded_off
from alma.report.advice.direction import check_direction
from alma.report.advice.matrix import LossGroup
from alma.report.advice.retraining import Retraining, TrainingCost
from alma.report.advice.retraining_words import (
    advice_of,
    answer,
    costs_to_come,
    lines,
    unit_of_cost,
)
from alma.report.losses import MeanOverSeeds
from alma.report.results import rounded
from alma.report.tables import TitledTable
from alma.tables import Table, number

QUESTION = "how often to retrain?"
NOTE = """\
Extra loss: above a model trained until the period that is served, mean over ages up to the next \
training and the periods to come; it includes what less training costs. "As last time": by the \
extra losses on the last period. Gain: what the next rarer cadence loses more. A cadence pays, \
against each rarer one, if a training costs less than its price (as in --price). Costs are of \
trainings to come."""


class MatrixReport:
    """The report on several groups of losses from CSV files: how often to retrain each model."""

    def __init__(self, groups: Sequence[LossGroup], **options: Any):
        """`options`: fields of `Retraining`, for all groups. UserError: a group is too small."""
        self.groups: list[Retraining] = []
        for group in groups:
            cost = TrainingCost(hours=group.gpu_hours)
            retraining = Retraining(
                group.losses,
                group.metric,
                group.period,
                cost,
                counted_from=group.newest,
                **options,
            )
            check_direction(retraining)
            self.groups.append(retraining)

    @property
    def parts(self) -> list[TitledTable]:
        """The parts of the printed document; only the last one has the note on the columns."""
        tables = [titled(retraining) for retraining in self.groups]
        return [*(table._replace(note="") for table in tables[:-1]), tables[-1]]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"groups": [record(retraining) for retraining in self.groups]}


def titled(retraining: Retraining) -> TitledTable:
    """The sentences, and a table with a row per cadence.

    Without losses on the past, the columns that need the law are left out.
    """
    unit = retraining.unit
    header = ["training", f"extra loss ({unit}), 90%", "as last time", "gain, 90%"]
    table = [[*header, "pays below a price of, 90%", "cost of trainings to come"]]
    for i, every in enumerate(retraining.cadences):
        table.append(_row(retraining, every, retraining.cadences[i + 1 :]))
    if retraining.unknown:
        table = _without_law(table)
    title = f"{QUESTION.capitalize()} {retraining.losses.label}"
    return TitledTable(title, table, NOTE, lines(retraining))


def _row(retraining: Retraining, every: int, rarer: Sequence[int]) -> list[str]:
    """The cells of a cadence; `rarer`: the cadences below it, ascending."""
    last_time = retraining.last_time(every)
    gain = ""
    price = ""
    if rarer:
        gain = rounded_off(retraining, retraining.gain(every, rarer[0])).text()
        limits = [_pays_below(retraining, every, cadence) for cadence in rarer]
        limit = rounded_off(retraining, min(limits).within(0.0, math.inf))
        price = limit.text(retraining.money or 1.0)
    return [
        retraining.period.every(every),
        rounded_off(retraining, retraining.extra(every)).text(),
        "" if math.isnan(last_time) else number(last_time),
        gain,
        price,
        costs_to_come(retraining, every),
    ]


def _pays_below(retraining: Retraining, every: int, rarer: int) -> MeanOverSeeds:
    """The price of a training below which a cadence pays against a rarer one, in the unit."""
    further_trainings = 1 / every - 1 / rarer  # per period
    return MeanOverSeeds(*(end / further_trainings for end in retraining.gain(every, rarer)))


def _without_law(table: Table) -> Table:
    """Keep the columns that need no law: cadence, loss as last measured, cost."""
    return [[row[0], row[2], row[5]] for row in table]


def record(retraining: Retraining) -> dict[str, Any]:
    """For JSON: losses in nats a token, errors in percent; a plan in the unit that it names."""
    cadences = []
    for every in retraining.cadences:
        cadence = {
            "every": every,
            "extra": retraining.extra(every),
            "as_last_time": retraining.last_time(every),
            "cost": costs_to_come(retraining, every),
        }
        cadences.append(cadence)
    has_plan = not retraining.unknown and not math.isnan(retraining.price)
    values = {
        "label": retraining.losses.label,
        "answer": answer(retraining),
        "advice": advice_of(retraining),
        "unit": retraining.unit,
        "period": retraining.period,
        "slope": None if retraining.unknown else retraining.slope,
        "drifts": retraining.drifts,
        "law": retraining.laws.whole,
        "cadences": cadences,
        "plan": _record_of_plan(retraining) if has_plan else None,
    }
    return dict(rounded(values))


def _record_of_plan(retraining: Retraining) -> dict[str, Any]:
    """The plan for JSON, with all costs in the unit of the answer."""
    plan = retraining.plan
    factor = retraining.money or 1.0
    savings = {}
    for name, saving in plan.savings.items():
        savings[name] = MeanOverSeeds(*(factor * value for value in saving))
    return {
        "first": plan.first,
        "every": plan.every,
        "trainings": plan.trainings,
        "evidence": plan.evident and not retraining.laws.just_changed,
        "unit": unit_of_cost(retraining),
        "price": factor * retraining.price,
        "total": factor * plan.total,
        "savings": savings,
        "flips": [factor * price for price in plan.flips],
    }
