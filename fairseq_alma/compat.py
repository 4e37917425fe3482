"""Work-arounds for fairseq 0.12, all in one place, each with what will make it unnecessary.

`install` replaces eleven functions of fairseq, and `interrupt` one more in a process that trains; the rest of
the plug-in uses its public interfaces.
"""

import copy
import functools
import importlib.util
import logging
import os
import shutil
import socket
import sys
import types
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from fairseq.optim.adam import Adam
from fairseq.trainer import Trainer
from omegaconf import open_dict
from torch.nn.parallel import DistributedDataParallel

from alma.errors import UserError, command, fail
from alma.files import save_tensors
from fairseq_alma import checkpoint, command_line
from fairseq_alma.moe import expert_parallel, growth
from fairseq_alma.moe.layer import switch_layers
from fairseq_alma.task import AlmaLMTask
from fairseq_alma.training import average, interrupt, precision
from fairseq_alma.training.adam import FusedAdam

logger = logging.getLogger(__name__)


class TrainingComplete(Exception):
    """Raised after loading a checkpoint that has had all its updates."""


def at_entry(original):
    """`install` before `original`: options.get_parser, which every command of fairseq calls first."""

    @functools.wraps(original)
    def get_parser(*args, **kwargs):
        install()
        return original(*args, **kwargs)

    return get_parser


