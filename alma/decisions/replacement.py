"""May the newest model replace the deployed one? By the newest held-out part, and by the past."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from alma.decisions.answer import EXIT_CODES, Decision, TrainedModel, Word
from alma.decisions.pairs import Pair, document_gain, image_gain
from alma.decisions.record import Record
from alma.errors import UserError
from alma.evaluations import item_losses_file, read_item_losses
from alma.report.losses import Losses, MeanOverSeeds, t_interval
from alma.report.metric import Metric

Method = Literal["documents", "images", "scatter"]
_LEAST_DOCUMENTS = 20  # of a part: the bootstrap of fewer is too narrow
LEAST_MODELS = 5
"""Fewer do not tell how far models scatter: `python -m benchmarks decisions`."""
_TOLERANCE = 0.01  # of the loss of a part, between its items and the record
_KEEP = "keep the deployed model, which costs nothing"


@dataclass(frozen=True)
class TestedPart:
    """A held-out part."""

    megabatch: int
    period: str | None


@dataclass(frozen=True)
class Gain:
    """What the newest model gains over the deployed one on held-out parts."""

    gain: MeanOverSeeds
    """Mean and 90% interval, above 0 if the newest model is better; mean over the parts."""
    method: Method
    """Paired by document or image, or unpaired by the scatter of the record's cells."""
    items: int | None
    """Documents or images of all parts; None: unpaired."""
    parts: int


class Margins(NamedTuple):
    """What a gain must be worth and what the past may lose, each as --worth states it."""

    worth: tuple[float, bool] = (0.0, False)
    forget: tuple[float, bool] | None = None
    """None: the past does not count."""


@dataclass(frozen=True, kw_only=True)
class GateAnswer(Decision):
    """Whether the newest model may replace the deployed one."""

    metric: str
    unit: str
    """Of gains, `worth` and `forget`: "nats a token" or "percentage points"."""
    newest: TrainedModel
    deployed: TrainedModel | None
    """None: there is one model only."""
    held_out: TestedPart | None
    """The newest part on which both were tested."""
    worth: float
    forget: float | None
    newest_part: Gain | None
    """None: not comparable."""
    past: Gain | None
    """None: not asked, or not comparable."""


class _Verdict(NamedTuple):
    answer: Word
    reason: str
    gain: Gain | None


def may_replace(record: Record, deployed: str | None, margins: Margins) -> GateAnswer:
    """Whether the newest model is better than the deployed one.

    `deployed`: the mega-batch or period that the deployed model was trained until; None: the model
    before the newest. Raises UserError if there is no such model, if the run has no losses on
    held-out parts by period, or if files of item losses are damaged or of other parts.
    """
    if not record.models:
        raise UserError(f"{record.run.directory} has no trained model yet: nothing can be compared")
    if record.losses is None:
        raise UserError(
            f"{record.run.directory} has no losses on held-out parts by mega-batch: only a stream "
            "with an order has them (text: `alma data --by` or `--ordered`; images: `--by` or "
            "`--scenario`)"
        )
    newest = record.models[-1]
    if len(record.models) == 1 and deployed is None:
        name = record.name(newest.megabatch)
        verdict = _Verdict("no evidence", f"the model of {name} is the only one", None)
        return _answer(record, margins, None, None, [verdict])
    old = _deployed_model(record, deployed)
    part = _newest_part(record, old, newest)
    if part is None:
        return _answer(record, margins, old, None, [_of_untested(record, old, newest)])
    verdicts = [_on_newest_part(record, old, part, margins)]
    if margins.forget is not None:
        verdicts.append(_on_past(record, old, record.metric.least_gain(margins.forget)))
    return _answer(record, margins, old, part, verdicts)


def _deployed_model(record: Record, deployed: str | None) -> TrainedModel:
    """The deployed model. Raises UserError if there is none, or if it is the newest."""
    *older, newest = record.models
    if deployed is None:
        return older[-1]
    for model in older:
        if deployed in (model.period, str(model.megabatch)):
            return model
    names = [str(model.megabatch) for model in older]
    if newest.period:
        names = [f"{model.megabatch} ({record.name(model.megabatch)})" for model in older]
    problem = f"--deployed {deployed}: no model was trained until then"
    if deployed in (newest.period, str(newest.megabatch)):
        problem = f"--deployed {deployed} is the newest model"
    if not names:
        raise UserError(f"{problem}, and there is no older one: train on the next mega-batch first")
    raise UserError(f"{problem}: give one of {', '.join(names)}")


