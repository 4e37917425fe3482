"""Why a record has no answer to how often to retrain: too few cells of age above 0."""

import math
from dataclasses import dataclass
from typing import Any

from alma.report.losses import LEAST_CELLS, Losses

NEEDS = (
    "How often to retrain takes three models, each tested on the mega-batches after it: "
    f"{LEAST_CELLS} cells of age above 0 or more, of several models and mega-batches."
)


@dataclass(frozen=True)
class Shortage:
    """A record with too few cells for the law of staleness."""

    label: str
    """Of the configuration."""
    run: str
    """Directory of its first run."""
    models: int
    """Trained by now."""
    cells: int
    """Of age above 0, that all seeds have."""
    possible: int
    """Cells of age above 0 of these models on the periods that have arrived."""

    @property
    def text(self) -> str:
        """How many cells there are, and what adds some."""
        text = f"No answer: {self.cells} of {self.possible} cells of age above 0 of {self.label}"
        if self.cells < self.possible:
            remedy = f"`alma test {self.run}` tests its earlier models on what came after them"
            return f"{text} were tested; {remedy}. {NEEDS}"
        models = "model" if self.models == 1 else "models"
        remedy = "each further mega-batch adds some, once it has arrived"
        return f"{text} were tested, with {self.models} {models}; {remedy}. {NEEDS}"

    @property
    def plain(self) -> str:
        """The same for readers who train no models."""
        tests = f"{self.cells} of {self.possible} tests of a model on later data were made"
        if self.cells < self.possible:
            return f"No answer yet: {tests}. An answer takes {LEAST_CELLS} or more."
        return (
            f"No answer yet: an answer takes {LEAST_CELLS} tests of models on later data or more."
        )

    @property
    def would_change(self) -> str:
        """What would give an answer."""
        if self.cells < self.possible:
            return f"`alma test {self.run}` makes the missing tests of models on later data."
        return "Data of further periods would tell how often to retrain."

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "label": self.label,
            "cells_of_age_above_0": self.cells,
            "possible": self.possible,
            "needed": LEAST_CELLS,
            "remedy": f"alma test {self.run}" if self.cells < self.possible else None,
            "text": self.text,
        }


def shortage_of(losses: Losses, run: str) -> Shortage:
    """What the losses of a configuration lack."""
    cells = 0
    possible = 0
    for i, until in enumerate(losses.until):
        for j, period in enumerate(losses.periods):
            if period > until:
                possible += 1
                cells += all(math.isfinite(seed[i][j]) for seed in losses.seeds)
    return Shortage(losses.label, run, len(losses.until), cells, possible)
