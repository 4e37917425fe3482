"""One run: a learner on a stream, recorded in a run directory. It resumes after any interruption.

As in `vision.learners.base`, torch is imported inside the functions that use it.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma import environment, processes
from alma.errors import UserError
from alma.files import checkpoint_file, locked, make_directory, temporary_of
from alma.options import flag_of
from alma.records import Run
from alma.schema import AMOUNT, require, whole
from alma.stages import Stage, check_share, stages
from vision import presets
from vision.board import Board
from vision.learners import LEARNERS, Learner, resolve
from vision.presets import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from tqdm import tqdm

    from vision.data import Dataset, MegaBatchStream, StageData
    from vision.train import Progress

CHECKPOINT = "checkpoint.pt"
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "ALLOC_FAILED", "create a memory")
"""In the messages of torch, C++, cuDNN and oneDNN."""
_STATE = {"done": whole(0), "seconds": AMOUNT, "peak_memory": AMOUNT}


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
    tensorboard_logdir: str | Path | None = None,
    command: str | None = None,
    **settings: Any,
) -> Run:
    """Run Algorithm 1 with a learner of `vision.learners.LEARNERS`; returns the run, whose rows are in `out`.

    `replay_share` of every epoch comes from earlier mega-batches, "all" or "recent" ones. `settings` are the
    learner's, such as hidden=64. `preset` sets the defaults of both. A checkpoint is written every
    `save_interval` seconds, with `save_stages` the model of each stage, and curves to `tensorboard_logdir`;
    run.json records `command`. An interrupted run resumes, on a CPU bit for bit; a complete one is returned.
    UserError: a bad setting, or `out` holds another run.
    """
    from vision.data import StageData

    chosen, target = _settings(stream.dataset, learner, preset, settings, waiting_time), device_of(device)
    share = presets.replay_share(preset, replay) if replay_share is None else replay_share
    check_share(share, replay)
    schedule = stages(len(stream), waiting_time, replay, replay_from if share else None)
    config = {"learner": learner, "megabatches": len(stream), "waiting_time": waiting_time, "replay": replay}
    config |= _data_config(stream, share, replay_from, seed) | chosen.config()
    make_directory(Path(out))
    with locked(Path(out)):
        record = Run.open(out, config, {"partition": stream.partition, "weights and order": seed})
        temporary_of(record.directory / CHECKPOINT).unlink(missing_ok=True)  # of a kill in the last save
        if len(record.rows) > len(stream):
            return record
        _check_version(record)
        if command:
            record.note(command=command)
        with _fitting(record.directory, chosen, of := stream.dataset):
            data = StageData(stream, schedule, target, share)
            subject = LEARNERS[learner](of.shape, of.classes, chosen, seed, target)
            logdir = Path(tensorboard_logdir) if tensorboard_logdir else None
            trainer = _Trainer(subject, stream, data, record.directory, save_interval, save_stages, logdir)
            _play(record, trainer, schedule, chosen.epochs)
    return record


def _data_config(stream: "MegaBatchStream", share: float, source: str, seed: int) -> dict[str, Any]:
    """The seed and the data of a run for its config; replay by share, scenario and partition if not usual.

    UserError: NumPy does not take the seed.
    """
    from vision.data import check_seed

    check_seed(seed)
    config: dict[str, Any] = {}
    if share:  # earlier versions validated on all images of all earlier mega-batches
        config |= {"replay_share": share, "replay_validation": "share"}
        config |= {"replay_from": source} if source != "all" else {}
    config |= {"seed": seed, "dataset": stream.dataset.name, "data": stream.dataset.fingerprint}
    config |= {"scenario": stream.scenario} if stream.scenario else {}
    return config | ({"partition": stream.partition} if stream.partition != seed else {})


def _settings(dataset: "Dataset", *arguments: Any) -> Settings:
    """What `resolve` finds. UserError also if a model of torchvision does not take the images, or the weights
    of its file do not fit."""
    chosen = resolve(dataset.name, *arguments)
    if chosen.torchvision:
        from vision import classifiers

        classifiers.check(chosen, dataset.shape, dataset.classes)
    return chosen


def _check_version(record: Run) -> None:
    """UserError: an earlier version, whose numbers are not reproduced, began the run."""
    if record.rows and "valid" not in record.rows[0]["extra"]:
        raise UserError(
            f"{record.directory} was started by an earlier version, whose numbers this one does not "
            "reproduce: choose another --out"
        )


@contextmanager
def _fitting(directory: Path, chosen: Settings, dataset: "Dataset") -> Iterator[None]:
    """Turn the errors of a GPU or a process out of memory into a UserError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, RuntimeError) and not any(text in reason for text in _OUT_OF_MEMORY):
            raise
        sizes = [] if chosen.torchvision else ["hidden"]
        sizes += [name for name in ("members", "experts") if getattr(chosen, name, 1) > 1]
        lower = [f"--batch-size, now {chosen.batch_size}", *map(flag_of, sizes), "--image-size"]
        raise UserError(
            f"{directory}: out of memory ({reason}): lower {', '.join(lower)}, or the number of --jobs"
        ) from None


