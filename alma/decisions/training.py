"""Is a training due? By the calendar, by the price of a training, or by unusual losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from alma.decisions.answer import EXIT_CODES, Decision, TrainedModel, Word
from alma.decisions.record import Record
from alma.errors import UserError
from alma.report.advice.amounts import question_of_price, rounded_off
from alma.report.advice.plan import RetrainingPlan
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses
from alma.tables import number

_UNKNOWN = "without losses on the past, drift and lack of training cannot be told apart"
_NOT_NOW = "do not train, which costs nothing"


class Verdict(NamedTuple):
    """What one rule says."""

    rule: Literal["every", "price", "losses"]
    answer: Word
    reason: str


class Terms(NamedTuple):
    """When a training is due, beside unusual losses."""

    every: int | None = None
    """In periods; None: not by the calendar."""
    price: float = math.nan
    """Of a training, in units of loss summed over periods; NaN: not by a price."""
    money: float = 0.0
    """What one unit costs in one period; 0: the price is in units of loss."""

    @property
    def by_price(self) -> bool:
        return not math.isnan(self.price)


@dataclass(frozen=True, kw_only=True)
class DueAnswer(Decision):
    """Whether a training is due."""

    model: TrainedModel | None
    """The newest; None: none is trained yet."""
    arrived: int
    """Mega-batches since its training."""
    period: str
    """What a mega-batch is: "month", ..., or "mega-batch"."""
    unit: str
    """Of `price`, `excess` and `plan`."""
    tested: bool
    """Whether the newest model was tested on the newest mega-batch."""
    every: int | None
    price: float | None
    excess: float | None
    """How far its last losses are above the usual; 0: as usual; None: not known."""
    plan: RetrainingPlan | None
    """At the price; its savings are by the name of the other plan."""
    rules: list[Verdict]


def is_due(record: Record, terms: Terms) -> DueAnswer:
    """Whether a training is due now, by any of the rules.

    Raises UserError if the run has no losses on held-out parts by period, and there is no `every`.
    """
    if record.losses is None and record.models and not terms.every:
        raise UserError(
            f"{record.run.directory} has no losses on the held-out parts of an ordered stream, "
            "so only the calendar can say: give --every N"
        )
    if not record.models:
        reason = f"no model is trained yet, and {record.period.span(record.arrived)} arrived"
        return _answer(record, terms, [Verdict("losses", "yes", reason)])
    newest = record.models[-1]
    since = record.arrived - newest.megabatch
    if not since:
        reason = f"nothing arrived since the training on {record.name(newest.megabatch)}, as far "
        command = f"`alma test {record.run.directory}`"
        reason += f"as the record knows ({command} adds what was appended to the stream)"
        return _answer(record, terms, [Verdict("losses", "no", reason)])
    verdicts = []
    if terms.every:
        verdicts.append(_by_calendar(record, since, terms.every))
    is_reached = bool(verdicts) and verdicts[0].answer == "yes"
    if is_reached or record.losses_by_age is None:
        return _answer(record, terms, verdicts)
    if not record.is_tested(newest, record.arrived):
        verdicts.append(_of_untested(record))
        return _answer(record, terms, verdicts)
    return _by_losses(record, record.losses_by_age, terms, verdicts)


def _by_calendar(record: Record, since: int, every: int) -> Verdict:
    """Whether so many periods arrived since the newest model's training."""
    newest = record.name(record.models[-1].megabatch)
    reason = f"{record.period.span(since)} since the training on {newest}, of --every {every}"
    return Verdict("every", "yes" if since >= every else "no", reason)


def _of_untested(record: Record) -> Verdict:
    """The newest model was not tested on the newest mega-batch."""
    newest = record.name(record.models[-1].megabatch)
    problem = f"the model of {newest} was not tested on {record.name(record.arrived)}"
    command = f"`alma test {record.run.directory}` tests it"
    return Verdict("losses", "no evidence", f"{problem} ({command})")


