"""Changes of fairseq's commands where fairseq offers no interface.

`install` lists the functions that it replaces. In a process that trains, `interrupt.watch` replaces
one more, validate_and_save of fairseq_cli.train.
"""

import copy
import functools
import logging
import os
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.distributed import utils as distributed_utils
from fairseq.optim.adam import Adam
from fairseq.trainer import Trainer
from omegaconf import open_dict

from alma.batches import tokens_of
from alma.errors import UserError, command, fail
from alma.files import make_directory, patiently_locked
from alma.options import flag_of
from fairseq_alma import checkpoint, command_line, compat, growth, initial, interrupt, saved_config
from fairseq_alma.compat import replace
from fairseq_alma.moe import expert_parallel
from fairseq_alma.moe.layer import switch_layers
from fairseq_alma.task import AlmaLMTask
from fairseq_alma.training import (
    epochs,
    late,
    loss,
    precision,
    schedule,
    sharding,
    tensorboard,
    tf32,
    weight_average,
)
from fairseq_alma.training.adam import FusedAdam

logger = logging.getLogger(__name__)


class TrainingComplete(Exception):
    """The loaded checkpoint already has --max-update updates, or --patience has ended its
    training."""


def install_first(original, desc, default_task="translation"):
    """Replacement of options.get_parser, which every fairseq command calls first."""
    install()
    try:
        return original(desc, default_task)
    except FileNotFoundError as error:  # fairseq imports --user-dir here, which may not exist
        if not command_line.is_given(sys.argv[1:], default_task):
            raise
        fail(command_line.missing_user_dir(error))


@functools.cache
def install() -> None:
    """Install the work-arounds of `compat`, then replace functions of fairseq in this order.

    A second call does nothing.
    """
    compat.install()
    replace(options, "parse_args_and_arch", _parse_with_our_defaults)
    replace(distributed_utils, "call_main", _run_with_our_errors)
    replace(checkpoint_utils, "load_checkpoint", _grow_and_load)
    replace(checkpoint_utils, "load_checkpoint_to_cpu", checkpoint.loaded)
    replace(checkpoint_utils, "load_model_ensemble_and_task", _check_members)
    replace(CrossEntropyCriterion, "compute_loss", _loss_by_a_kernel)
    replace(Trainer, "load_checkpoint", _load_into)
    replace(Trainer, "_build_optimizer", _build_optimizer)
    replace(Trainer, "state_dict", _state_of_plain_data)
    replace(Trainer, "train_step", late.train_step)
    replace(Trainer, "clip_grad_norm", late.clip_grad_norm)
    replace(Trainer, "_check_grad_norms", late.check_grad_norms)
    replace(Trainer, "_reduce_and_log_stats", late.reduce_and_log_stats)
    replace(Trainer, "_aggregate_logging_outputs", late.aggregate_logging_outputs)
    replace(distributed_utils, "all_reduce_dict", late.all_reduce_dict)
    replace(Trainer, "begin_valid_epoch", late.begin_valid_epoch)
    replace(Trainer, "consolidate_optimizer", late.consolidate_optimizer)
    Trainer.always_call_state_dict_during_save_checkpoint = property(_saving_is_collective)


def _parse_with_our_defaults(
    original,
    parser,
    input_args=None,
    parse_known=False,
    suppress_defaults=False,
    modify_parser=None,
):
    """Give `--task alma_lm` its defaults and one-line errors (see `command_line`)."""
    words = sys.argv[1:] if input_args is None else [str(word) for word in input_args]
    ours = command_line.is_ours(parser, words)
    if not suppress_defaults:
        saved_config.set_task(command_line.TASK if ours else "another")
    if suppress_defaults or not ours:
        return original(parser, input_args, parse_known, suppress_defaults, modify_parser)
    interrupt.install()
    try:
        args = command_line.parse(original, parser, words, modify_parser)
    except UserError as error:
        fail(str(error))
    except FileNotFoundError as error:
        fail(command_line.missing_user_dir(error))
    if input_args is None and getattr(args, "profile", False) and not torch.cuda.is_available():
        fail("--profile: it needs a GPU; leave it out on a CPU")  # fairseq fails before it trains
    return (args, []) if parse_known else args