def _play(record: Run, trainer: "_Trainer", schedule: list[Stage], epochs: int) -> None:
    """Run Algorithm 1 from the checkpoint on. UserError if rows of completed stages are missing."""
    from tqdm import tqdm

    done = trainer.done
    if done > len(schedule):
        raise UserError(
            f"{record.directory / CHECKPOINT} is of a longer run: delete it, and the run starts again"
        )
    if done and schedule[done - 1].last not in (row["t"] for row in record.rows):
        raise UserError(
            f"{record.results} lacks rows of completed stages: delete {CHECKPOINT} to repeat them"
        )
    name, total = record.directory.name, len(schedule) * epochs
    bar = tqdm(desc=name, total=total, initial=done * epochs, unit="epoch", disable=None, leave=False)
    with bar, closing(trainer):
        trainer.bar = bar
        environment.play(record, trainer, schedule, trainer.test, done, trainer.seconds)
        trainer.save()


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
        save_interval: float,
        save_stages: bool,
        logdir: Path | None = None,
    ):
        import torch

        self.learner, self.directory = learner, directory
        self.save_interval, self.save_stages = save_interval, save_stages
        self.bar: tqdm | None = None
        self.done = 0  # completed stages
        self.seconds = 0.0  # spent on the current stage before an interruption
        self._peak = 0
        self._on_gpu = learner.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(learner.device)
        self._own_memory = self._on_gpu or processes.reset_peak_memory()
        self._data = data
        test = stream.dataset.test
        self._test = stream.dataset.select(test, torch.arange(len(test.labels)), learner.device)
        self._cache: dict[str, Any] = {}
        self._raw: dict[str, Any] = {}  # test error, validation and matrix of the weights before averaging
        self._held_out = stream.held_out
        self._matrix: list[float] = []  # test error on the held-out images of each mega-batch
        self._interrupted: Progress | None = None
        self._saved = time.monotonic()
        self._load()
        epoch = self._interrupted.epoch if self._interrupted else 0
        self.board = Board(logdir, learner.settings.epochs, self.done, epoch) if logdir else None

    def train(self, stage: Stage) -> dict[str, float]:
        """Train on a stage; returns FLOPs by purpose."""
        # A completed stage is saved only here, once its row is on disk. A learner that resumes mid-stage is
        # not saved: the checkpoint would lose its progress.
        if not self._interrupted and self._due():
            self.save()
        if self.board:
            self.board.start(stage)
        self._began = time.monotonic() - self.seconds
        self.seconds = 0.0
        flops = self.learner.train(stage.index, self._data, self._interrupted, self)
        self._interrupted = None
        self.done = stage.index + 1
        if self.save_stages:
            self._write(f"stage_{stage.index:03d}.pt", self.learner.state())
        return flops

    def test(self) -> tuple[float, float]:
        """Test error (a fraction) and the FLOPs of measuring it."""
        predicted, flops = self.learner.predict(self._test, self._cache)
        error, self._matrix = self._errors(predicted)
        if self.learner.average:
            raw, matrix = self._errors(self.learner.classify(self.learner.model, self._test))
            self._raw = {"error": raw} | ({"matrix": matrix} if matrix else {})
            if self.done:
                examples = self._data.valid(self.done - 1)
                self._raw["valid"] = self.learner.assess(self.learner.model, examples)
        if self.board:
            valid = {f"valid_{name}": value for name, value in (self.valid or {}).items()}
            raw_error = {"raw_test_error": self._raw["error"]} if self._raw else {}
            shown = {"test_error": error, "parameters": self.parameters, **valid, **self.learner.details}
            self.board.tested(self.done, shown | raw_error)
        return error, flops

    def _errors(self, predicted: "Tensor") -> tuple[float, list[float]]:
        """The test error, and that on the held-out images of each mega-batch."""
        wrong = (predicted != self._test.labels).double().cpu()
        return float(wrong.mean()), [float(wrong[part].mean()) for part in self._held_out]

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
        found = {"raw": self._raw, "matrix": self._matrix, "memory_of": memory_of}
        return self.learner.details | {name: value for name, value in found.items() if value}

    def scored(self, epoch: int, score: "Tensor", lr: float) -> None:
        """Log the mean validation metric of the voters, and the learning rate."""
        if self.board:
            metric = "error" if self.learner.settings.select == "error" else "loss"
            self.board.epoch(epoch, lr=lr, **{f"valid_{metric}": float(score.mean())})

    def epoch_done(self) -> bool:
        """Advance the progress bar; returns whether a checkpoint is due."""
        if self.bar is not None:
            self.bar.update()
        return self._due()

    def save(self, progress: "Progress | None" = None) -> None:
        """Write the checkpoint, within a stage with its progress."""
        if self.board:
            self.board.writer.flush()  # a resumed run then finds what precedes its checkpoint
        state = {
            "done": self.done,
            "seconds": time.monotonic() - self._began if progress else 0.0,
            "peak_memory": self.peak_memory_bytes,
            "learner": self.learner.state(),
            "progress": progress and vars(progress),
            "kept": self._cache,
            "raw": self._raw,
            "matrix": self._matrix,
        }
        self._write(CHECKPOINT, state)
        self._saved = time.monotonic()

    def close(self) -> None:
        """End the log."""
        if self.board:
            self.board.writer.close()

    def _due(self) -> bool:
        return time.monotonic() - self._saved >= self.save_interval

    def _write(self, name: str, state: dict[str, Any]) -> None:
        import torch

        with checkpoint_file(self.directory / name) as file:
            torch.save(state, file)

    def _load(self) -> None:
        from vision.checkpoints import read_checkpoint, reading
        from vision.train import Progress

        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        state = read_checkpoint(path, self.learner.device)
        with reading(path):
            require(state, _STATE, [*_STATE, "kept", "progress"])
            require(state["kept"], {})
            self.learner.load(state["learner"])
            self.done, self._cache, self._raw = state["done"], state["kept"], state.get("raw", {})
            self._matrix = state.get("matrix", [])
            self.seconds, self._peak = state["seconds"], state["peak_memory"]
            if state["progress"]:
                self._interrupted = Progress(**state["progress"])