def _by_losses(
    record: Record, losses: Losses, terms: Terms, verdicts: Sequence[Verdict]
) -> DueAnswer:
    """By the price and by unusual losses, after the `verdicts` of the calendar."""
    has_terms = bool(terms.every) or terms.by_price
    try:
        retraining = Retraining(
            losses, record.metric, record.period, price=terms.price, money=terms.money
        )
    except UserError:
        tested = "three models that are tested on later mega-batches, too"
        reason = f"{len(record.models)} models tell too little: it takes {tested}"
        if terms.by_price:
            return _answer(record, terms, [*verdicts, Verdict("price", "no evidence", reason)])
        if has_terms:
            return _answer(record, terms, verdicts)
        return _answer(record, terms, [Verdict("losses", "no evidence", reason)])
    verdicts = list(verdicts)
    excess = None
    if retraining.outlook.has_usual_losses:
        excess = retraining.outlook.excess
        verdicts.append(_by_excess(record, excess))
    elif not has_terms:
        reason = "too few losses of earlier models in service to say what is usual"
        verdicts.append(Verdict("losses", "no evidence", reason))
    plan = None
    if terms.by_price:
        plan = retraining.plan
        verdicts.append(_by_plan(retraining))
    return _answer(record, terms, verdicts, excess, plan)


def _by_excess(record: Record, excess: float) -> Verdict:
    """Whether the last losses of the newest model are out of the usual."""
    newest = record.name(record.models[-1].megabatch)
    if excess > 0:
        far = f"{number(excess)} {record.unit} above those of earlier models in service"
        return Verdict("losses", "yes", f"the last losses of the model of {newest} are {far}")
    return Verdict("losses", "no", f"the losses of the model of {newest} are as usual")


def _by_plan(retraining: Retraining) -> Verdict:
    """Whether the plan of least cost trains now, and saves against the opposite for certain."""
    if retraining.unknown:
        return Verdict("price", "no evidence", _UNKNOWN)
    plan = retraining.plan
    trains_now = plan.first == 0
    opposite = "never" if trains_now else f"retraining every {retraining.period.noun}"
    unit = "in the unit of --price" if retraining.money else f"{retraining.unit} over periods"
    text = "the cheapest plan trains now" if trains_now else _later(retraining)
    if retraining.laws.just_changed:
        reason = f"the drift has just changed, so what it saves is not known: {text}"
        return Verdict("price", "no evidence", reason)
    saving = plan.savings[opposite]
    saved = rounded_off(retraining, saving).text(retraining.money or 1.0)
    text += f" and saves {saved} {unit} against {opposite}"
    question = question_of_price(retraining)
    if question:
        text += f". {question.removesuffix('.')}"
    if not saving.low > 0:
        return Verdict("price", "no evidence", text)
    return Verdict("price", "yes" if trains_now else "no", text)


def _later(retraining: Retraining) -> str:
    """When a plan that does not train now does."""
    first = retraining.plan.first
    if first is None:
        return "the cheapest plan trains no more"
    return f"the cheapest plan trains in {retraining.period.span(first)}"


def _answer(
    record: Record,
    terms: Terms,
    verdicts: Sequence[Verdict],
    excess: float | None = None,
    plan: RetrainingPlan | None = None,
) -> DueAnswer:
    """The answer of all rules: yes if one says so, else no evidence if one says so, else no."""
    answers = {verdict.answer for verdict in verdicts}
    answer: Word = "no"
    if "yes" in answers:
        answer = "yes"
    elif "no evidence" in answers:
        answer = "no evidence"
    reasons = [verdict.reason for verdict in verdicts if verdict.answer == answer]
    newest = record.models[-1] if record.models else None
    since = record.arrived - (newest.megabatch if newest else 0)
    reason = "; ".join(reasons)
    wait = record.result.waiting_time
    if answer == "yes" and newest and since < wait:
        reason += f"; a stage of this run waits for {wait}, so train in a new --out"
    return DueAnswer(
        question="due",
        run=str(record.run.directory),
        answer=answer,
        exit_code=EXIT_CODES[answer],
        reason=reason,
        course=_course(record, terms, since) if answer == "no evidence" else None,
        model=newest,
        arrived=since,
        period=record.period.noun,
        unit=record.unit,
        tested=newest is not None and record.is_tested(newest, record.arrived),
        every=terms.every,
        price=terms.price if terms.by_price else None,
        excess=excess,
        plan=plan,
        rules=list(verdicts),
    )


def _course(record: Record, terms: Terms, since: int) -> str:
    """What to do without evidence."""
    if not terms.every:
        return _NOT_NOW
    remaining = record.period.span(terms.every - since)
    return f"{_NOT_NOW}; by --every {terms.every} the next training is due in {remaining}"
