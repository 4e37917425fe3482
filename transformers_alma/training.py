"""Train one stage by transformers.Trainer; a training that was killed resumes where it was."""

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME

from alma import averages
from alma.errors import UserError
from alma.files import fsync_directory, write_json_atomic, writing_checkpoint
from alma.hub_files import TOKENIZER, matching
from alma.schema import AMOUNT, COUNT, parse_json, require
from alma.trainer import StageTask, TextPart
from transformers_alma import models, processes
from transformers_alma.arguments import Arguments
from transformers_alma.blocks import Layout, PartBlocks, StageBlocks
from transformers_alma.weight_average import MovingAverage

MODEL = "weights"  # folder of the trained model, the stage's checkpoint
_WHOLE = "alma_seconds.json"
"""File that a checkpoint of the Trainer gets last: the seconds of the training so far."""
_ENDED = "alma_training.json"
"""File in MODEL with the costs of the training; it goes with the folder's rename."""
_COSTS = {"updates": COUNT, "tokens": COUNT, "seconds": AMOUNT, "parameters": COUNT}
_MOST_LOG_INTERVAL = 100
_LINES_OF_A_STAGE = 20
_SIGNAL_SECONDS = 1
"""A signal to all processes may end a data worker, an error, before it reaches this process."""
STOPPED = 75  # exit code after a signal: run the same command again


class TrainingSteps(TrainerCallback):
    """The weight average, lines for `alma status`, whole checkpoints, and a stop at a signal."""

    average: MovingAverage | None = None

    def __init__(self, task: StageTask, kept: int, seconds: float) -> None:
        """kept: number of checkpoints (--save_total_limit). seconds: of earlier starts."""
        self.task = task
        self.kept = kept
        self.is_stopping = processes.StopVote()
        self.began = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        """Of the training, restarts included, but for what a killed start did not save."""
        return time.monotonic() - self.began

    def on_step_end(self, args, state, control, **kwargs):
        """Take the weights into the average; save and stop after a signal."""
        if self.average:
            self.average.step(state.global_step)
        if self.is_stopping():
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        """Complete a checkpoint, without whose last file it would not be used; remove older ones.

        The Trainer would remove them before the new one is complete, and orders them by their time.
        """
        processes.wait_for_all()  # until each has written its state of random numbers
        if not processes.is_first():
            return
        folder = Path(self.task.out)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        with _writing(checkpoint):
            if self.average:
                self.average.save(checkpoint)
            _sync(checkpoint)
            write_json_atomic(checkpoint / _WHOLE, {"seconds": self.seconds})
        for older in whole_checkpoints(folder)[: -self.kept]:
            shutil.rmtree(older)

    def on_log(self, args, state, control, **kwargs):
        """Print the loss for `alma status`."""
        if state.is_world_process_zero and "loss" in kwargs["logs"]:
            self.task.progress(state.global_step, kwargs["logs"]["loss"])