def _newest_part(record: Record, old: TrainedModel, newest: TrainedModel) -> int | None:
    """The newest held-out part, not older than the newest model, on which both were tested."""
    for t in range(record.arrived, newest.megabatch - 1, -1):
        if record.is_tested(old, t) and record.is_tested(newest, t):
            return t
    return None


def _of_untested(record: Record, old: TrainedModel, newest: TrainedModel) -> _Verdict:
    """No part is there on which both were tested."""
    for model in (newest, old):
        if not record.is_tested(model, newest.megabatch):
            untested = record.name(model.megabatch)
            break
    problem = f"the model of {untested} was not tested on {record.name(newest.megabatch)}"
    command = f"`alma test {record.run.directory}` tests it if its checkpoint is there"
    return _Verdict("no evidence", f"{problem} ({command})", None)


def _on_newest_part(record: Record, old: TrainedModel, part: int, margins: Margins) -> _Verdict:
    """Whether the gain on the newest part is above what it must be worth."""
    newest = record.models[-1]
    gain = _compare(record, old, [part])
    names = f"that of {record.name(old.megabatch)} on {record.name(part)}"
    if gain is None:
        problem = f"the model of {record.name(newest.megabatch)} cannot be compared with {names}"
        return _Verdict("no evidence", f"{problem}: {_what_is_missing(record, part)}", None)
    least = record.metric.least_gain(margins.worth)
    reason = f"the model of {record.name(newest.megabatch)} is "
    reason += f"{_better(gain.gain, record.metric)} than {names} ({_basis(gain)})"
    if least:
        reason += f", against --worth {record.metric.text(least)}"
    return _Verdict(against(gain.gain, least), reason, gain)


def _on_past(record: Record, old: TrainedModel, most: float) -> _Verdict:
    """Whether the newest model loses no more than so much on the past of the deployed one."""
    newest = record.models[-1]
    parts = []
    for t in range(1, old.megabatch + 1):
        if record.is_tested(old, t) and record.is_tested(newest, t):
            parts.append(t)
    gain = _compare(record, old, parts) if parts else None
    span = f"on the past, until {record.name(old.megabatch)},"
    if gain is None:
        return _Verdict("no evidence", f"{span} the two cannot be compared", None)
    reason = f"{span} it is {_better(gain.gain, record.metric)} ({_basis(gain)}), "
    reason += f"against --forget {record.metric.text(most)}"
    return _Verdict(against(gain.gain, -most), reason, gain)


def against(gain: MeanOverSeeds, least: float) -> Word:
    """Yes if the interval of a gain is above `least`, no if it is below, else no evidence."""
    if gain.low > least:
        return "yes"
    return "no" if gain.high < least else "no evidence"


def _compare(record: Record, old: TrainedModel, parts: Sequence[int]) -> Gain | None:
    """The gain on some parts: paired if all have enough items, else by scatter; None: neither."""
    newest = record.models[-1]
    is_text = record.result.metric == "perplexity"
    least = _LEAST_DOCUMENTS if is_text else 1  # the interval of images is honest for any number
    pairs = []
    for t in parts:
        pair = _pair(record, old, newest, t)
        if pair is None or len(pair.newest) < least:
            return _by_scatter(record, old, newest, parts)
        pairs.append(pair)
    items = sum(len(pair.newest) for pair in pairs)
    if is_text:
        return Gain(document_gain(pairs), "documents", items, len(parts))
    return Gain(image_gain(pairs), "images", items, len(parts))


