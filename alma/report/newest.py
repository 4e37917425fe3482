"""Streams that grow: the newest held-out part, and which periods the test set has.

The test set of a stream with periods has the held-out parts of the periods that its first command
found; an append leaves it as it is. So reports begin with the newest held-out part.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alma.report import compare
from alma.report.periods import arrived, period_names, span_of_test_set
from alma.report.results import Result, Rows, matrix
from alma.report.tables import TitledTable

MODELS = ("newest model", "the one before", "oldest tested")
"""Columns of `titled`."""
_NOTE = """\
In brackets: the newest period that the model was trained on. ± is the sample standard deviation \
over n seeds."""
_NEW_DATA = " The newest part can have classes or topics that the test set lacks."


def newest_part(results: Iterable[Result]) -> int:
    """The number of the newest held-out part of these results."""
    return max(arrived(result) for result in results)


@dataclass(frozen=True)
class Model:
    """A model that a stage has trained."""

    t: int
    """At which its stage ended."""
    until: str
    """The newest period that it was trained on."""
    values: tuple[float, ...]
    """The metric on the newest held-out part, per seed; not scaled."""

    @property
    def tested(self) -> bool:
        """Whether all seeds have a value."""
        return all(map(math.isfinite, self.values))


def models_of(result: Result, part: int) -> list[Model]:
    """The models of a configuration on the held-out part number `part`, ascending."""
    names = period_names(result)
    matrices = [matrix(rows) for rows in result.repeats]
    models: dict[int, Model] = {}
    for t, row in result.repeats[0].items():
        if row["stage"] is None or t < 1 or row["stage"] in models:
            continue
        newest = max(row["trained_on"])
        values = []
        for of_seed in matrices:
            cells = of_seed[t]
            values.append(cells[part - 1] if part <= len(cells) else math.nan)
        until = names[newest - 1] if newest <= len(names) else f"mega-batch {newest}"
        models[row["stage"]] = Model(t, until, tuple(values))
    return list(models.values())


def shown_models(models: Sequence[Model]) -> list[Model | None]:
    """The newest model, the one before, and the oldest that was tested; None: there is none."""
    newest_first = models[::-1]
    newest = newest_first[0] if newest_first else None
    before = newest_first[1] if len(newest_first) > 1 else None
    older = [model for model in models[:-2] if model.tested]
    return [newest, before, older[0] if older else None]


def with_periods(results: Iterable[Result]) -> list[Result]:
    """Those with a span of the test set and a trained model."""
    dated = []
    for result in results:
        is_trained = any(row["stage"] is not None for row in result.repeats[0].values())
        if is_trained and span_of_test_set(result):
            dated.append(result)
    return dated


def part_name(results: Sequence[Result], part: int) -> str:
    """The name of a held-out part."""
    names = max((period_names(result) for result in results), key=len)
    return names[part - 1] if part <= len(names) else f"mega-batch {part}"


@dataclass(frozen=True)
class NewestPart:
    """What the models of some configurations lose on the newest held-out part."""

    results: list[Result]
    """Those that have periods and a trained model."""
    part: int
    """Its number."""

    @property
    def name(self) -> str:
        """The name of its period."""
        return part_name(self.results, self.part)

    @property
    def table(self) -> TitledTable:
        """A row per configuration: its newest models, beside the test set."""
        first = self.results[0]
        columns = compare.configurations(self.results)
        columns["n"] = [str(len(result.repeats)) for result in self.results]
        cells_by_model: list[list[str]] = [[], [], []]
        for result in self.results:
            models = shown_models(models_of(result, self.part))
            for cells, model in zip(cells_by_model, models, strict=True):
                cells.append(_cell(result, model))
        for name, cells in zip(MODELS, cells_by_model, strict=True):
            if any(cells):
                columns[name] = cells
        spans = compare.spans_of_test_sets(self.results)
        texts = [span.text for span in spans]
        on_test = [_on_test(result) for result in self.results]
        if len(set(texts)) == 1:
            columns[f"test: {texts[0]}"] = on_test
        else:
            pairs = zip(on_test, texts, strict=True)
            columns["test"] = [f"{value} ({text})" for value, text in pairs]
        note = _NOTE
        if not all(span.whole for span in spans):
            note += _NEW_DATA
        cells_by_row = [list(columns), *map(list, zip(*columns.values(), strict=True))]
        title = f"Test {first.display.name} on {self.name}, the newest held-out part"
        return TitledTable(f"{title}, {first.stream}", cells_by_row, note)

    def record(self) -> dict[str, Any]:
        """For JSON: values as in results.jsonl, means over seeds."""
        configurations = []
        for result in self.results:
            models = []
            for model in models_of(result, self.part):
                value = math.fsum(model.values) / len(model.values)
                models.append({"until": model.until, "value": value})
            span = span_of_test_set(result)
            configurations.append(
                {
                    "label": result.label,
                    "models": models,
                    "test": result.over_seeds(lambda rows: rows[max(rows)]["value"])[0],
                    "test_periods": span.count if span else None,
                }
            )
        return {
            "part": self.name,
            "metric": self.results[0].metric,
            "configurations": configurations,
        }


def newest_part_at(results: Sequence[Result], now: int | None = None) -> NewestPart | None:
    """The newest held-out part of results, or that of mega-batch `now`.

    None if no result has periods and a trained model.
    """
    shown = with_periods(results if now is None else [_until(result, now) for result in results])
    if not shown:
        return None
    part = newest_part(shown)
    return NewestPart(shown, part if now is None else min(now, part))


def _until(result: Result, now: int) -> Result:
    """The result with its rows up to `now`."""
    repeats = []
    for rows in result.repeats:
        repeats.append({t: row for t, row in rows.items() if t <= now})
    return replace(result, repeats=tuple(repeats))


def titled(results: Sequence[Result]) -> TitledTable | None:
    """The table of the newest held-out part; None if no result has periods."""
    of_newest = newest_part_at(results)
    return of_newest.table if of_newest else None


def _cell(result: Result, model: Model | None) -> str:
    """The mean over seeds, and the model's newest period."""
    if model is None:
        return ""
    if not model.tested:
        return f"not tested ({model.until})"
    text = compare.spread_of([result.display.factor * value for value in model.values])
    return f"{text} ({model.until})"