def install() -> None:
    """Put the work-arounds and the signal handlers in place; calling it again does nothing."""
    if distributed_utils.call_main.__module__ == __name__:
        return
    interrupt.install()
    distributed_utils.call_main = _call_main(distributed_utils.call_main)
    options.parse_args_and_arch = _parse(options.parse_args_and_arch)
    checkpoint_utils.load_checkpoint = _load_checkpoint(checkpoint_utils.load_checkpoint)
    checkpoint_utils.load_checkpoint_to_cpu = _readable(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.load_model_ensemble_and_task = _each_path(checkpoint_utils.load_model_ensemble_and_task)
    checkpoint_utils.torch_persistent_save = _save_whole(checkpoint_utils.torch_persistent_save)
    PathManager.copy = staticmethod(_copy_atomically)
    distributed_utils._broadcast_object_slow = _broadcast_object
    distributed_fairseq_model.DistributedDataParallel = _data_parallel
    utils.clip_grad_norm_ = _clip_grad_norm(utils.clip_grad_norm_)
    Trainer.always_call_state_dict_during_save_checkpoint = property(_on_all_processes)
    # TokenBlockDataset's break mode "eos" (fairseq-interactive) uses np.compat.long, gone in NumPy 2;
    # no upstream issue is known.
    vars(np).setdefault("compat", types.SimpleNamespace(long=np.int64))


def _save_whole(original):
    """A checkpoint that cannot be written (full disk) is one clear line, and leaves nothing behind.

    fairseq tries three times, into the same half-written file, and ends in a traceback (no upstream issue
    is known).
    """

    @functools.wraps(original)
    def torch_persistent_save(obj, filename, async_write: bool = False) -> None:
        if async_write:
            original(obj, filename, async_write)
            return
        save_tensors(filename, obj)

    return torch_persistent_save


def _copy_atomically(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy by hard link, else by temp file, and rename.

    fairseq copies checkpoint_last.pt in place: a kill leaves half a file, from which nothing resumes.
    Links instead of copies are asked for in https://github.com/facebookresearch/fairseq/issues/5490.
    """
    temporary = f"{dst_path}.tmp"
    if os.path.lexists(temporary):
        os.remove(temporary)
    try:
        os.link(src_path, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(src_path, temporary)
    os.replace(temporary, dst_path)
    return True


def _broadcast_object(obj, src_rank: int, group, dist_device):
    """What rank 0 has read of a checkpoint, for the other ranks of this job.

    fairseq sends it as a torch file, which torch >= 2.6 refuses to load for the classes in it: training on
    several processes could not resume (no upstream issue is known).
    """
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]


def _data_parallel(module, device_ids=None, output_device=None, **kwargs):
    """fairseq always names a device, which DistributedDataParallel refuses for modules on the CPU.

    Same cause as _call_main's: https://github.com/facebookresearch/fairseq/issues/3318. Experts that are this
    process's alone are left out, as legacy_ddp does.
    """
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    own = [name for name, param in module.named_parameters() if hasattr(param, "expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, own)
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **kwargs)


def _clip_grad_norm(original):
    """The gradients of experts shared out to the processes count in the norm; fairseq only scales them.

    No upstream issue is known: of fairseq's own models only BASE layers have such experts.
    """

    @functools.wraps(original)
    def clip_grad_norm_(params, max_norm, aggregate_norm_fn=None):
        params = [params] if torch.is_tensor(params) else list(params)
        if any(hasattr(param, "expert") for param in params):
            return expert_parallel.clip_grad_norm_(original, params, max_norm)
        return original(params, max_norm, aggregate_norm_fn)

    return clip_grad_norm_


def _prepare_optimizer(trainer) -> None:
    """Have `trainer` build its optimizer as it has to be: see `precision`, `adam`, `expert_parallel`."""
    if getattr(trainer.cfg.model, "moe_expert_parallel", False):
        expert_parallel.check(trainer.cfg)
        with open_dict(trainer.cfg):  # flat, there would be no telling which states are the experts'
            trainer.cfg.common.fp16_no_flatten_grads = True
    group, build = _ep_group(trainer), trainer._build_optimizer

    def build_optimizer() -> None:
        build()
        precision.mend(trainer, group)
        optimizer = trainer.optimizer.optimizer
        if type(optimizer) is Adam and not trainer.cfg.optimizer.use_old_adam:
            optimizer.__class__ = FusedAdam
        if group:
            expert_parallel.whole_states(optimizer, group)

    trainer._build_optimizer = build_optimizer


def _ep_group(trainer) -> expert_parallel.ExpertParallelGroup | None:
    """The processes that share its model's experts; None without expert parallelism."""
    return next((layer.ep_group for layer in switch_layers(trainer.get_model()).values()), None)


def _on_all_processes(trainer) -> bool:
    """Whether a checkpoint needs every process, not the first alone: fairseq asks this for FSDP only."""
    sharded = trainer.is_fsdp and not trainer.cfg.distributed_training.use_sharded_state
    return sharded or _ep_group(trainer) is not None


def _parse(original):
    """`--task alma_lm` has defaults, and errors of one line (see command_line).

    And --bf16 on a GPU or a CPU: fairseq takes it to ask for a TPU, which its hydra commands do not. No
    upstream issue is known.
    """

    @functools.wraps(original)
    def parse_args_and_arch(
        parser, input_args=None, parse_known=False, suppress_defaults=False, modify_parser=None
    ):
        words = sys.argv[1:] if input_args is None else [str(word) for word in input_args]
        if suppress_defaults or not command_line.is_ours(parser, words):
            parsed = original(parser, input_args, parse_known, suppress_defaults, modify_parser)
            given = parsed[0] if parse_known else parsed
        else:
            try:
                given, unknown = command_line.parse(original, parser, words, modify_parser)
            except UserError as error:
                fail(str(error))
            parsed = (given, unknown) if parse_known else given
        if given.tpu and importlib.util.find_spec("torch_xla") is None:
            given.tpu = False
        return parsed

    return parse_args_and_arch


def _call_main(original):
    """Errors as one line and exit code 2, and several processes on CPU.

    fairseq takes the number of processes from the GPU count: without a GPU, torchrun's processes each train
    alone or divide by zero devices (same function: https://github.com/facebookresearch/fairseq/issues/3318).
    """

    def call_main(cfg, main, **kwargs):
        if _trains_us(main, cfg):
            command(functools.partial(_check_data, cfg))()
        main = functools.partial(_run_main, main, interrupt.shared())
        try:
            processes = _cpu_processes(cfg)
            if processes:
                start_rank = cfg.distributed_training.distributed_rank
                cfg.distributed_training.distributed_rank = None
                torch.multiprocessing.spawn(
                    distributed_utils.distributed_main,
                    args=(main, cfg, {"start_rank": start_rank, **kwargs}),
                    nprocs=processes,
                )
            else:
                original(cfg, main, **kwargs)
        except torch.multiprocessing.ProcessExitedException as error:
            if error.exit_code in (2, interrupt.EXIT_CODE):  # the child has said why
                sys.exit(error.exit_code)
            if -error.exit_code in interrupt.SIGNALS:  # it came before the child could handle it
                sys.exit(interrupt.EXIT_CODE)
            raise

    return call_main


def _trains_us(main, cfg) -> bool:
    """Whether `main` is fairseq-train's, and the task ours."""
    trains = "validate_and_save" in getattr(main, "__globals__", {})
    return trains and getattr(cfg.task, "_name", None) == command_line.TASK


def _check_data(cfg) -> None:
    """UserError: no such data or stage; fairseq makes --save-dir and prints the model before it looks."""
    tasks.setup_task(cfg.task)


def _run_main(main, asked, cfg, **kwargs) -> None:
    install()  # a spawned process has only imported fairseq
    interrupt.watch(main, asked)

    def train() -> None:
        try:
            main(cfg, **kwargs)
        except TrainingComplete:
            logger.info("all updates of this stage are done: nothing to train")

    command(train)()


def _cpu_processes(cfg) -> int:
    """Set `cfg` up for a run without GPU; returns how many processes to spawn (0: none, or not our case)."""
    distributed = cfg.distributed_training
    if torch.cuda.is_available() and not cfg.common.cpu:
        return 0
    with open_dict(cfg):  # flat, --fp16 asks for a GPU
        cfg.common.fp16_no_flatten_grads = True
    if distributed.distributed_init_method is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with open_dict(cfg):
            distributed.distributed_init_method = "env://"
            distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
            distributed.distributed_rank = int(os.environ["RANK"])
            distributed.distributed_no_spawn = True
    if distributed.distributed_world_size > 1:
        distributed.distributed_backend = "gloo"
        distributed.device_id = 0
        if distributed.distributed_init_method is None and not distributed.distributed_no_spawn:
            distributed.distributed_init_method = f"tcp://localhost:{_free_port()}"
            with open_dict(cfg):
                distributed.distributed_num_procs = distributed.distributed_world_size
            return distributed.distributed_world_size
    return 0


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def _readable(original):
    """A truncated or foreign checkpoint is one clear line. torch >= 2.6 loads with weights_only=True."""

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        with checkpoint.reading(path):
            return original(path, *args, **kwargs)

    return load_checkpoint_to_cpu


def _each_path(original):
    """`--path a.pt:b.pt` is an ensemble for fairseq-eval-lm too, as it is for fairseq-generate.

    It hands the whole to this function as one file name (no upstream issue is known).
    """

    @functools.wraps(original)
    def load_model_ensemble_and_task(filenames, *args, **kwargs):
        each = [path for name in filenames for path in utils.split_paths(name)]
        if len(each) > 1 and isinstance(kwargs.get("task"), AlmaLMTask):
            checkpoint.glance_at(each)
        return original(each, *args, **kwargs)

    return load_model_ensemble_and_task


def _load_checkpoint(original):
    """Grow between building and loading the model, where fairseq has no hook; skip a finished stage.

    A finished run that is started again would do one more update: fairseq looks at --max-update only after
    an update (no upstream issue is known).
    """

    @functools.wraps(original)
    def load_checkpoint(cfg, trainer, **kwargs):
        if not isinstance(trainer.task, AlmaLMTask):
            return original(cfg, trainer, **kwargs)
        if distributed_utils.get_global_rank() == 0:
            for left_by_a_kill in Path(cfg.save_dir).glob(".*.pt.*.tmp"):
                left_by_a_kill.unlink()
        cfg = copy.deepcopy(cfg)  # the checkpoints of this run keep what the user gave
        _prepare_optimizer(trainer)
        growth.prepare(cfg, trainer)
        with average.postponed(trainer):
            loaded = original(cfg, trainer, **kwargs)
        average.begin(trainer, loaded[0])
        max_update = trainer.cfg.optimization.max_update
        if max_update and trainer.get_num_updates() >= max_update:
            raise TrainingComplete
        return loaded

    return load_checkpoint