def _pair(record: Record, old: TrainedModel, newest: TrainedModel, t: int) -> Pair | None:
    """The losses of both models by document or image of a part; None if one has none.

    Raises UserError if they are damaged, of different items, or of another model.
    """
    directory = record.run.directory
    paths = []
    losses = []
    for model in (old, newest):
        path = item_losses_file(directory, model.stage, t)
        of_items = read_item_losses(path)
        if of_items is None:
            return None
        paths.append(path)
        losses.append(of_items)
    remedy = f"delete both, and start `alma test {directory}` again"
    both = f"{paths[0]} and {paths[1].name}"
    pair = Pair(*losses)
    if len(pair.deployed) != len(pair.newest):
        counts = f"{len(pair.deployed)} and {len(pair.newest)} losses"
        raise UserError(f"{both} have {counts}: they are of different held-out parts: {remedy}")
    is_text = record.result.metric == "perplexity"
    if is_text and (pair.deployed[:, 1] != pair.newest[:, 1]).any():
        raise UserError(f"{both} are of different documents, by their tokens: {remedy}")
    for model, path, of_items in zip((old, newest), paths, losses, strict=True):
        mean = of_items[:, 0].sum() / max(of_items[:, 1].sum(), 1)
        scale = 1 if is_text else 100
        recorded = record.loss(model, t)
        if not math.isclose(scale * mean, recorded, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            problem = f"a mean of {scale * mean:.4g} {record.unit}, and the record {recorded:.4g}"
            raise UserError(
                f"{path} has {problem}: delete it, and start `alma test {directory}` again"
            )
    return pair.counted()


def _by_scatter(
    record: Record, old: TrainedModel, newest: TrainedModel, parts: Sequence[int]
) -> Gain | None:
    """The gain without losses of items; None: the law of staleness takes more models."""
    assert record.losses_by_age
    gains = [record.loss(old, t) - record.loss(newest, t) for t in parts]
    try:
        gain = gain_by_scatter(
            record.losses_by_age, math.fsum(gains) / len(gains), record.period.year
        )
    except UserError:
        return None
    return Gain(gain, "scatter", None, len(parts))


def gain_by_scatter(losses: Losses, mean: float, year: float) -> MeanOverSeeds:
    """A mean gain of the newest model with its interval by what cells scatter around the law.

    The scatter is that of the models before it, so that a newest model that is off does not widen
    its own interval. A model that is off is off on all parts, so models count, not cells; the law
    takes two of them: what training gains, what is forgotten. Raises UserError if too few models
    share periods.
    """
    from alma.report.advice.staleness import Laws  # with SciPy, half a second

    if len(losses.until) < LEAST_MODELS:
        raise UserError(f"{losses.label}: fewer than {LEAST_MODELS} models")
    seeds = tuple(seed[:-1] for seed in losses.seeds)
    laws = Laws(replace(losses, until=losses.until[:-1], seeds=seeds), year)
    models = len(laws.until)
    freedom = models - 2
    scatter = laws.scatter * math.sqrt(models / freedom)
    return t_interval(mean, math.sqrt(2) * scatter, freedom)


def _what_is_missing(record: Record, part: int) -> str:
    """What would give evidence."""
    items = "images"
    tested = f"`alma test {record.run.directory}` writes those of images by date"
    if record.result.metric == "perplexity":
        items = f"at least {_LEAST_DOCUMENTS} documents"
        tested = f"`alma test {record.run.directory}` writes them, a trainer must return them"
    losses = f"it takes the losses of {items} of {record.name(part)}"
    return f"{losses} ({tested}), or {LEAST_MODELS} models that share tests"


def _better(gain: MeanOverSeeds, metric: Metric) -> str:
    """Such as "3.2% [2.1%, 4.3%] better"; of a loss, "1.5% [-0.2%, 3.2%] worse"."""
    word = "better"
    if gain.mean < 0:
        word = "worse"
        gain = MeanOverSeeds(-gain.mean, -gain.high, -gain.low)
    return f"{metric.interval(*gain)} {word}"


def _basis(gain: Gain) -> str:
    """What an interval rests on."""
    if gain.items is None:
        return "unpaired, by the scatter of the record"
    return f"{gain.items:,} {gain.method}, paired"


def _answer(
    record: Record,
    margins: Margins,
    old: TrainedModel | None,
    part: int | None,
    verdicts: Sequence[_Verdict],
) -> GateAnswer:
    """No if a verdict says so, else no evidence if one says so, else yes."""
    answers = {verdict.answer for verdict in verdicts}
    answer: Word = "yes"
    if "no" in answers:
        answer = "no"
    elif "no evidence" in answers:
        answer = "no evidence"
    forget = None
    if margins.forget is not None:
        forget = record.metric.least_gain(margins.forget)
    return GateAnswer(
        question="gate",
        run=str(record.run.directory),
        answer=answer,
        exit_code=EXIT_CODES[answer],
        reason="; ".join(verdict.reason for verdict in verdicts),
        course=_KEEP if answer == "no evidence" else None,
        metric=record.result.metric,
        unit=record.unit,
        newest=record.models[-1],
        deployed=old,
        held_out=TestedPart(part, record.period_of(part)) if part else None,
        worth=record.metric.least_gain(margins.worth),
        forget=forget,
        newest_part=verdicts[0].gain,
        past=verdicts[1].gain if len(verdicts) > 1 else None,
    )
