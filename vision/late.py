"""Late evaluations: earlier models of a run by date, tested on the periods that have arrived since.

`alma.evaluations` describes the files.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.evaluations import LateEvaluation, item_losses_file
from alma.records import Run
from vision.stage_trainer import CHECKPOINT, stage_file

if TYPE_CHECKING:
    from vision.held_out import HeldOut
    from vision.learners import Learner

_ADVICE = "delete it, and its model is left out of the tests of later periods"


@dataclass(frozen=True)
class ToTest:
    """Mega-batches on whose held-out images the model of a stage (None: untrained) is not
    tested."""

    stage: int | None
    megabatches: list[int]


@dataclass
class Holes:
    """Models whose files are gone, and the cells of the evaluation matrix that stay empty."""

    directory: Path
    stages: list[int] = field(default_factory=list)
    periods: set[str] = field(default_factory=set)
    cells: int = 0

    def __str__(self) -> str:
        """One line: what is missing, and the remedy."""
        files = ", ".join(stage_file(stage) for stage in self.stages[:3])
        if len(self.stages) > 3:
            files += f", ... {stage_file(self.stages[-1])}"
        periods = ", ".join(sorted(self.periods))
        lost = f"models without a file: {len(self.stages)} ({files})"
        cells = f"cells of the evaluation matrix that stay empty: {self.cells} ({periods})"
        remedy = "restore the files and start alma test, or train in another --out"
        return f"{self.directory}: {lost}; {cells}: {remedy}"


def to_test(run: Run, megabatches: int, newest: int | None = None) -> list[ToTest]:
    """What is not tested yet in a run whose stream has grown to B = `megabatches`.

    That are cells of the evaluation matrix that are missing, and the losses by image of trained
    stages. `newest` is the number of models that are tested, the newest; None: all. The untrained
    one is the oldest.
    """
    measured = _measured(run)
    stages = {row["stage"] for row in run.rows_as_written}
    trained = sorted(stage for stage in stages if stage is not None)
    models: list[int | None] = list(trained)
    if stages:
        models.insert(0, None)
    if newest is not None:
        models = models[max(0, len(models) - newest) :]
    missing = []
    for stage in models:
        cells = []
        for t in range(1, megabatches + 1):
            has_losses = stage is None or item_losses_file(run.directory, stage, t).exists()
            if (stage, t) not in measured or not has_losses:
                cells.append(t)
        if cells:
            missing.append(ToTest(stage, cells))
    return missing


def _measured(run: Run) -> set[tuple[int | None, int]]:
    """Stage and mega-batch of each cell of the evaluation matrix that is on disk."""
    cells = set()
    for row in run.rows:
        for t, value in enumerate(row["extra"].get("matrix", ()), start=1):
            if not math.isnan(value):
                cells.add((row["stage"], t))
    return cells


def evaluate(
    run: Run,
    held_out: "HeldOut",
    new_learner: Callable[[], "Learner"],
    newest: int | None = None,
) -> tuple[list[LateEvaluation], Holes]:
    """Test the models of a run on the periods that have arrived since; returns the new cells, and
    those that stay empty.

    Of each stage the losses by image are written, then the cells: a killed call repeats at most one
    stage. `new_learner` makes the untrained learner. UserError: the file of a model is damaged.
    """
    missing = to_test(run, len(held_out.periods), newest)
    holes = Holes(run.directory)
    cells: list[LateEvaluation] = []
    if not missing:
        return cells, holes
    measured = _measured(run)
    states = ModelFiles(run.directory)
    learner = new_learner()
    caches: dict[int, Any] = {}  # of `Learner.predict`; a model may contain earlier ones
    for untested in missing:
        stage = untested.stage
        new = [t for t in untested.megabatches if (stage, t) not in measured]
        if stage is not None and not states.load(stage, learner):
            if new:
                holes.stages.append(stage)
                holes.cells += len(new)
                holes.periods |= {held_out.periods[t - 1] for t in new}
            continue
        lines = []
        for t in untested.megabatches:
            line = _test(run, held_out, learner, stage, t, caches.setdefault(t, {}))
            if t in new:
                lines.append(line)
        run.append_evaluations(lines)
        cells += lines
    return cells, holes


def _test(
    run: Run,
    held_out: "HeldOut",
    learner: "Learner",
    stage: int | None,
    megabatch: int,
    cache: dict[str, Any],
) -> LateEvaluation:
    """Test a model on the held-out images of a mega-batch, and write its losses by image."""
    from vision.held_out import mean

    examples = held_out.examples(megabatch - 1)
    predicted, _ = learner.predict(examples, cache)
    wrong = held_out.wrong(predicted, learner, megabatch)
    if stage is not None:
        held_out.write_part(run.directory, stage, megabatch, wrong)
    late: LateEvaluation = {
        "stage": stage,
        "megabatch": megabatch,
        "period": held_out.periods[megabatch - 1],
        "value": mean(wrong),
    }
    if learner.average:
        of_weights = learner.classify(learner.model, examples)
        late["raw"] = mean(held_out.wrong(of_weights, learner, megabatch))
    return late


class ModelFiles:
    """The files with the models of a run: one for each stage, or the checkpoint of the last."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._checkpoint: Mapping[str, Any] | None = None

    def load(self, stage: int, learner: "Learner") -> bool:
        """Give `learner` the state that it had after a stage; False: it is in no file."""
        from vision.checkpoints import read_checkpoint, reading

        path = self._directory / stage_file(stage)
        if path.exists():
            state = read_checkpoint(path, learner.device, _ADVICE)
        else:
            path = self._directory / CHECKPOINT
            if self._checkpoint is None:
                self._checkpoint = {}
                if path.exists():
                    self._checkpoint = read_checkpoint(path, learner.device)
            saved = self._checkpoint
            if not saved or saved["progress"] or saved["done"] != stage + 1:
                return False
            state = saved["learner"]
        with reading(path, _ADVICE):
            learner.load(state)
        return True


def stages_with_files(run: Run, missing: Sequence[ToTest]) -> list[ToTest]:
    """Those of the `missing` whose model has a file, the checkpoint perhaps; reads none of them."""
    newest = max((row["stage"] for row in run.rows_as_written if row["t"]), default=None)
    testable = []
    for untested in missing:
        stage = untested.stage
        if stage is None or (run.directory / stage_file(stage)).exists() or stage == newest:
            testable.append(untested)
    return testable