def _on_test(result: Result) -> str:
    """The last value on the test set."""
    return compare.spread(lambda rows: rows[max(rows)]["value"], result)


def on_newest(results: Sequence[Result], part: int) -> list[Result]:
    """The results with the metric on a held-out part as the `value` of their rows.

    NaN where a model was not tested on it. Without those whose newest model was not.
    """
    name = part_name(results, part)
    replaced = []
    for result in results:
        if not all(matrix(rows) for rows in result.repeats):
            continue
        repeats = tuple(_on_part(rows, part) for rows in result.repeats)
        last = [rows[max(rows)]["value"] for rows in repeats]
        if all(map(math.isfinite, last)):
            replaced.append(replace(result, repeats=repeats, part=name))
    return replaced


def _on_part(rows: Rows, part: int) -> Rows:
    """The rows with the metric on a held-out part as `value`."""
    replaced = {}
    for t, row in rows.items():
        cells = row["extra"].get("matrix", ())
        value = cells[part - 1] if part <= len(cells) else math.nan
        replaced[t] = row | {"value": value}
    return replaced


def compared_at(results: Sequence[Result], now: int | None = None) -> list[Result]:
    """The results to compare: on the test set or, if that lacks periods, on the newest part.

    That of mega-batch `now`, if it is given. Results whose newest model was not tested on it are
    left out.
    """
    spans = compare.spans_of_test_sets(results)
    of_newest = newest_part_at(results, now)
    if not of_newest or all(span.whole for span in spans):
        return list(results)
    return on_newest(results, of_newest.part)


def by_model(result: Result, part: int) -> Iterator[tuple[Model, int]]:
    """The tested models with the newest mega-batch that each was trained on."""
    for model in models_of(result, part):
        if model.tested:
            yield model, max(result.repeats[0][model.t]["trained_on"])
