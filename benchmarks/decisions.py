"""How often `alma due` and `alma gate` are right: made-up models, streams and documents.

    python -m benchmarks decisions --count 1000

It takes about 20 minutes of one core. Documents have lognormal lengths with a median of 250 tokens
and a deviation of 1.1 of the logarithm, from 10 to 20,000 tokens (mean 450: web text). Two models
differ by 0.4 nats a token, independently, and by an effect of the document of deviation 0.05 nats a
token; "heavy tails": that is of Student's t with 3 degrees of freedom; "a tenth": a tenth of the
documents gains 0.15, the others lose what makes the mean 0. Images: one model has an error of 20%;
a tenth of the images are wrong for one model alone.

Evaluation matrices are those of `cadence_calibration`: models differ by 0.02 nats, cells by 0.005,
the difficulty of periods by 0.1.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alma.decisions.pairs import Pair, document_gain, image_gain
from alma.decisions.replacement import against, gain_by_scatter
from alma.errors import Parser, UserError
from alma.report.advice.law import Array
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses, MeanOverSeeds, t_interval
from alma.report.metric import NATS_A_TOKEN
from alma.tables import as_text
from benchmarks.cadence_calibration import MONTH, Drift, make_losses

DOCUMENTS = (30, 100, 300, 1000)
IMAGES = (100, 300, 1000, 3000)
MODELS = (5, 8, 12)
GAINS = (-10, -3, -1, 0, 1, 3, 10)
"""Percent of perplexity, or points of error, that the newest model gains."""
KINDS = ("documents", "heavy tails", "a tenth")
_TOKEN = 0.4  # nats by which two models differ on a token
_DOCUMENT = 0.05  # nats a token by which they differ on a document
_DISAGREE = 0.1  # share of the images that one model alone has wrong
_ERROR = 0.2
_RESAMPLES = 999  # of the methods that were tried
_WARM = 8  # models before the months in which `due` is asked


class Shares(NamedTuple):
    """Shares of the answers to one question."""

    yes: float
    no: float

    def text(self) -> str:
        """Such as "5 / 4"."""
        return f"{100 * self.yes:.0f} / {100 * self.no:.0f}"


def documents(kind: str, count: int, random: np.random.Generator) -> Pair:
    """Losses of two models without a difference on average."""
    lengths = random.lognormal(math.log(250), 1.1, count)
    tokens = np.clip(np.round(lengths), 10, 20_000)
    if kind == "documents":
        effects = random.normal(0, _DOCUMENT, count)
    elif kind == "heavy tails":
        effects = _DOCUMENT * random.standard_t(3, count) / math.sqrt(3)
    else:
        effects = np.where(random.random(count) < 0.1, 0.135, -0.015)
    gains = tokens * effects + np.sqrt(tokens) * random.normal(0, _TOKEN, count)
    newest = 3.5 * tokens
    return Pair(np.stack([newest + gains, tokens], 1), np.stack([newest, tokens], 1))


def images(points: float, count: int, random: np.random.Generator) -> Pair:
    """Wrong images of two models, of which the newest gains so many points of error."""
    gained = _DISAGREE / 2 + points / 200
    lost = _DISAGREE / 2 - points / 200
    agreed = 1 - _DISAGREE
    kinds = random.choice(4, count, p=[gained, lost, _ERROR * agreed, (1 - _ERROR) * agreed])
    counts = np.ones(count)
    deployed = np.isin(kinds, (0, 2)).astype(float)
    newest = np.isin(kinds, (1, 2)).astype(float)
    return Pair(np.stack([deployed, counts], 1), np.stack([newest, counts], 1))


def shares_of(intervals: Sequence[MeanOverSeeds]) -> Shares:
    """How often a gain is seen, and a loss, without a margin."""
    answers = [against(interval, 0.0) for interval in intervals]
    return Shares(answers.count("yes") / len(answers), answers.count("no") / len(answers))


def gate_by_documents(kind: str, count: int, cases: int) -> list[Shares]:
    """The answers of `alma gate` at each gain: a gain of all tokens moves the interval alone."""
    random = np.random.default_rng([KINDS.index(kind), count])
    equal = [document_gain([documents(kind, count, random)]) for _ in range(cases)]
    shares = []
    for percent in GAINS:
        gain = math.copysign(math.log1p(abs(percent) / 100), percent)
        moved = []
        for interval in equal:
            moved.append(MeanOverSeeds(*(end + gain for end in interval)))
        shares.append(shares_of(moved))
    return shares


def gate_by_images(count: int, cases: int) -> list[Shares]:
    """The answers of `alma gate` at each gain in points."""
    random = np.random.default_rng(count)
    shares = []
    for points in GAINS:
        intervals = []
        for _ in range(cases):
            intervals.append(image_gain([images(points, count, random)]))
        shares.append(shares_of(intervals))
    return shares


def gate_by_scatter(models: int, cases: int) -> list[Shares]:
    """The answers of `alma gate` without losses of items, at each gain of the newest model."""
    shares = []
    for percent in GAINS:
        gain = math.copysign(math.log1p(abs(percent) / 100), percent)
        random = np.random.default_rng(models)
        intervals = []
        for _ in range(cases):
            values = np.array(make_losses(Drift(""), models, 1, random).seeds[0])
            values[-1] -= gain
            losses = _losses(values)
            difference = float(values[-2, -1] - values[-1, -1])
            intervals.append(gain_by_scatter(losses, difference, MONTH.year))
        shares.append(shares_of(intervals))
    return shares


def _losses(values: Array) -> Losses:
    """An evaluation matrix (models, periods) whose models are of the first periods."""
    models, periods = values.shape
    until = tuple(range(1, models + 1))
    return Losses("", until, tuple(range(1, periods + 1)), (tuple(map(tuple, values.tolist())),))


def intervals_of(pair: Pair, random: np.random.Generator) -> dict[str, tuple[float, float]]:
    """The 90% interval of the gain on documents by each method that was tried."""
    gains = pair.deployed[:, 0] - pair.newest[:, 0]
    tokens = pair.newest[:, 1]
    count = len(tokens)
    value = gains.sum() / tokens.sum()
    correction = math.sqrt(count / (count - 1))
    error = correction * np.linalg.norm(gains - value * tokens) / tokens.sum()
    drawn = random.integers(0, count, (_RESAMPLES, count))
    totals = tokens[drawn].sum(1)
    values = gains[drawn].sum(1) / totals
    residuals = gains[drawn] - values[:, None] * tokens[drawn]
    ratios = (values - value) / (correction * np.linalg.norm(residuals, axis=1) / totals)
    low, high = np.quantile(ratios, (0.05, 0.95))
    half = np.quantile(np.abs(ratios), 0.9) * error
    student = t_interval(value, error, count - 1)
    ours = document_gain([pair])
    return {
        "percentile": tuple(np.quantile(values, (0.05, 0.95))),
        "Student": (student.low, student.high),
        "studentised, equal tails": (value - high * error, value - low * error),
        "studentised, symmetric": (value - half, value + half),
        "alma gate": (ours.low, ours.high),
    }


def coverage(kind: str, count: int, cases: int) -> dict[str, float]:
    """How often the interval of each method holds the true gain, which is 0."""
    random = np.random.default_rng(count)
    held: dict[str, int] = {}
    for _ in range(cases):
        intervals = intervals_of(documents(kind, count, random), random)
        for name, (low, high) in intervals.items():
            held[name] = held.get(name, 0) + int(low <= 0 <= high)
    return {name: number / cases for name, number in held.items()}


class Alarms(NamedTuple):
    """Share of streams in which `alma due` says yes, by months after the last training."""

    first: float
    by_third: float
    by_sixth: float

    def text(self) -> str:
        """Such as "3 / 40 / 80"."""
        return " / ".join(f"{100 * share:.0f}" for share in self)


def due_after_break(jump: float, slope: float, price: float, cases: int) -> Alarms:
    """Alarms in the six months after the last of the first models.

    jump    nats by which the stream breaks in the first of these months
    slope   nats a month of age
    price   of a training; NaN: by unusual losses alone
    """
    months = 6
    kind = Drift("", slope)
    random = np.random.default_rng([round(100 * jump), round(1000 * slope)])
    firsts = []
    for _ in range(cases):
        values = np.array(make_losses(kind, _WARM + months, 1, random).seeds[0])[:_WARM]
        values[:, _WARM:] += jump
        firsts.append(_first_alarm(values, price))
    first = np.array(firsts)
    return Alarms(*(float((first <= month).mean()) for month in (1, 3, 6)))


def _first_alarm(values: Array, price: float) -> float:
    """The first month after the last training in which a training is due; inf: none."""
    for month in range(1, values.shape[1] - _WARM + 1):
        losses = _losses(values[:, : _WARM + month])
        try:
            retraining = Retraining(losses, NATS_A_TOKEN, MONTH, price=price)
        except UserError:
            continue
        if retraining.outlook.excess > 0:
            return month
        if not math.isnan(price) and _pays_now(retraining):
            return month
    return math.inf


def _pays_now(retraining: Retraining) -> bool:
    """Whether the plan trains now, for certain cheaper than never."""
    plan = retraining.plan
    return plan.first == 0 and plan.savings["never"].low > 0


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = Parser(prog="python -m benchmarks decisions", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="cases of a cell")
    count = parser.parse_args(arguments).count
    print("alma gate: yes / no, % of cases; the rest is no evidence")
    print(as_text(list(gates(count))), end="\n\n")
    print("True gains in the 90% interval, % of cases")
    print(as_text(list(coverages(count))), end="\n\n")
    print("alma due: yes within 1 / 3 / 6 months, % of streams")
    print(as_text(list(alarms(max(2, count // 5)))))


def gates(count: int) -> Iterator[list[str]]:
    """A row for each kind and number of items."""
    yield ["gain", *(f"{gain:+d}%" if gain else "0" for gain in GAINS)]
    for kind in KINDS:
        for size in DOCUMENTS:
            shares = gate_by_documents(kind, size, count)
            yield [f"{kind}, {size}", *(share.text() for share in shares)]
    for size in IMAGES:
        shares = gate_by_images(size, count)
        yield [f"images, {size}", *(share.text() for share in shares)]
    for models in MODELS:
        shares = gate_by_scatter(models, max(2, count // 2))
        yield [f"unpaired, {models} models", *(share.text() for share in shares)]


def coverages(count: int) -> Iterator[list[str]]:
    """A row for each kind and number of documents, a column for each method."""
    for i, kind in enumerate(KINDS):
        for j, size in enumerate(DOCUMENTS[:3]):
            shares = coverage(kind, size, count)
            if i == j == 0:
                yield ["interval", *shares]
            yield [f"{kind}, {size}", *(f"{100 * share:.0f}" for share in shares.values())]


def alarms(count: int) -> Iterator[list[str]]:
    """A row for each break, a column for each rule and drift."""
    prices = {"losses alone": math.nan, "--price 0.1": 0.1, "--price 0.3": 0.3}
    yield ["break", "drift a month", *prices]
    for slope in (0.0, 0.03):
        for jump in (0.0, 0.1, 0.3, 0.5, 1.0):
            cells = [due_after_break(jump, slope, price, count).text() for price in prices.values()]
            yield [f"{jump:g}", f"{slope:g}", *cells]