def _run_with_our_errors(original, cfg, main, **kwargs) -> None:
    """Exit with one line and code 2 on bad input, and with code 75 when a signal has stopped
    training."""
    if _trains(main, cfg):
        command(lambda: _check_gpus(cfg))()
        command(lambda: _check_processes(cfg))()
        # fairseq reads the data late: it would first create --save-dir and print the model.
        command(lambda: tasks.setup_task(cfg.task))()
    try:
        original(cfg, functools.partial(_run, main, interrupt.flag()), **kwargs)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code in (2, interrupt.EXIT_CODE):  # the spawned process printed the reason
            sys.exit(error.exit_code)
        if -error.exit_code in interrupt.SIGNALS:  # killed before it had installed its handler
            sys.exit(interrupt.EXIT_CODE)
        raise


def _run(main, received, cfg, **kwargs) -> None:
    """Run `main` of a fairseq command in this process, which fairseq may have spawned.

    `received` is the parent's `interrupt.flag`.
    """
    install()  # a spawned process starts with an unchanged fairseq
    saved_config.set_task(str(getattr(cfg.task, "_name", None)))
    if getattr(cfg.task, "_name", None) == command_line.TASK:
        interrupt.install(received)
        interrupt.watch(main)

    @command
    def run() -> None:
        if _trains(main, cfg):
            _check_batch(cfg)
            if cfg.checkpoint.finetune_from_model:
                cfg.task.init = None  # the flags come from --init, the weights from the checkpoint
                initial.read.cache_clear()
        with _alone(cfg) if _trains(main, cfg) else nullcontext():
            try:
                main(cfg, **kwargs)
            except TrainingComplete:
                logger.info("all updates of this stage are done: nothing to train")

    run()


def _trains(main, cfg) -> bool:
    return interrupt.is_train(main) and getattr(cfg.task, "_name", None) == command_line.TASK


def _check_gpus(cfg) -> None:
    """Raise a UserError if torch can use fewer GPUs than --expect-gpus.

    With an old driver, for example, it can use none.
    """
    planned = cfg.task.expect_gpus
    usable = 0
    # device_count() may count GPUs even if the driver cannot use them.
    if torch.cuda.is_available() and not cfg.common.cpu:
        usable = torch.cuda.device_count()
    if usable < planned:
        gpus = "1 GPU" if planned == 1 else f"{planned} GPUs"
        problem = f"{gpus} here, but torch {torch.__version__} can use {usable}"
        remedy = "install a torch build for the driver that nvidia-smi shows"
        raise UserError(f"planned: {problem}: {remedy}, or train on a CPU with --cpu")


def _check_processes(cfg) -> None:
    """Raise a UserError if the environment contradicts --distributed-world-size.

    Variables of torchrun or SLURM would override the flag: in fairseq with several GPUs, and in
    `compat` on a CPU.
    """
    flag = "--distributed-world-size"
    processes = cfg.distributed_training.distributed_world_size
    variables = {"RANK", "WORLD_SIZE"}
    if torch.cuda.is_available() and not cfg.common.cpu:
        variables |= {"MASTER_ADDR", "MASTER_PORT"}
        if processes == 1:
            return
    if cfg.distributed_training.distributed_init_method or not variables <= os.environ.keys():
        return
    joined = os.environ["WORLD_SIZE"]
    is_given = any(word.partition("=")[0] == flag for word in sys.argv)
    if is_given and joined != str(processes):
        problem = f"{flag} {processes}, but WORLD_SIZE is {joined} in the environment"
        raise UserError(f"{problem}: unset RANK and WORLD_SIZE, or give {flag} {joined}")