class ResumedTrainer(Trainer):
    """The Trainer, with one line for a full disk."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Nothing but shares of FSDP: the model has been read from the checkpoint.

        The Trainer would leave out, without a word, weights that have other names in files than in
        memory, such as the last layer of GPT-NeoX.
        """
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, model, trial):
        with _writing(Path(self.args.output_dir or ".", f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)


def train(task: StageTask, arguments: Arguments) -> None:
    """Train the stage of a task, then write its answer.

    Exits with code 75 after a signal. UserError: the model is damaged, a mega-batch too short, or
    the disk full.
    """
    folder = Path(task.out)
    training = _training_arguments(task, arguments)  # meets the other processes
    if not processes.of_first((folder / MODEL / _ENDED).is_file):
        _train(task, arguments, training, folder)
    processes.leave()
    if not processes.is_first():
        return
    for checkpoint in folder.glob("checkpoint-*"):  # states of the optimizer, of no more use
        shutil.rmtree(checkpoint)
    costs = parse_json((folder / MODEL / _ENDED).read_bytes())
    require(costs, _COSTS, _COSTS)
    task.finish(checkpoint=MODEL, peak_memory_bytes=_peak_memory(), **costs)


def _training_arguments(task: StageTask, arguments: Arguments) -> TrainingArguments:
    """The arguments of the Trainer. UserError: flags that contradict each other or the machine."""
    updates = task.budget["updates"]
    settings: dict[str, Any] = {"output_dir": task.out, "max_steps": updates}
    settings["save_total_limit"] = None  # TrainingSteps removes older ones
    if arguments.training["logging_steps"] == _default_of("logging_steps"):
        settings["logging_steps"] = min(_MOST_LOG_INTERVAL, max(1, updates // _LINES_OF_A_STAGE))
    if not arguments.has_several_processes:
        settings["fsdp"] = None  # nothing to share
    return arguments.training_arguments(seed=task.seeds[0], **settings)


def _train(
    task: StageTask, arguments: Arguments, training: TrainingArguments, folder: Path
) -> None:
    """Train, and write the model into MODEL."""
    engine = arguments.engine
    updates = training.max_steps
    checkpoint, seconds = processes.of_first(lambda: newest_checkpoint(folder))
    if checkpoint:
        _check_sharding(checkpoint, arguments.is_sharded)
    start = task.checkpoint
    if checkpoint and not arguments.is_sharded:
        start = str(checkpoint)
    model = models.load_to_train(start, engine, task.seeds[0])
    layout = Layout(
        models.block_size_of(model.config, engine.block_size), task.end_token, engine.first_token
    )
    batch = training.train_batch_size * training.world_size * training.gradient_accumulation_steps
    blocks = StageBlocks(
        _blocks_of(task.train, layout),
        _blocks_of(task.earlier, layout),
        task.replay_share,
        [*task.seeds, task.t],
        updates * batch,
    )
    progress = TrainingSteps(task, arguments.training["save_total_limit"], seconds)
    uses_cache = getattr(model.config, "use_cache", True)
    trainer = ResumedTrainer(model, training, train_dataset=blocks, callbacks=[progress])
    if averages.read(engine.average):  # after the Trainer has moved the weights to the device
        progress.average = MovingAverage(model, engine.average, checkpoint)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except RuntimeError:
        time.sleep(_SIGNAL_SECONDS)
        if not progress.is_stopping.is_signalled():
            raise
        traceback.print_exc()
        sys.exit(STOPPED)
    if trainer.state.global_step < updates:
        processes.leave()  # until the first process has written the checkpoint
        sys.exit(STOPPED)
    model.config.use_cache = uses_cache  # the Trainer turns it off, and exports have config.json
    costs = {
        "updates": updates,
        "tokens": updates * batch * layout.targets,
        "seconds": progress.seconds,
        "parameters": model.num_parameters(),
    }
    _write_model(trainer, progress.average, folder, Path(engine.init), costs)


def _check_sharding(checkpoint: Path, is_sharded: bool) -> None:
    """UserError: FSDP was turned on or off; the Trainer would begin with an empty optimizer."""
    of_whole_model = checkpoint / OPTIMIZER_NAME  # FSDP's has another name
    if of_whole_model.is_file() == is_sharded:
        how = "without" if is_sharded else "by"
        problem = f"saved {how} FSDP and several processes"
        raise UserError(f"{checkpoint}: {problem}: start as before, or delete it to train anew")


def _blocks_of(parts: tuple[TextPart, ...], layout: Layout) -> list[PartBlocks]:
    return [PartBlocks(part.map_tokens(), layout) for part in parts]


def whole_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a training, by their updates."""
    whole: dict[int, Path] = {}
    for checkpoint in folder.glob("checkpoint-*"):
        if (checkpoint / _WHOLE).is_file():
            whole[int(checkpoint.name.partition("-")[2])] = checkpoint
    return [whole[updates] for updates in sorted(whole)]


def newest_checkpoint(folder: Path) -> tuple[Path | None, float]:
    """The newest whole checkpoint of a training, and its seconds; removes all others.

    A kill may have left some of these half-written, or half removed.
    """
    whole = whole_checkpoints(folder)
    newest = whole[-1] if whole else None
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint != newest:
            shutil.rmtree(checkpoint)
    if newest is None:
        return None, 0.0
    record = parse_json((newest / _WHOLE).read_bytes())
    require(record, {"seconds": AMOUNT}, ["seconds"])
    return newest, record["seconds"]


@contextmanager
def _writing(checkpoint: Path) -> Iterator[None]:
    """UserError: the block cannot write a folder, of which nothing is left then.

    A log on the same disk has space for the error again.
    """
    try:
        with writing_checkpoint(checkpoint, (OSError, RuntimeError, SafetensorError)):
            yield
    except UserError:
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise


def _write_model(
    trainer: Trainer,
    average: MovingAverage | None,
    folder: Path,
    init: Path,
    costs: dict[str, Any],
) -> None:
    """Write the trained model, or its average, and the tokenizer of `init` into MODEL in one step.

    With an average, MODEL/raw has the weights from which the next stage goes on.
    """
    part = folder / f"{MODEL}.part"
    if processes.is_first():
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
    processes.wait_for_all()
    if trainer.is_fsdp_enabled:  # a checkpoint may have a share in each file, a model not
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with _writing(part):
        if average:
            trainer.save_model(str(part / models.RAW))
            processes.wait_for_all()
            average.deploy()
        trainer.save_model(str(part))
        processes.wait_for_all()
        if not processes.is_first():
            return
        for name in ("training_args.bin", f"{models.RAW}/training_args.bin"):  # a pickle of no use
            (part / name).unlink(missing_ok=True)
        for name in matching(init, TOKENIZER):
            shutil.copyfile(init / name, part / name)
        (part / _ENDED).write_text(json.dumps(costs))
        _sync(part)
    part.rename(folder / MODEL)
    fsync_directory(folder)


def _sync(folder: Path) -> None:
    """Write the files of a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_directory(folder)


def _default_of(name: str) -> Any:
    """The default of a flag of TrainingArguments."""
    return TrainingArguments.__dataclass_fields__[name].default


def _peak_memory() -> int:
    """Bytes that the training took on this process's GPU; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
