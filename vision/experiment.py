"""One run: a learner on a stream, recorded in a run directory. It resumes after any interruption.

As in `vision.learners.base`, torch is imported inside the functions that use it.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma import environment, tf32
from alma.errors import UserError
from alma.files import locked, make_directory, temporary_of
from alma.records import TRAINED_MEGABATCHES, Run
from alma.stages import Stage, check_share, stages
from vision import copies, late, periods, presets
from vision.learners import LEARNERS, Learner, resolve
from vision.presets import Settings
from vision.stage_trainer import CHECKPOINT, StageTrainer, name_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vision.data import MegaBatchStream
    from vision.held_out import HeldOut
    from vision.models import Factory
    from vision.stage_trainer import AfterStage, Metric

_OUT_OF_MEMORY = (
    "out of memory",
    "allocate memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "create a memory",
)
"""Phrases of torch, C++, cuDNN and oneDNN in errors for lack of memory."""


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
    save_stages: bool | None = None,
    append: bool = False,
    test_past: int | None = None,
    only_test: bool = False,
    classes: str = "all",
    command: str | None = None,
    backbone: "Factory | None" = None,
    metric: "Callable[[Tensor, Tensor], float] | None" = None,
    after_stage: Callable[[Stage, Learner], None] | None = None,
    **settings: Any,
) -> Run:
    """Run Algorithm 1 with a learner of `vision.learners.LEARNERS`; returns the run, with its rows.

    `replay_share` of every epoch comes from earlier mega-batches, `replay_from` "all" of them or
    the "recent" ones. `settings` are the learner's, such as hidden=64; `preset` sets the defaults
    of both. Test errors count the images of "all" `classes`, or only of those "known" to the model.

    A checkpoint is written to `out` every `save_interval` seconds, and with `save_stages` (default:
    in a stream by date) the model of each stage; run.json records `command`. An interrupted run
    resumes, on a CPU bit for bit. A complete run is returned as it is.

    With `append`, a run continues when its stream by date has grown: first the models of earlier
    stages, of the newest `test_past` ones if given, are tested on the periods that have arrived.
    With `only_test` nothing is trained.

    `backbone` builds the network in place of `arch`. `metric` maps predicted classes and labels
    (n,) to a score in every row. `after_stage` is called with each trained stage and the learner,
    again if the stage trains again.

    UserError: a bad setting, `out` has another run, or the stream has one class or equal images.
    """
    request = ImageRequest(
        stream=stream,
        learner=learner,
        out=Path(out),
        waiting_time=waiting_time,
        replay=replay,
        replay_share=replay_share,
        replay_from=replay_from,
        seed=seed,
        preset=preset,
        device=device,
        save_interval=save_interval,
        save_stages=save_stages,
        append=append,
        test_past=test_past,
        only_test=only_test,
        classes=classes,
        command=command,
        backbone=backbone,
        metric=metric,
        after_stage=after_stage,
        settings=settings,
    )
    return execute(request)


@dataclass(frozen=True)
class ImageRequest:
    """A call of `run`, whose docstring explains each field."""

    stream: "MegaBatchStream"
    learner: str
    out: Path
    waiting_time: int
    replay: bool
    replay_share: float | None
    replay_from: str
    seed: int
    preset: str | None
    device: str
    save_interval: float
    save_stages: bool | None
    append: bool
    test_past: int | None
    only_test: bool
    classes: str
    command: str | None
    backbone: "Factory | None"
    metric: "Metric | None"
    after_stage: "AfterStage | None"
    settings: dict[str, Any]

    @property
    def keeps_stages(self) -> bool:
        """Whether the model of each stage is saved: by default in a stream by date, where it is
        tested on later periods."""
        if self.save_stages is None:
            return bool(self.stream.periods)
        return self.save_stages

    def share(self) -> float:
        """The share of replay, of the preset if none is given. UserError: it does not fit."""
        share = self.replay_share
        if share is None:
            share = presets.replay_share(self.preset, self.replay)
        check_share(share, self.replay)
        return share

    def learner_settings(self) -> Settings:
        """The settings of the learner. UserError: one is unknown or out of range."""
        chosen = dict(self.settings)
        arch = chosen.get("arch", "")
        if arch and (self.backbone or arch.startswith(presets.OWN)):
            raise UserError(f"arch {arch}: give arch, or a backbone of your own in its place")
        if self.backbone:
            chosen["arch"] = presets.OWN + name_of(self.backbone)
        dataset = self.stream.dataset.name
        return resolve(dataset, self.learner, self.preset, chosen, self.waiting_time)


def execute(request: ImageRequest) -> Run:
    """Run a request, or resume it; returns the run."""
    from vision.held_out import HeldOut
    from vision.stage_data import StageData

    copies.check_stream(request.stream)
    target = device_of(request.device)
    settings = request.learner_settings()
    network = _checked_network(request, settings)
    share = request.share()
    presets.check_seed(request.seed)
    replay_from = request.replay_from if share else None
    schedule = stages(len(request.stream), request.waiting_time, request.replay, replay_from)
    config = _config(request, settings, share) | network

    directory = request.out
    make_directory(directory)
    with locked(directory):
        seeds = {"partition": request.stream.partition, "weights and order": request.seed}
        may_grow = request.append or request.only_test
        growing = periods.GROWING if request.stream.periods and may_grow else ()
        periods.note_trained(directory)
        record = Run.open(directory, config, seeds, growing)
        # Left behind if the process was killed while it saved the last checkpoint.
        temporary_of(directory / CHECKPOINT).unlink(missing_ok=True)
        stream = _normalised(request.stream, settings)
        record.note(images=stream.dataset.preparation)
        is_complete = _complete(record, len(schedule))
        _choose_precision(record, target, settings)
        with fitting(directory):
            held_out = HeldOut(stream, target, config)
            data = StageData(stream, schedule, target, share)
            new_learner = partial(_learner, request, stream, settings, data.classes(0), target)
            if stream.periods:
                test_arrivals(record, held_out, new_learner, request.test_past)
            if request.only_test:
                return record
            if is_complete:
                if request.save_stages and not any(directory.glob("stage_*.pt")):
                    missing = "is complete without models of its stages"
                    raise UserError(f"{directory} {missing}: give another --out")
                return record
            if request.command:
                record.note(command=request.command)
            if stream.periods:
                record.note(**{TRAINED_MEGABATCHES: len(stream)})
            trainer = StageTrainer(
                new_learner(),
                held_out,
                data,
                directory,
                request.save_interval,
                request.keeps_stages,
                request.metric,
                request.after_stage,
            )
            _play(record, trainer, schedule, settings.epochs)
    return record


def _choose_precision(record: Run, device: "torch.device", settings: Settings) -> None:
    """Compute products of fp32 in TF32 on a GPU that has it, in training and tests.

    Not with --no-tf32, nor with --amp, whose training has no products of fp32. run.json says if
    it is used.
    """
    is_supported = tf32.is_supported(device)
    is_used = is_supported and not settings.no_tf32 and settings.amp == "off"
    if is_supported:
        tf32.allow(is_used)
    if is_used:
        record.note(tf32=True)
        print(f"{record.directory}: products of fp32 in TF32 (--no-tf32: in full)", flush=True)
    elif record.info.get("tf32"):
        print(f"{record.directory}: products in full: no TF32 here; the run had it", flush=True)


def test_arrivals(
    record: Run, held_out: "HeldOut", new_learner: "Callable[[], Learner]", newest: int | None
) -> None:
    """Test the models that are there on the periods that have arrived, before any training."""
    cells, holes = late.evaluate(record, held_out, new_learner, newest)
    if cells:
        periods = sorted({cell["period"] for cell in cells})
        models = len({cell["stage"] for cell in cells})
        counts = f"{models} earlier models tested on {', '.join(periods)}"
        print(f"{record.directory}: {counts}", flush=True)
    if holes.cells:
        print(holes, flush=True)


def _config(request: ImageRequest, settings: Settings, share: float) -> dict[str, Any]:
    """The settings that run.json records. UserError: the periods do not fit the learner or the
    run."""
    stream = request.stream
    config: dict[str, Any] = {
        "learner": request.learner,
        "megabatches": len(stream),
        "waiting_time": request.waiting_time,
        "replay": request.replay,
    }
    if share:
        config["replay_share"] = share
        if request.replay_from != "all":
            config["replay_from"] = request.replay_from
    config["seed"] = request.seed
    config["dataset"] = stream.dataset.name
    config["data"] = stream.dataset.fingerprint
    if stream.scenario:
        config["scenario"] = stream.scenario
    if stream.periods:
        periods.check_classes(stream.periods, request.waiting_time, settings)
        config["classes"] = request.classes
        config |= periods.check_append(
            request.out, stream.periods, request.append, request.only_test
        )
    elif stream.partition != request.seed:
        config["partition"] = stream.partition
    if request.metric:
        config["metric"] = name_of(request.metric)
    return config | settings.config()


def _learner(
    request: ImageRequest,
    stream: "MegaBatchStream",
    settings: Settings,
    classes: int,
    device: "torch.device",
) -> Learner:
    """The untrained learner of a request, with the classes of its first stage."""
    kind = LEARNERS[request.learner]
    shape = stream.dataset.shape
    return kind(shape, classes, settings, request.seed, device, request.backbone)


def _play(record: Run, trainer: StageTrainer, schedule: Sequence[Stage], epochs: int) -> None:
    """Train and test the missing stages. UserError: rows of completed stages are missing."""
    from tqdm import tqdm

    done = trainer.load()
    if done and schedule[done - 1].last not in (row["t"] for row in record.rows):
        remedy = f"delete {CHECKPOINT} to repeat them"
        raise UserError(f"{record.results} lacks rows of completed stages: {remedy}")

    def save_last(row: Mapping[str, Any]) -> None:
        # The checkpoint is written before the last row and holds that row: so a complete run always
        # has its model, and a killed one loses no row.
        trainer.save(last_row=json.dumps(row))

    with tqdm(
        total=len(schedule) * epochs,
        initial=done * epochs,
        unit="epoch",
        disable=None,
        leave=False,
        desc=record.directory.name,
    ) as trainer.bar:
        environment.play(record, trainer, schedule, trainer.test, done, trainer.seconds, save_last)


def _complete(record: Run, stage_count: int) -> bool:
    """Whether the run has the checkpoint and the row of its last stage.

    If the process was killed between the two, the row is appended from the checkpoint.
    """
    from vision.checkpoints import read_checkpoint

    saved = record.directory / CHECKPOINT
    state = read_checkpoint(saved) if saved.exists() else {}
    row = json.loads(state.get("last_row") or "{}")
    if not row:
        return False
    if row["t"] == len(record.rows):
        record.append(row)
    return row["t"] < len(record.rows) and state["done"] == stage_count


def _checked_network(request: ImageRequest, settings: Settings) -> dict[str, str]:
    """Check the run's network against its images, and return what run.json records of a backbone.

    Raises UserError if the network does not take the images.
    """
    if not settings.whole:
        return {}
    from vision import classifiers

    dataset = request.stream.dataset
    return classifiers.check(settings, dataset.shape, dataset.classes, request.backbone)


def _normalised(stream: "MegaBatchStream", settings: Settings) -> "MegaBatchStream":
    """The stream, normalised by the statistics of the settings."""
    if settings.statistics == "data":
        return stream
    stream = copy.copy(stream)
    stream.dataset = stream.dataset.normalised_as(settings.statistics)
    return stream


@contextmanager
def fitting(directory: Path) -> Iterator[None]:
    """Turn a lack of GPU or host memory into a UserError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        of_memory = any(phrase in reason for phrase in _OUT_OF_MEMORY)
        if isinstance(error, RuntimeError) and not of_memory:
            raise
        lower = "lower --batch-size, the model's sizes, --image-size, or --jobs"
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
