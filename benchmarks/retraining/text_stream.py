"""Which area does a commit change? Text classification by month on the histories of git and curl.

The area is the part of the subject before its colon; the rest of the message is the input. Models
are logistic regressions on hashed words and pairs of words of the 24 newest months, for the 30 most
frequent areas in them; a message of another area counts as an error. Every fifth message is held
out for tests.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.inputs import DatedText, Inputs, read_dated, read_history

WINDOW = 24
_AREAS = 30
_LEAST_HELD_OUT = 8
"""Held-out messages of a month; later months with fewer end the stream."""


def git_areas(inputs: Inputs) -> tuple[list[str], Array]:
    """Months from 2006 on, and error in percent of each model on each month, (models, months)."""
    return _errors_by_month(read_dated(inputs.data / "dated" / "git_log.jsonl.zst"), "2006-01")


def curl_areas(inputs: Inputs) -> tuple[list[str], Array]:
    """As `git_areas`, from April 2010 on: before, few subjects of curl name an area.

    ValueError: there is no history.
    """
    if inputs.curl is None:
        raise ValueError("no history of curl")
    return _errors_by_month(read_history(inputs.curl), "2010-04")


def _errors_by_month(documents: Iterable[DatedText], first: str) -> tuple[list[str], Array]:
    """Months from the `first` on, and error in percent, (models, months)."""
    months, areas, messages = _labelled(documents, first)
    names = sorted(set(months))
    counts = Counter(months)
    while counts[names[-1]] < 5 * _LEAST_HELD_OUT:
        names.pop()
    index_of_month = {name: index for index, name in enumerate(names)}
    month = np.array([index_of_month.get(name, -1) for name in months])
    area = np.array(areas)
    inputs = _hashed(messages)
    held_out = np.arange(len(month)) % 5 == 0
    errors = np.empty((len(names), len(names)))
    for until in range(len(names)):
        window = (month > until - WINDOW) & (month <= until) & (month >= 0) & ~held_out
        model = _fitted(inputs[window], area[window])
        is_wrong = model.predict(inputs[held_out]) != area[held_out]
        for at in range(len(names)):
            errors[until, at] = 100 * is_wrong[month[held_out] == at].mean()
    return names, errors


def _labelled(documents: Iterable[DatedText], first: str) -> tuple[list[str], list[str], list[str]]:
    """Month, area and message without it, of commits whose subject names an area."""
    months = []
    areas = []
    messages = []
    for document in documents:
        area, colon, message = document.text.partition(":")
        if document.date >= first and colon and 0 < len(area) <= 30 and "\n" not in area:
            months.append(document.date[:7])
            areas.append(area.strip().lower())
            messages.append(message[:1000])
    return months, areas, messages


def _hashed(messages: list[str]) -> Any:
    """Hashed words and pairs of words, a sparse matrix (messages, 2^16)."""
    from sklearn.feature_extraction.text import HashingVectorizer  # optional

    return HashingVectorizer(n_features=2**16, ngram_range=(1, 2)).transform(messages)


def _fitted(inputs: Any, areas: Array) -> Any:
    """A logistic regression for the most frequent areas."""
    from sklearn.linear_model import SGDClassifier  # optional

    frequent = [area for area, _ in Counter(areas.tolist()).most_common(_AREAS)]
    used = np.isin(areas, frequent)
    model = SGDClassifier(loss="log_loss", alpha=1e-5, max_iter=5, tol=None, random_state=0)
    return model.fit(inputs[used], areas[used])
