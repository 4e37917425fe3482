"""Trains and tests a learner stage by stage, and writes its checkpoints.

As in `vision.learners.base`, torch is imported inside the functions that use it.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma import processes
from alma.errors import UserError
from alma.files import checkpoint_file
from alma.stages import Stage
from vision.learners import Learner

if TYPE_CHECKING:
    from torch import Tensor

    from vision.held_out import HeldOut
    from vision.stage_data import StageData
    from vision.train import Progress

    Metric = Callable[[Tensor, Tensor], float]
    """Predicted classes (n,) and labels (n,) -> score."""
AfterStage = Callable[[Stage, Learner], None]

CHECKPOINT = "checkpoint.pt"


def stage_file(stage: int) -> str:
    """Name of the file with the model of a stage."""
    return f"stage_{stage:03d}.pt"


def name_of(function: Any) -> str:
    """The name of a metric or backbone in run.json and rows."""
    return getattr(function, "__name__", type(function).__name__)


class StageTrainer:
    """The `StageLearner` of `alma.environment` for images; it saves a checkpoint every
    `save_interval` seconds, and with `save_stages` the model of each stage."""

    def __init__(
        self,
        learner: Learner,
        held_out: "HeldOut",
        data: "StageData",
        directory: Path,
        save_interval: float,
        save_stages: bool,
        metric: "Metric | None" = None,
        after_stage: AfterStage | None = None,
    ):
        import torch

        self.learner = learner
        self.directory = directory
        self._data = data
        self.save_interval = save_interval
        self.save_stages = save_stages
        self.metric = metric
        self.after_stage = after_stage
        self.bar: Any = None  # tqdm's progress bar
        self.done = 0  # completed stages
        self.seconds = 0.0  # spent on the current stage before an interruption
        self._interrupted: Progress | None = None
        self._saved = time.monotonic()

        self._peak = 0
        self._on_gpu = learner.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(learner.device)
        self._peak_is_of_run = self._on_gpu or processes.reset_peak_memory()

        self._held_out = held_out
        self._caches: dict[int, Any] = {}  # passed to `HeldOut.predict`
        self._raw: dict[str, Any] = {}  # test errors of the weights without averaging
        self._matrix: list[float] = []  # test error on the held-out images of each mega-batch
        self._scores: dict[str, float] = {}  # the user's metric, by its name

    def load(self) -> int:
        """Restore the checkpoint if there is one; returns the number of completed stages."""
        from vision.checkpoints import read_checkpoint, reading

        path = self.directory / CHECKPOINT
        if path.exists():
            state = read_checkpoint(path, self.learner.device)
            with reading(path):
                self._restore(state)
            stream_has_grown = state["tested_on"] != len(self._held_out)
            if stream_has_grown and not self._interrupted:
                self.test()
        return self.done

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote."""
        from vision.train import Progress

        self.learner.load(state["learner"])
        self.done = state["done"]
        self.seconds = state["seconds"]
        self._peak = state["peak_memory"]
        self._caches = self._caches_of(state["kept"])
        self._raw = state["raw"]
        self._matrix = state["matrix"]
        self._scores = state["scores"]
        if state["progress"]:
            self._interrupted = Progress(**state["progress"])

    def _caches_of(self, kept: dict[Any, Any]) -> dict[int, Any]:
        """The caches of a checkpoint; an earlier ALMA wrote one for all test images."""
        if "members" not in kept:
            return kept
        return {} if self._held_out.periods else {0: kept}

    def save(self, progress: "Progress | None" = None, last_row: str = "") -> None:
        """Write the checkpoint; within a stage it includes the stage's progress."""
        state = {
            "done": self.done,
            "seconds": time.monotonic() - self._began if progress else 0.0,
            "peak_memory": self.peak_memory_bytes,
            "learner": self.learner.state(),
            "progress": progress and vars(progress),
            "kept": self._caches,
            "tested_on": len(self._held_out),
            "raw": self._raw,
            "matrix": self._matrix,
            "scores": self._scores,
            "last_row": last_row,
        }
        self._write(CHECKPOINT, state)
        self._saved = time.monotonic()

    def _write(self, name: str, state: dict[str, Any]) -> None:
        import torch

        with checkpoint_file(self.directory / name) as file:
            torch.save(state, file)

    def train(self, stage: Stage) -> dict[str, float]:
        """Train on a stage; returns FLOPs by purpose."""
        # Save the previous stage only now, after its row is on disk. If this stage resumes, save
        # nothing: the new checkpoint would lack the progress within the stage.
        if not self._interrupted and self._due():
            self.save()
        self._began = time.monotonic() - self.seconds
        self.seconds = 0.0
        classes = self._data.classes(stage.index)
        if classes > self.learner.classes:
            self.learner.widen(classes, stage.index)
        flops = self.learner.train(stage.index, self._data, self._interrupted, self.epoch_done)
        self._interrupted = None
        self.done = stage.index + 1
        if self.save_stages:
            self._write(stage_file(stage.index), self.learner.state())
        if self.after_stage:
            self.after_stage(stage, self.learner)
        return flops

    def epoch_done(self, progress: "Callable[[], Progress]") -> None:
        """Advance the progress bar, and write a checkpoint if it is due."""
        self.bar.update()
        if self._due():
            self.save(progress())

    def _due(self) -> bool:
        return time.monotonic() - self._saved >= self.save_interval

    def test(self) -> tuple[float, float]:
        """Test error (a fraction) and the FLOPs of the test.

        In a stream by date, it writes the losses by image. UserError: the metric is not finite.
        """
        from vision.held_out import mean

        learner = self.learner
        held_out = self._held_out
        predicted, flops = held_out.predict(learner, self._caches)
        wrong = held_out.wrong(predicted, learner)
        self._matrix = held_out.matrix(wrong)
        if held_out.periods and self.done:
            held_out.write(self.directory, self.done - 1, wrong)
        if self.metric:
            self._scores = {name_of(self.metric): self._score(self.metric, predicted)}
        if learner.average:
            raw_wrong = held_out.wrong(held_out.classify(learner, learner.model), learner)
            self._raw = {"error": mean(held_out.tested(raw_wrong))}
            raw_matrix = held_out.matrix(raw_wrong)
            if raw_matrix:
                self._raw["matrix"] = raw_matrix
            if self.done:
                valid = self._data.valid(self.done - 1)
                self._raw["valid"] = learner.assess(learner.model, valid)
        return mean(held_out.tested(wrong)), flops

    def _score(self, metric: "Metric", predicted: "Tensor") -> float:
        """The metric of the predicted classes (n,). UserError: it is no finite number."""
        held_out = self._held_out
        # Copies: a metric may edit its arguments, and on a CPU `.cpu()` is none.
        classes = held_out.tested(predicted.cpu()).clone()
        labels = held_out.tested(held_out.labels).clone()
        score = metric(classes, labels)
        try:
            finite = math.isfinite(score)
        except TypeError:
            finite = False
        if not finite:
            raise UserError(f"metric {name_of(metric)} is {score}: give a finite number")
        return float(score)

    @property
    def parameters(self) -> int:
        """Current number of free parameters."""
        return self.learner.parameters

    @property
    def eval_flops_per_example(self) -> float:
        """Current FLOPs of one prediction."""
        return self.learner.eval_flops_per_example

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the tensors on a GPU, or else of the process; covers interrupted parts of
        the run."""
        if not self._on_gpu:
            return max(self._peak, processes.peak_memory())
        import torch

        return max(self._peak, torch.cuda.max_memory_allocated(self.learner.device))

    @property
    def valid(self) -> dict[str, float] | None:
        """Loss and error on the validation examples of the last stage."""
        return self.learner.valid

    @property
    def details(self) -> dict[str, Any]:
        """The learner's details and, unless empty:

        raw: errors without the average of weights;
        matrix: errors on the held-out images of each mega-batch, named by `matrix_periods`;
        scores: of the metric;
        memory_of: "process" if the peak memory includes what the process used before the run.
        """
        extra = {
            "raw": self._raw,
            "matrix": self._matrix,
            "scores": self._scores,
            "memory_of": "" if self._peak_is_of_run else "process",
            "matrix_periods": self._held_out.periods,
        }
        return self.learner.details | {name: value for name, value in extra.items() if value}
