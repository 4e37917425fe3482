"""One run: a stream, a learner and a run directory, that can be interrupted at any moment and goes on."""

import pickle
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from alma import environment, processes
from alma.errors import UserError
from alma.files import checkpoint_file, locked, make_directory
from alma.records import Run
from alma.stages import Stage, stages
from vision.data import MegaBatchStream
from vision.learners import LEARNERS, Learner
from vision.presets import of_learner, resolve
from vision.train import Examples, Progress

CHECKPOINT = "checkpoint.pt"


def run(
    stream: MegaBatchStream,
    learner: str = "sm",
    out: str | Path = "runs/vision",
    *,
    waiting_time: int = 1,
    replay: bool = False,
    seed: int = 0,
    preset: str | None = None,
    device: str = "auto",
    save_interval: float = 30.0,
    save_stages: bool = False,
    **settings: Any,
) -> Run:
    """Let `learner` see the whole stream (Algorithm 1); returns the run, whose rows are on disk in `out`.

    `settings` are fields of `presets.Settings`, such as hidden=64 or epochs=20; what is not given is that of
    a preset, "paper", "draft" or "authors", for the data set. A run that was interrupted goes on from its
    last checkpoint, written every `save_interval` seconds, with the same numbers; a complete one is returned
    as it is. `save_stages` also keeps the model of each stage. UserError: settings out of range, or other
    settings than those of the run in `out`.
    """
    chosen = resolve(stream.dataset.name, learner, preset, settings, waiting_time)
    place = device_of(device)
    schedule = stages(len(stream), waiting_time, replay)
    config = {
        "learner": learner,
        "megabatches": len(stream),
        "waiting_time": waiting_time,
        "replay": replay,
        "seed": seed,
        "dataset": stream.dataset.name,
        "data": stream.dataset.fingerprint,
        **of_learner(chosen, learner),
    }
    if stream.partition != seed:
        config["partition"] = stream.partition
    make_directory(Path(out))
    with locked(Path(out)):
        record = Run.open(out, config, {"partition": stream.partition, "weights and order": seed})
        rows = record.rows
        if len(rows) <= len(stream):
            if rows and "valid" not in rows[0]["extra"]:
                raise UserError(
                    f"{record.directory} was begun by an earlier version, whose numbers this one does not "
                    "repeat: start it again in another --out"
                )
            reset = reset_peak_memory(place)
            subject = LEARNERS[learner](stream.dataset.shape, stream.dataset.classes, chosen, seed, place)
            player = _Player(subject, stream, schedule, record.directory, save_interval, save_stages, reset)
            _play(record, player, schedule, chosen.epochs)
    return record


def _play(record: Run, player: "_Player", schedule: list[Stage], epochs: int) -> None:
    """Go through the stream, from where the checkpoint is."""
    if player.done and schedule[player.done - 1].last not in (row["t"] for row in record.rows):
        raise UserError(
            f"{record.results} lacks rows that {CHECKPOINT} has: delete the checkpoint to repeat them"
        )
    with tqdm(
        total=len(schedule) * epochs,
        initial=player.done * epochs,
        unit="epoch",
        disable=None,
        desc=record.directory.name,
        leave=False,
    ) as bar:
        player.bar = bar
        environment.play(record, player, schedule, player.test, player.done, player.seconds)
    player.save()


def device_of(name: str) -> torch.device:
    """The device of a name, "auto" for a GPU if there is one; UserError for one that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device {name} cannot be used ({reason}): choose cpu") from None
    return device


def reset_peak_memory(device: torch.device) -> bool:
    """Have `peak_memory` count from now on; whether that can be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return processes.reset_peak_memory()


