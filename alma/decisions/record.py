"""The record of one run, as decisions read it: its models, and their losses on held-out parts."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alma.decisions.answer import TrainedModel
from alma.errors import UserError
from alma.files import walk
from alma.records import Run
from alma.report.advice.period import Period
from alma.report.age import all_losses_of, losses_of
from alma.report.age_table import unit
from alma.report.losses import Losses
from alma.report.metric import BY_UNIT, Metric
from alma.report.results import Result
from alma.stages import check_growth

_SHOWN = 8  # runs that an error lists


def find_run(place: Path) -> Run:
    """The run in a folder, or the only one below it. Raises UserError if there is not one run."""
    if not place.is_dir():
        raise UserError(f"{place} is not a folder: give a run directory")
    folders = [Path(folder) for folder, _, files in walk(place) if "run.json" in files]
    if not folders:
        raise UserError(f"no run in {place}: no folder in it has a run.json")
    if place in folders:
        return Run.read(place)
    if len(folders) > 1:
        listed = [str(folder) for folder in sorted(folders)[:_SHOWN]]
        if len(folders) > _SHOWN:
            listed.append(f"{len(folders) - _SHOWN} more")
        problem = f"{place} has {len(folders)} runs, and a decision is about one"
        raise UserError(f"{problem}: give one of {', '.join(listed)}")
    return Run.read(folders[0])


@dataclass(frozen=True)
class Record:
    """The record of a run, up to the last t that its rows reach."""

    run: Run
    result: Result
    losses: Losses | None
    """Of the trained models, in `unit`; None: none is trained, or the run has no held-out parts."""
    losses_by_age: Losses | None
    """Those without models that trained before the cutoff of the model that began the run."""

    @classmethod
    def read(cls, place: Path) -> "Record":
        """Read the record in or below a folder.

        Raises UserError if there is not one run, if it has no rows or is damaged, or if its last
        stage was trained before its waiting time was over.
        """
        run = find_run(place)
        rows = {row["t"]: row for row in run.rows}
        if not rows:
            remedy = f"`alma status {run.directory}` tells how far it is"
            raise UserError(f"{run.directory} has no rows yet, nothing was evaluated: {remedy}")
        result = Result(run.config, (rows,), runs=(run,))
        record = cls(run, result, all_losses_of(result), losses_of(result))
        if record.models:
            newest = record.models[-1].megabatch
            check_growth(run.directory, newest, record.arrived, result.waiting_time)
        return record

    @property
    def arrived(self) -> int:
        """The number of mega-batches of the stream, as far as the record knows."""
        return self.result.megabatches

    @property
    def metric(self) -> Metric:
        """Of the losses by age."""
        return BY_UNIT[self.unit]

    @property
    def unit(self) -> str:
        """Of the losses: "nats a token" or "percentage points"."""
        return unit(self.result)

    @cached_property
    def models(self) -> list[TrainedModel]:
        """The trained models, the oldest first."""
        models: list[TrainedModel] = []
        rows = self.result.repeats[0]
        for t in range(1, self.result.progress + 1):
            stage = rows[t]["stage"]
            if stage is not None and (not models or models[-1].stage != stage):
                models.append(TrainedModel(stage, t, self.period_of(t)))
        return models

    @cached_property
    def _periods(self) -> list[str]:
        """The names of the periods, as far as a model was tested on them."""
        extras: list[dict[str, Any]] = [row["extra"] for row in self.result.repeats[0].values()]
        return max((extra.get("matrix_periods", []) for extra in extras), key=len)

    def period_of(self, t: int) -> str | None:
        """The period of mega-batch t; None if it has no name or was never tested on."""
        if t > len(self._periods):
            return None
        return self._periods[t - 1] or None

    def name(self, t: int) -> str:
        """Mega-batch t in a sentence: "2024-07", or "mega-batch 7"."""
        return self.period_of(t) or f"mega-batch {t}"

    @cached_property
    def period(self) -> Period:
        """The time between two mega-batches. Raises UserError if a period is no date."""
        try:
            return Period.of(self._periods)
        except ValueError as error:
            raise UserError(f"{self.run.results}: {error}: restore the file") from None

    def loss(self, model: TrainedModel, t: int) -> float:
        """The loss of a model on the held-out part of mega-batch t; NaN if it was not tested."""
        if self.losses is None or t > len(self.losses.periods):
            return math.nan
        return self.losses.seeds[0][self.losses.until.index(model.megabatch)][t - 1]

    def is_tested(self, model: TrainedModel, t: int) -> bool:
        """Whether the loss of a model on mega-batch t is in the record."""
        return math.isfinite(self.loss(model, t))
