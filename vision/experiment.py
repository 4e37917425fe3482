"""One run: a learner on a stream, recorded in a run directory. It resumes after any interruption.

As in `vision.learners.base`, torch is imported inside the functions that use it.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma import environment, processes
from alma.errors import UserError
from alma.files import checkpoint_file, locked, make_directory, temporary_of
from alma.records import Run
from alma.stages import Stage, check_share, stages
from vision import periods, presets
from vision.learners import LEARNERS, Learner, resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vision.data import MegaBatchStream, StageData
    from vision.models import Factory
    from vision.train import Progress

CHECKPOINT = "checkpoint.pt"
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "ALLOC_FAILED", "create a memory")
"""In the messages of torch, C++, cuDNN and oneDNN."""


def run(
    stream: "MegaBatchStream",
    learner: str = "sm",
    out: str | Path = "runs/vision",
    *,
    waiting_time: int = 1,
    replay: bool = False,
    replay_share: float | None = None,
    replay_from: str = "all",
    seed: int = 0,
    preset: str | None = None,
    device: str = "auto",
    save_interval: float = 30.0,
    save_stages: bool = False,
    append: bool = False,
    classes: str = "all",
    command: str | None = None,
    backbone: "Factory | None" = None,
    metric: "Callable[[Tensor, Tensor], float] | None" = None,
    after_stage: Callable[[Stage, Learner], None] | None = None,
    **settings: Any,
) -> Run:
    """Run Algorithm 1 with a learner of `vision.learners.LEARNERS`; returns the run, whose rows are in `out`.

    `replay_share` of every epoch comes from earlier mega-batches, "all" or "recent" ones. `settings` are the
    learner's, such as hidden=64. `preset` sets the defaults of both. A checkpoint is written every
    `save_interval` seconds, with `save_stages` the model of each stage; run.json records `command`. An
    interrupted run resumes, on a CPU bit for bit; a complete one, which has all rows and the checkpoint after
    the last stage, is returned. With `append` it goes on if its stream by date has grown. Errors count images
    of "all" `classes`, or of those "known" to the model. UserError: a bad setting, or `out` has another run.

    `backbone` builds the network in place of `arch`. `metric` of predicted classes and labels (n,) is a score
    in every row. `after_stage` gets each trained stage and the learner, again if the stage trains again.
    """
    from vision.data import StageData

    dataset, target = stream.dataset, device_of(device)
    if (arch := settings.get("arch", "")) and (backbone or arch.startswith(presets.OWN)):
        raise UserError(f"arch {arch}: give arch, or a backbone of your own in its place")
    settings |= {"arch": presets.OWN + _name(backbone)} if backbone else {}
    chosen = resolve(dataset.name, learner, preset, settings, waiting_time)
    stream, own = _checked(stream, chosen, backbone)
    share = presets.replay_share(preset, replay) if replay_share is None else replay_share
    check_share(share, replay)
    presets.check_seed(seed)
    schedule = stages(len(stream), waiting_time, replay, replay_from if share else None)
    config = {"learner": learner, "megabatches": len(stream), "waiting_time": waiting_time, "replay": replay}
    config |= {"replay_share": share} if share else {}
    config |= {"replay_from": replay_from} if share and replay_from != "all" else {}
    config |= {"seed": seed, "dataset": dataset.name, "data": dataset.fingerprint}
    config |= {"scenario": stream.scenario} if stream.scenario else {}
    directory, growing = Path(out), periods.GROWING if stream.periods and append else ()
    if stream.periods:
        periods.check_classes(stream.periods, waiting_time, chosen)
        config |= {"classes": classes} | periods.check_append(directory, stream.periods, append)
    elif stream.partition != seed:
        config["partition"] = stream.partition
    config |= ({"metric": _name(metric)} if metric else {}) | chosen.config() | own

    make_directory(directory)
    with locked(directory):
        seeds = {"partition": stream.partition, "weights and order": seed}
        record = Run.open(directory, config, seeds, growing)
        temporary_of(directory / CHECKPOINT).unlink(missing_ok=True)  # of a kill in the last save
        record.note(images=stream.dataset.preparation)
        if _complete(record, len(schedule)):
            if save_stages and not any(directory.glob("stage_*.pt")):
                raise UserError(f"{directory} is complete without models of its stages: give another --out")
            return record
        if command:
            record.note(command=command)
        with fitting(directory):
            data = StageData(stream, schedule, target, share)
            subject = LEARNERS[learner](dataset.shape, data.classes(0), chosen, seed, target, backbone)
            trainer = _Trainer(subject, stream, data, directory, config, save_interval, save_stages)
            trainer.metric, trainer.after_stage = metric, after_stage
            _play(record, trainer, schedule, chosen.epochs)
    return record


def _play(record: Run, trainer: "_Trainer", schedule: Sequence[Stage], epochs: int) -> None:
    """Train and test the stages that are missing. UserError: rows of completed stages are missing."""
    from tqdm import tqdm

    done = trainer.load()
    if done and schedule[done - 1].last not in (row["t"] for row in record.rows):
        hint = f"delete {CHECKPOINT} to repeat them"
        raise UserError(f"{record.results} lacks rows of completed stages: {hint}")
    words: Any = {"unit": "epoch", "disable": None, "leave": False, "desc": record.directory.name}
    with tqdm(total=len(schedule) * epochs, initial=done * epochs, **words) as trainer.bar:
        # The last checkpoint has the row that follows it, so that a complete run has its model.
        resumed = done, trainer.seconds, lambda row: trainer.save(last_row=json.dumps(row))
        environment.play(record, trainer, schedule, trainer.test, *resumed)


def _complete(record: Run, stages: int) -> bool:
    """Whether the checkpoint is that after the last stage; its row is appended if a kill has come between."""
    from vision.checkpoints import read_checkpoint

    saved = record.directory / CHECKPOINT
    state = read_checkpoint(saved) if saved.exists() else {}
    row = json.loads(state.get("last_row") or "{}")
    if row and row["t"] == len(record.rows):
        record.append(row)
    return bool(row) and row["t"] < len(record.rows) and state["done"] == stages


def _checked(
    stream: "MegaBatchStream", settings: presets.Settings, backbone: "Factory | None"
) -> "tuple[MegaBatchStream, dict[str, str]]":
    """The stream, normalised as the settings choose, and what run.json records of a backbone. UserError: the
    network does not take its images."""
    dataset, own = stream.dataset, {}
    if settings.whole:
        from vision import classifiers

        own = classifiers.check(settings, dataset.shape, dataset.classes, backbone)
    if settings.statistics != "data":
        stream = copy.copy(stream)
        stream.dataset = dataset.normalised_as(settings.statistics)
    return stream, own


def _name(function: Any) -> str:
    """The name of a metric or backbone in run.json and rows."""
    return getattr(function, "__name__", type(function).__name__)


@contextmanager
def fitting(directory: Path) -> Iterator[None]:
    """Turn the errors of a GPU or a process out of memory into a UserError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, RuntimeError) and not any(text in reason for text in _OUT_OF_MEMORY):
            raise
        lower = "lower --batch-size, the sizes of the model, --image-size, or the number of --jobs"
        raise UserError(f"{directory}: out of memory ({reason}): {lower}") from None