def peak_memory(device: torch.device) -> int:
    """Most memory in use at a time, bytes: on a GPU of its tensors, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return processes.peak_memory()


class _Player:
    """A learner as the environment sees it: fed with its stages, checkpointed, tested."""

    def __init__(
        self,
        learner: Learner,
        stream: MegaBatchStream,
        schedule: list[Stage],
        directory: Path,
        save_interval: float,
        save_stages: bool,
        own_memory: bool,
    ):
        self.learner, self.directory = learner, directory
        self.save_interval, self.save_stages = save_interval, save_stages
        self.bar: tqdm | None = None
        self.done = 0  # stages
        self.seconds = 0.0  # spent on the next one before an interruption
        self._own_memory, self._peak = own_memory, 0
        self._data = _Data(stream, schedule, learner.device)
        self._test = stream.dataset.examples(stream.dataset.test, learner.device)
        self._kept: dict[str, Any] = {}
        self._interrupted: Progress | None = None
        self._saved = time.monotonic()
        self._load()

    def train(self, stage: Stage) -> dict[str, float]:
        """Train on a stage, with checkpoints."""
        # Not earlier: a checkpoint may say that a stage is done when its row is on disk. And not of a learner
        # in the middle of a stage, which is what it resumes.
        if not self._interrupted and self._due():
            self.save()
        self._began = time.monotonic() - self.seconds
        self.seconds = 0.0
        flops = self.learner.train(stage.index, self._data, self._interrupted, self)
        self._interrupted = None
        self.done = stage.index + 1
        if self.save_stages:
            self._write(f"stage_{stage.index:03d}.pt", self.learner.state())
        return flops

    def test(self) -> tuple[float, float]:
        """Test error and the FLOPs of finding it."""
        predicted, flops = self.learner.predict(self._test.images, self._kept)
        return float((predicted != self._test.labels).double().mean()), flops

    @property
    def parameters(self) -> int:
        """The learner's."""
        return self.learner.parameters

    @property
    def eval_flops_per_example(self) -> float:
        """The learner's."""
        return self.learner.eval_flops_per_example

    @property
    def peak_memory_bytes(self) -> int:
        """Of this run, before an interruption too."""
        return max(self._peak, peak_memory(self.learner.device))

    @property
    def valid(self) -> dict[str, float] | None:
        """The learner's."""
        return self.learner.valid

    @property
    def details(self) -> dict[str, Any]:
        """The learner's; `memory_of` "process" where its peak is not of this run alone."""
        return self.learner.details | ({} if self._own_memory else {"memory_of": "process"})

    def epoch_done(self) -> bool:
        """Move the progress bar; is a checkpoint due?"""
        if self.bar is not None:
            self.bar.update()
        return self._due()

    def save(self, progress: Progress | None = None) -> None:
        """Write the checkpoint: stages done, the learner, and how far it is in the next stage."""
        state = {
            "done": self.done,
            "seconds": time.monotonic() - self._began if progress else 0.0,
            "peak_memory": self.peak_memory_bytes,
            "learner": self.learner.state(),
            "progress": progress and vars(progress),
            "kept": self._kept,
        }
        self._write(CHECKPOINT, state)
        self._saved = time.monotonic()

    def _due(self) -> bool:
        return time.monotonic() - self._saved >= self.save_interval

    def _write(self, name: str, state: dict[str, Any]) -> None:
        with checkpoint_file(self.directory / name) as file:
            torch.save(state, file)

    def _load(self) -> None:
        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        state = read_checkpoint(path, self.learner.device)
        self.learner.load(state["learner"])
        self.done, self._kept = state["done"], state["kept"]
        self.seconds, self._peak = state["seconds"], state["peak_memory"]
        if state["progress"]:
            self._interrupted = Progress(**state["progress"])


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What `torch.save` wrote, tensors and plain values only; UserError for a truncated or foreign file."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is damaged ({reason}): delete it, and the run starts again") from None


class _Data:
    """The examples of a stage, gathered and normalised when it is asked for."""

    def __init__(self, stream: MegaBatchStream, schedule: list[Stage], device: torch.device):
        self._stream, self._schedule, self._device = stream, schedule, device
        self.black = stream.dataset.black.to(device)

    def train(self, index: int) -> Examples:
        """Training examples of a stage."""
        return self._examples(index, 0)

    def valid(self, index: int) -> Examples:
        """Validation examples of a stage."""
        return self._examples(index, 1)

    def _examples(self, index: int, part: int) -> Examples:
        stream, stage = self._stream, self._schedule[index]
        return stream.dataset.examples(stream.images(stream.indices(stage.train_on)[part]), self._device)