def _check_batch(cfg) -> None:
    """Raise a UserError if an update has another number of tokens than --expect-tokens.

    Also if --zero-sharding is given to a single process, which has nothing to shard.
    """
    joined = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sharding.check(cfg, joined)
    planned = cfg.task.expect_tokens
    if not planned:
        return
    tokens = tokens_of(
        cfg.optimization.update_freq[0],
        cfg.dataset.batch_size,
        cfg.dataset.max_tokens,
        cfg.task.tokens_per_sample,
        cfg.dataset.required_batch_size_multiple,
    )
    if tokens is None or tokens * joined == planned:
        return
    plan = f"{planned:,} tokens an update in {planned / tokens:g} processes"
    actual = f"{joined} joined, with {joined * tokens:,} tokens"
    raise UserError(f"planned: {plan}, but {actual}: plan with --distributed-world-size {joined}")


def _alone(cfg) -> AbstractContextManager:
    """Lock the checkpoint folder, in the first process of a training; the others lock nothing.

    Two trainings would write the same files. Raises UserError if another training has the lock.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return nullcontext()
    folder = Path(cfg.checkpoint.save_dir)
    make_directory(folder)
    return patiently_locked(folder, ".training.lock")


def _grow_and_load(original, cfg, trainer, **kwargs):
    """Grow the previous stage's experts, load the checkpoint and prepare the stage.

    Ends with TrainingComplete if the stage has all its updates: fairseq checks --max-update only
    after an update, so a finished run, started again, would do one more.
    """
    if not isinstance(trainer.task, AlmaLMTask):
        return original(cfg, trainer, **kwargs)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # wait for process 0, which may be waiting for the lock
    if distributed_utils.get_global_rank() == 0:
        for left_by_a_kill in Path(cfg.save_dir).glob(".*.pt*.tmp"):
            left_by_a_kill.unlink()
    if getattr(trainer.cfg.model, "moe_expert_parallel", False):
        expert_parallel.check(trainer.cfg)
    cfg = copy.deepcopy(cfg)  # changed below; checkpoints store the user's settings
    _drop_applied_resets(cfg)
    tf32.prepare(cfg, trainer)  # before `growth` names a checkpoint without records
    growth.prepare(cfg, trainer)
    is_new_stage = schedule.prepare(cfg, trainer)
    ends_by_epochs = epochs.begin(trainer)
    store_ema = trainer.cfg.ema.store_ema
    trainer.cfg.ema.store_ema = False  # `weight_average.begin` loads the average
    try:
        extra_state, iterator = original(cfg, trainer, **kwargs)
    finally:
        trainer.cfg.ema.store_ema = store_ema
    if ends_by_epochs:
        epochs.plan(trainer, iterator)
    if is_new_stage:
        schedule.begin(trainer, extra_state)
    weight_average.begin(trainer, extra_state)
    tensorboard.begin(trainer)
    max_update = trainer.cfg.optimization.max_update
    has_all_updates = max_update and trainer.get_num_updates() >= max_update
    epochs_without_gain = trainer.task.early_stop.get("num_runs", 0)
    stopped_early = 0 < cfg.patience <= epochs_without_gain
    if stopped_early or has_all_updates:
        raise TrainingComplete
    return extra_state, iterator


def _drop_applied_resets(cfg) -> None:
    """Turn off the --reset flags in `cfg` with which the last checkpoint was trained.

    The interrupted training applied them when it began; resuming must not apply them again.
    """
    last = Path(cfg.save_dir, "checkpoint_last.pt")
    resets = [name for name in cfg if name.startswith("reset_") and cfg[name]]
    if not resets or cfg.restore_file != last.name or not last.exists():
        return
    saved = checkpoint.memory_map(str(last))["cfg"]["checkpoint"]
    for name in resets:
        if saved.get(name):
            cfg[name] = False
            applied = f"applied before {last} was written"
            logger.info(f"{flag_of(name)}: {applied}; this start resumes from it")


def _load_into(original, trainer, filename, *args, **kwargs):
    """Report a checkpoint that does not fit the trainer in one line."""
    if not isinstance(trainer.task, AlmaLMTask):
        return original(trainer, filename, *args, **kwargs)
    with checkpoint.reading(filename):
        try:
            return original(trainer, filename, *args, **kwargs)
        except AssertionError as error:  # saved with another optimizer or criterion
            raise UserError(f"{filename}: {error}") from error
        except Exception as error:
            if (
                type(error) is Exception
            ):  # fairseq's own message names the checkpoint: saved with another architecture
                raise UserError(str(error)) from error
            raise


def _state_of_plain_data(original, trainer):
    """Save a checkpoint's settings as plain data.

    Settings of fairseq's older optimizers and models are an argparse.Namespace, which torch.load
    refuses with weights_only=True.
    """
    state = original(trainer)
    if isinstance(trainer.task, AlmaLMTask):
        plain = {
            key: vars(value) for key, value in state["cfg"].items() if isinstance(value, Namespace)
        }
        state["cfg"] = state["cfg"] | plain
    return state


def _check_members(original, filenames, *args, **kwargs):
    """Split `--path a.pt:b.pt` and check that the checkpoints can form an ensemble.

    fairseq-eval-lm takes such a --path as one file name. No upstream issue known; splitting is
    unnecessary once fairseq-eval-lm splits --path as fairseq-generate does.
    """
    paths = [path for name in filenames for path in utils.split_paths(name)]
    try:
        if not isinstance(kwargs.get("task"), AlmaLMTask):
            return original(paths, *args, **kwargs)
        of_task = checkpoint.memory_map_members(paths)[0]["cfg"]["task"]
        kwargs["task"].args.end_token = of_task.get("end_token", -1)
        with checkpoint.reading(paths[0]):
            return original(paths, *args, **kwargs)
    except UserError as error:  # fairseq-generate does not go through `_run`, which prints errors
        fail(str(error))


def _loss_by_a_kernel(original, criterion, *args, **kwargs):
    """Compute cross_entropy without a copy of the logits in fp32, on a GPU with Triton.

    No upstream issue known in fairseq; unnecessary once torch fuses log_softmax with its cast for
    bf16 (https://github.com/pytorch/pytorch/issues/102723).
    """
    if not isinstance(criterion.task, AlmaLMTask):
        return original(criterion, *args, **kwargs)
    return loss.whole_loss(original, criterion, *args, **kwargs)


def _build_optimizer(original, trainer) -> None:
    """Build fairseq's optimizer, then give it our classes.

    These are the mixed-precision optimizers of `training.precision`, the fused Adam and the sharded
    state. With expert parallelism, the optimizer's state dict gets the states of all experts.
    """
    if not isinstance(trainer.task, AlmaLMTask):
        return original(trainer)
    with open_dict(trainer.cfg):
        trainer.cfg.common.fp16_no_flatten_grads = True
    original(trainer)
    optimizer = trainer.optimizer.optimizer
    if trainer.cfg.distributed_training.zero_sharding == "os":
        optimizer = sharding.optimizer_of_share(optimizer)
    precision.replace_optimizer(trainer, optimizer)
    if type(optimizer) is Adam and not trainer.cfg.optimizer.use_old_adam:
        # fairseq has no option for the class of its Adam. FusedAdam needs no __init__.
        optimizer.__class__ = FusedAdam
    trainer.late = late.LateUpdates(trainer, optimizer)
    group = _ep_group(trainer)
    if group:
        expert_parallel.whole_states(optimizer, group)


def _ep_group(trainer) -> expert_parallel.ExpertParallelGroup | None:
    """The processes that share the experts of the trainer's model; None without expert
    parallelism."""
    return next((layer.ep_group for layer in switch_layers(trainer.get_model()).values()), None)


def _saving_is_collective(trainer) -> bool:
    """Whether all processes take part in saving a checkpoint."""
    return _ep_group(trainer) is not None