def device_of(name: str) -> "torch.device":
    """The device called `name`; "auto" is a GPU if there is one. UserError if it cannot be used."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device {name} cannot be used ({reason}): choose cpu") from None
    return device


class _Trainer:
    """Trains and tests a learner as the `StageLearner` of `alma.environment`, and writes its checkpoints."""

    def __init__(
        self,
        learner: Learner,
        stream: "MegaBatchStream",
        data: "StageData",
        directory: Path,
        config: Mapping[str, Any],
        save_interval: float,
        save_stages: bool,
    ):
        import torch

        self.learner, self.directory, self._data = learner, directory, data
        self.save_interval, self.save_stages = save_interval, save_stages
        self.metric: Callable[[Tensor, Tensor], float] | None = None
        self.after_stage: Callable[[Stage, Learner], None] | None = None
        self._scores: dict[str, float] = {}  # of the metric
        self.bar: Any = None  # of tqdm
        self.done = 0  # completed stages
        self.seconds = 0.0  # spent on the current stage before an interruption
        self._interrupted: Progress | None = None
        self._saved = time.monotonic()
        self._peak, self._on_gpu = 0, learner.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(learner.device)
        self._own_memory = self._on_gpu or processes.reset_peak_memory()
        test = stream.dataset.test
        self._test = stream.dataset.select(test, torch.arange(len(test.labels)), learner.device)
        self._held_out, self._periods = stream.held_out, [period.name for period in stream.periods]
        self._test_periods, self._known_only = config.get("test_periods"), config.get("classes") == "known"
        self._cache: dict[str, Any] = {}  # of `Learner.predict`
        self._raw: dict[str, Any] = {}  # test error, validation and matrix of the weights before averaging
        self._matrix: list[float] = []  # test error on the held-out images of each mega-batch

    def load(self) -> int:
        """Restore the checkpoint if there is one; returns the number of completed stages."""
        from vision.checkpoints import read_checkpoint, reading
        from vision.train import Progress

        path = self.directory / CHECKPOINT
        if path.exists():
            state = read_checkpoint(path, self.learner.device)
            with reading(path):
                self.learner.load(state["learner"])
                self.done, self.seconds, self._peak = state["done"], state["seconds"], state["peak_memory"]
                self._cache, self._raw, self._matrix = state["kept"], state["raw"], state["matrix"]
                self._scores = state["scores"]
                if state["progress"]:
                    self._interrupted = Progress(**state["progress"])
            if state["tested_on"] != len(self._test.labels):  # the stream has grown
                self._cache = {}
                if not self._interrupted:
                    self.test()
        return self.done

    def save(self, progress: "Progress | None" = None, last_row: str = "") -> None:
        """Write the checkpoint, within a stage with its progress."""
        state = {
            "done": self.done,
            "seconds": time.monotonic() - self._began if progress else 0.0,
            "peak_memory": self.peak_memory_bytes,
            "learner": self.learner.state(),
            "progress": progress and vars(progress),
            "kept": self._cache,
            "tested_on": len(self._test.labels),
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
        # A completed stage is saved only here, once its row is on disk. A learner that resumes mid-stage is
        # not saved: the checkpoint would lose its progress.
        if not self._interrupted and self._due():
            self.save()
        self._began = time.monotonic() - self.seconds
        self.seconds = 0.0
        if (classes := self._data.classes(stage.index)) > self.learner.classes:
            self.learner.widen(classes, stage.index)
        flops = self.learner.train(stage.index, self._data, self._interrupted, self.epoch_done)
        self._interrupted = None
        self.done = stage.index + 1
        if self.save_stages:
            self._write(f"stage_{stage.index:03d}.pt", self.learner.state())
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
        """Test error (a fraction) and the FLOPs of measuring it. UserError: the metric is not finite."""
        learner = self.learner
        predicted, flops = learner.predict(self._test, self._cache)
        error, self._matrix = self._errors(predicted)
        if self.metric:
            score = self.metric(predicted.cpu(), self._test.labels.cpu())
            try:
                finite = math.isfinite(score)
            except TypeError:
                finite = False
            if not finite:
                raise UserError(f"metric {_name(self.metric)} is {score}: give a finite number")
            self._scores = {_name(self.metric): float(score)}
        if learner.average:
            raw, matrix = self._errors(learner.classify(learner.model, self._test))
            self._raw = {"error": raw} | ({"matrix": matrix} if matrix else {})
            if self.done:
                self._raw["valid"] = learner.assess(learner.model, self._data.valid(self.done - 1))
        return error, flops

    def _errors(self, predicted: "Tensor") -> tuple[float, list[float]]:
        """The test error, and that on the held-out images of each mega-batch; 1 where no image counts."""
        wrong = (predicted != self._test.labels).double()
        if self._known_only:
            wrong[self._test.labels >= self.learner.classes] = math.nan
        wrong = wrong.cpu()
        tested = sum(map(len, self._held_out[: self._test_periods])) if self._test_periods else len(wrong)
        parts = wrong[:tested], *(wrong[part] for part in self._held_out)
        error, *matrix = (float(part.nanmean().nan_to_num(1.0)) for part in parts)
        return error, matrix

    @property
    def parameters(self) -> int:
        return self.learner.parameters

    @property
    def eval_flops_per_example(self) -> float:
        return self.learner.eval_flops_per_example

    @property
    def peak_memory_bytes(self) -> int:
        """Peak of the tensors on a GPU, or of the process, the time before interruptions included."""
        if not self._on_gpu:
            return max(self._peak, processes.peak_memory())
        import torch

        return max(self._peak, torch.cuda.max_memory_allocated(self.learner.device))

    @property
    def valid(self) -> dict[str, float] | None:
        return self.learner.valid

    @property
    def details(self) -> dict[str, Any]:
        """The learner's details, and "raw": the errors without the average of weights; "memory_of" marks
        a peak memory that covers the whole process; "matrix": errors on each mega-batch's held-out part.
        """
        memory_of = "" if self._own_memory else "process"
        more = {"raw": self._raw, "matrix": self._matrix, "scores": self._scores, "memory_of": memory_of}
        more["matrix_periods"] = self._periods
        return self.learner.details | {name: value for name, value in more.items() if value}
