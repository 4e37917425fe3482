"""Which metric a column of a CSV file has: by its name, its values and the options.

What could be two metrics, or none, is refused with the question that settles it, and its option.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from alma.errors import UserError
from alma.report.metric import BYTES_A_TOKEN, Metric

COLUMNS_OF_CELLS = ("model", "domain", "seed", "trained_until", "tested_on", "gpu_hours")
_FROM_0 = (0.0, math.inf)
_SHARE = (0.0, 1.0)
_BITS = math.log(2)  # nats
_LOG_LIKELIHOODS = {
    "nats": Metric("loss", "nats", bounds=_FROM_0, nats=1.0, in_percent=True),
    "bits": Metric("loss", "bits a token", bounds=_FROM_0, nats=_BITS, in_percent=True),
    "bits-per-byte": Metric("loss", "bits a byte", bounds=_FROM_0, nats=_BITS * BYTES_A_TOKEN),
    "perplexity": Metric(
        "perplexity",
        "nats of log perplexity",
        bounds=(1.0, math.inf),
        logarithmic=True,
        nats=1.0,
        in_percent=True,
    ),
}
_HIGHER_IS_BETTER = {"accuracy": True, "error": False, "F1": True, "mAP": True, "AUC": True}
"""Metrics that are shares or percent."""
_ERRORS_OF_NUMBERS = ("MAPE", "WAPE", "RMSE", "MAE")
_IN_PERCENT = ("MAPE", "WAPE")
_LEAST_PERCENT = 2.0  # an accuracy of 2% at most would be no model
_LARGEST_IN_NATS = 16.0  # log of 9 million tokens: beyond, a model is worse than guessing
_ALIASES = {
    "loss": "nats",
    "natspertoken": "nats",
    "natsatoken": "nats",
    "bitspertoken": "bits",
    "bitsatoken": "bits",
    "bitsperbyte": "bits-per-byte",
    "bitsabyte": "bits-per-byte",
    "bpb": "bits-per-byte",
    "ppl": "perplexity",
    "acc": "accuracy",
    "errorrate": "error",
    "f1score": "F1",
    "rocauc": "AUC",
    "auroc": "AUC",
}
_READ_AS_NATS = "Loss was read as nats a token; --metric names another unit."
_KINDS = (*_LOG_LIKELIHOODS, *_HIGHER_IS_BETTER, *_ERRORS_OF_NUMBERS)
_OF_DATA = {"test", "val", "valid", "validation", "eval", "in"}
_OF_MEANS = {"macro", "micro", "weighted"}  # over classes
_IGNORED = _OF_DATA | _OF_MEANS
_SCALES = {"percent": "percent", "pct": "percent", "share": "share", "fraction": "share"}
NAMES = (
    "nats, bits, bits-per-byte, perplexity; accuracy, error, F1, mAP, AUC, with -share or -percent "
    "where the values leave it open; MAPE, WAPE, RMSE, MAE; or any name with --higher-is-better or "
    "--lower-is-better"
)
"""What --metric takes."""


@dataclass(frozen=True)
class MetricOptions:
    """What the options say about the metric."""

    name: str = ""
    """Of --metric."""
    higher_is_better: bool | None = None
    """None: neither --higher-is-better nor --lower-is-better."""
    bounds: tuple[float, float] | None = None
    """Of --bounds: lowest and highest value."""


class Value(NamedTuple):
    """A value of the column."""

    place: str
    """File and line, for errors."""
    value: float


class _Name(NamedTuple):
    """What a name says."""

    kind: str
    """One of _KINDS; empty: none that is known."""
    scale: str = ""
    """"share", "percent" or empty."""


def _parse(name: str) -> _Name:
    """The metric that a name means, such as that of "test accuracy (%)"."""
    words = re.findall("[a-z0-9]+", name.lower().replace("%", " percent "))
    scale = ""
    rest = []
    for word in words:
        if word in _SCALES:
            scale = _SCALES[word]
        elif word not in _IGNORED:
            rest.append(word)
    if rest[:1] == ["loss"] and len(rest) > 1:  # loss_bits, "loss (nats)"
        rest = rest[1:]
    joined = "".join(rest)
    kinds = {re.sub("[^a-z0-9]", "", kind.lower()): kind for kind in _KINDS}
    kind = kinds.get(joined) or _ALIASES.get(joined, "")
    if scale and kind not in _HIGHER_IS_BETTER and kind not in _IN_PERCENT:
        return _Name("")
    return _Name(kind, scale)


def is_known(name: str) -> bool:
    """Whether the name of a metric says what its values are."""
    return bool(_parse(name).kind)


def column_of(path: object, columns: Sequence[str], options: MetricOptions) -> str:
    """The column of a file that has the values.

    UserError: none has, or several may.
    """
    value_columns = [name for name in columns if name and name not in COLUMNS_OF_CELLS]
    if options.name in value_columns:
        return options.name
    fitting = [name for name in value_columns if _parse(name).kind]
    if len(fitting) == 1:
        return fitting[0]
    if len(value_columns) == 1 and options.name:
        return value_columns[0]
    candidates = ", ".join(fitting or value_columns)
    if options.name:
        raise UserError(f"{path}: no column {options.name}: which has the values, {candidates}?")
    if len(value_columns) == 1:
        only = value_columns[0]
        raise UserError(
            f"{path}: what is {only}? Give --metric {shlex.quote(only)} with --higher-is-better or "
            "--lower-is-better, or --metric with the name of a metric, such as accuracy"
        )
    raise UserError(f"{path}: which column has the values, {candidates}? Give --metric COLUMN")


def metric_of(column: str, values: Sequence[Value], options: MetricOptions) -> Metric:
    """The metric of a column, with values that it can have.

    UserError: it could be two, it has no such values, or options contradict it.
    """
    name = options.name or column
    kind, scale = _parse(name)
    if not kind and options.name == column and options.higher_is_better is None:
        raise UserError(
            f"{column}: which values are better? Give --higher-is-better or --lower-is-better"
        )
    if not kind and options.higher_is_better is None:
        raise UserError(
            f"--metric {shlex.quote(name)}: is higher or lower better? Give --higher-is-better or "
            f"--lower-is-better, or one of {NAMES}"
        )
    is_plain_loss = column == name == "loss"
    if not kind or (is_plain_loss and options.higher_is_better is not None):
        metric = Metric(name, name, higher_is_better=bool(options.higher_is_better))
    elif kind in _LOG_LIKELIHOODS:
        metric = _LOG_LIKELIHOODS[kind]
        if kind == "nats" and "nats" not in name.lower():
            _check_nats(column, values)
            metric = replace(metric, remark=_READ_AS_NATS)
    elif kind in _HIGHER_IS_BETTER:
        metric = _in_points(name, kind, scale, values)
    else:
        metric = Metric(kind, kind, bounds=_FROM_0)
    _check_direction(name, metric, options)
    if options.bounds:
        metric = replace(metric, bounds=_narrowed(metric, options.bounds))
    _check_bounds(column, values, metric)
    return metric


def _check_nats(column: str, values: Sequence[Value]) -> None:
    """Raise a UserError if a column `loss` can hardly be in nats a token."""
    typical = median(value for _, value in values)
    lowest = min(value for _, value in values)
    if lowest >= 0 and typical <= _LARGEST_IN_NATS:
        return
    problem = f"{lowest:g} is below 0"
    if lowest >= 0:
        problem = f"the median, {typical:g}, is above {_LARGEST_IN_NATS:g}"
    raise UserError(
        f"column {column}: nats a token? {problem}: give --metric perplexity, bits or nats, or "
        "--metric loss with --lower-is-better for another number"
    )


def _in_points(name: str, kind: str, scale: str, values: Sequence[Value]) -> Metric:
    """A metric of shares or percent. UserError: the values may be either."""
    higher_is_better = _HIGHER_IS_BETTER[kind]
    highest = max(value for _, value in values)
    typical = median(value for _, value in values)
    least_percent = _LEAST_PERCENT if higher_is_better else 1.0
    if not scale and highest <= 1 and higher_is_better:
        scale = "share"
    if not scale and typical > 1 and highest > least_percent:
        scale = "percent"
    if not scale:
        raise UserError(
            f"{name}: is {highest:g} a share or percent? Give --metric {kind}-share or --metric "
            f"{kind}-percent"
        )
    is_share = scale == "share"
    return Metric(
        kind,
        f"points of {kind}",
        higher_is_better=higher_is_better,
        bounds=_SHARE if is_share else (0.0, 100.0),
        factor=100.0 if is_share else 1.0,
        in_points=True,
    )


def _check_direction(name: str, metric: Metric, options: MetricOptions) -> None:
    """Raise a UserError if an option contradicts the direction of a known metric."""
    if options.higher_is_better in (None, metric.higher_is_better):
        return
    usual = "higher" if metric.higher_is_better else "lower"
    flag = "--higher-is-better" if options.higher_is_better else "--lower-is-better"
    raise UserError(
        f"{flag}: {usual} is better for {name}: leave {flag} out, or give --metric with the right "
        "name, such as score"
    )


def _narrowed(metric: Metric, bounds: tuple[float, float]) -> tuple[float, float]:
    """The bounds of --bounds. UserError: the metric has narrower ones."""
    low, high = metric.bounds
    if not low <= bounds[0] < bounds[1] <= high:
        raise UserError(
            f"--bounds {bounds[0]:g},{bounds[1]:g}: {metric.name} is from {low:g} to {high:g}: "
            "give bounds within these"
        )
    return bounds


def _check_bounds(column: str, values: Sequence[Value], metric: Metric) -> None:
    """Raise a UserError for the first value that the metric cannot have."""
    low, high = metric.bounds
    for place, value in values:
        if low <= value <= high:
            continue
        span = f"from {low:g} on" if high == math.inf else f"from {low:g} to {high:g}"
        if low == -math.inf:
            span = f"up to {high:g}"
        kind = " as a share" if metric.factor == 100 else ""
        raise UserError(
            f"{place}, {column}: is {value:g} a typo? {metric.name}{kind} is {span}: correct the "
            "value, or give --metric with the right name"
        )
