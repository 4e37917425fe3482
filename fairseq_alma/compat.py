"""Work-arounds for fairseq 0.12, each with its upstream issue and with what would make it
unnecessary.

`install` lists the functions of fairseq that it replaces; the norm of the gradients is in
`training.gradients`. Two more work-arounds are classes, used by `hooks`: the optimizers of
`training.precision` and the weight average of `training.weight_average`.
"""

import bisect
import functools
import importlib.util
import os
import shutil
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, options, utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging.meters import MetersDict
from fairseq.models import distributed_fairseq_model
from fairseq.trainer import Trainer
from omegaconf import open_dict
from torch.nn.parallel import DistributedDataParallel

from alma.errors import UserError
from alma.files import checkpoint_file
from fairseq_alma import rendezvous
from fairseq_alma.training import gradients


@functools.cache
def install() -> None:
    """Replace these functions of fairseq, in this order; a second call does nothing."""
    replace(options, "parse_args_and_arch", _bf16_without_tpu)
    replace(distributed_utils, "call_main", _several_processes)
    replace(Trainer, "load_checkpoint", _read_by_each_process)
    replace(checkpoint_utils, "load_checkpoint_to_cpu", _mapped)
    replace(distributed_fairseq_model, "DistributedDataParallel", _data_parallel)
    replace(checkpoint_utils, "torch_persistent_save", _save_atomically)
    replace(PathManager, "copy", _copy_atomically)
    replace(Trainer, "train_step", _empty_batches_first)
    replace(Trainer, "_set_seed", _seed_without_traces)
    replace(utils, "clip_grad_norm_", gradients.clip_grad_norm_)
    replace(utils, "get_activation_fn", _activation)
    replace(MetersDict, "__setitem__", _in_its_place)
    replace(EpochBatchIterator, "state_dict", _with_processes)
    replace(EpochBatchIterator, "load_state_dict", _at_the_same_batch)


def replace(owner: Any, name: str, replacement: Callable) -> None:
    """Make `owner.name(...)` call `replacement(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())
    def call(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, call)


def _bf16_without_tpu(original, *args, **kwargs):
    """Train with --bf16 on a GPU or CPU: fairseq's parser turns --bf16 into --tpu.

    https://github.com/facebookresearch/fairseq/issues/4696; unnecessary once the two flags are
    independent.
    """
    parsed = original(*args, **kwargs)
    values = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(values, "tpu", False) and importlib.util.find_spec("torch_xla") is None:
        values.tpu = False
    return parsed


def _several_processes(original, cfg, main, **kwargs) -> None:
    """Train with several processes on a CPU, spawned (--distributed-world-size) or started by
    torchrun.

    Without a GPU, torchrun's processes would each train alone, or divide by zero devices.
    https://github.com/facebookresearch/fairseq/issues/2879; unnecessary once fairseq supports this.
    """
    distributed = cfg.distributed_training
    if torch.cuda.is_available() and not cfg.common.cpu:
        if distributed.distributed_no_spawn and rendezvous.is_ours(
            distributed.distributed_init_method
        ):
            # One process per GPU, as fairseq assigns them under torchrun.
            distributed.device_id = distributed.distributed_rank % max(1, torch.cuda.device_count())
        return original(cfg, main, **kwargs)
    with open_dict(cfg):
        cfg.common.fp16_no_flatten_grads = True  # flattening needs a GPU
        if (
            distributed.distributed_init_method is None
            and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        ):
            distributed.distributed_init_method = "env://"
            distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
            distributed.distributed_rank = int(os.environ["RANK"])
            distributed.distributed_no_spawn = True
        processes = distributed.distributed_world_size
        spawns = processes > 1 and not distributed.distributed_no_spawn
        if spawns or distributed.distributed_no_spawn:
            distributed.distributed_backend = "gloo"
            distributed.device_id = 0
        if spawns:
            meeting = tempfile.TemporaryDirectory()  # holds the rendezvous file; mode 0700
            if not distributed.distributed_init_method:
                distributed.distributed_init_method = rendezvous.here(meeting.name)
            distributed.distributed_num_procs = processes
            start_rank = distributed.distributed_rank
            distributed.distributed_rank = None
    if not spawns:
        return original(cfg, main, **kwargs)
    arguments = (main, cfg, {"start_rank": start_rank, **kwargs})
    with meeting:
        torch.multiprocessing.start_processes(  # forks need not import torch and fairseq
            distributed_utils.distributed_main,
            args=arguments,
            nprocs=processes,
            start_method="fork",
        )


def _read_by_each_process(original, trainer, *args, **kwargs):
    """Let every process read a checkpoint; see `_mapped`.

    fairseq sends it through the GPUs as a torch file, whose classes torch >= 2.6 refuses to load.
    https://github.com/facebookresearch/fairseq/issues/5603; unnecessary once fairseq maps
    checkpoints.
    """
    config = trainer.cfg.checkpoint
    before = config.load_checkpoint_on_all_dp_ranks
    config.load_checkpoint_on_all_dp_ranks = True
    try:
        return original(trainer, *args, **kwargs)
    finally:
        config.load_checkpoint_on_all_dp_ranks = before


def _mapped(original, path, *args, **kwargs):
    """Map a checkpoint into memory, so that all processes of a node share its pages.

    No upstream issue known; unnecessary once fairseq passes mmap=True to torch.load.
    """
    load = torch.load

    def load_mapped(file, **options):
        zipped = zipfile.is_zipfile(file)  # torch < 1.6 wrote no zip files; they cannot be mapped
        file.seek(0)
        return load(file.name if zipped else file, mmap=zipped, **options)

    with mock.patch.object(torch, "load", load_mapped):
        return original(path, *args, **kwargs)


def _data_parallel(original, module, device_ids=None, output_device=None, **kwargs):
    """Build DistributedDataParallel on a CPU, where it accepts no device ids; fairseq always passes
    one.

    https://github.com/facebookresearch/fairseq/issues/2879; unnecessary once fairseq supports this.
    With expert parallelism each process has other experts, so their gradients are not averaged, as
    in fairseq's legacy_ddp.
    """
    experts = [name for name, param in module.named_parameters() if hasattr(param, "expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, experts)
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module, device_ids=device_ids, output_device=output_device, **kwargs)


def _save_atomically(original, obj, filename, async_write: bool = False) -> None:
    """Write a checkpoint whole or not at all; a full disk is a UserError.

    fairseq writes in place, tries three times, and leaves half a file and a traceback.
    No upstream issue known; unnecessary once fairseq writes a temporary file and renames it.
    """
    if async_write:
        original(obj, filename, async_write)
    else:
        with checkpoint_file(filename) as file:
            torch.save(obj, file)


def _copy_atomically(original, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy a checkpoint by a hard link (a temporary file on file systems without links) and a
    rename.

    fairseq copies checkpoint_last.pt in place, so a kill leaves half a file and nothing to resume
    from. https://github.com/facebookresearch/fairseq/issues/5490 asks for links; unnecessary once
    it is done.
    """
    temporary = f"{dst_path}.tmp"
    if os.path.lexists(temporary):
        os.remove(temporary)
    try:
        os.link(src_path, temporary)
    except OSError:
        shutil.copyfile(src_path, temporary)
    os.replace(temporary, dst_path)
    return True


def _empty_batches_first(original, trainer, samples, *args, **kwargs):
    """Move empty batches of an update to its front, so that the other batches are counted.

    At the end of an epoch, a process may have fewer batches than the others; fairseq gives it empty
    ones. If the last batch of an update (--update-freq) is empty, fairseq sets the sample size and
    the log of the whole update to 0 but keeps the gradients of the other batches. No upstream issue
    known; unnecessary once fairseq zeroes only the empty batch.
    """
    if samples[-1] or not any(samples):
        return original(trainer, samples, *args, **kwargs)
    of_task = trainer.task.train_step

    def train_step(*args, ignore_grad=False, **kwargs):
        loss, sample_size, logged = of_task(*args, ignore_grad=ignore_grad, **kwargs)
        if ignore_grad:
            sample_size = sample_size * 0
            logged = {name: value * 0 for name, value in logged.items()}
        return loss, sample_size, logged

    with mock.patch.object(trainer.task, "train_step", train_step):
        return original(trainer, sorted(samples, key=bool), *args, **kwargs)


def _seed_without_traces(original, trainer) -> None:
    """Seed the random numbers of an update as fairseq does, but without torch.manual_seed.

    torch.manual_seed also queues a seed, with a stack trace, for each kind of device that is not
    initialised, which takes 1 ms per update. No upstream issue known; unnecessary once torch stops
    doing so.
    """
    seed = trainer.cfg.common.seed + trainer.get_num_updates()
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def _activation(original, activation: str) -> Callable:
    """torch's own gelu for --activation-fn gelu, in every model.

    fairseq's goes to fp32 and back: two more passes over the widest activations in half precision,
    and autograd keeps the fp32 copy (4 bytes per hidden unit and token; torch's gelu keeps the 2
    bytes that fc1 returned). torch's kernels compute in fp32 too and return the same bits, except
    oneDNN's in fp16 on a CPU. No upstream issue known; unnecessary once fairseq calls F.gelu.
    """
    return F.gelu if activation == "gelu" else original(activation)


def _in_its_place(original, meters, key: str, value: tuple[int, Any]) -> None:
    """Add a meter, and move the meters behind it only.

    fairseq moves all meters at each insertion. A validation makes its meters anew for each batch,
    with six layers of 32 experts hundreds of them. No upstream issue known; unnecessary once
    fairseq moves the later ones only.
    """
    del original
    assert key not in meters, "MetersDict doesn't support reassignment"
    priority, meter = value
    entry = (priority, len(meters.priorities), key)
    place = bisect.bisect(meters.priorities, entry)
    meters.priorities.insert(place, entry)
    OrderedDict.__setitem__(meters, key, meter)
    for _, _, later in meters.priorities[place + 1 :]:
        meters.move_to_end(later)


def _with_processes(original, iterator) -> dict[str, Any]:
    """Save the numbers of processes and batches with the position in an epoch; see
    `_at_the_same_batch`."""
    return original(iterator) | {
        "processes": iterator.num_shards,
        "batches": len(iterator.frozen_batches),
    }


def _at_the_same_batch(original, iterator, state: dict[str, Any]) -> None:
    """Resume within an epoch with another number of processes.

    fairseq counts the batches of one process: twice the processes would skip as many batches again,
    or end with "dataloader mismatch". https://github.com/facebookresearch/fairseq/issues/3638;
    unnecessary once fairseq counts the batches of all processes. UserError: the processes cannot
    resume where training stopped.
    """
    position = state.get("iterations_in_epoch", 0)
    processes_before = state.get("processes", iterator.num_shards)
    batches = len(iterator.frozen_batches)
    batches_before = state.get("batches", batches)
    anew = "to resume, or fairseq-train --reset-dataloader to begin the epoch again"
    if position and batches_before != batches:
        problem = f"training stopped within an epoch of {batches_before:,} batches, and now it has"
        flags = "the earlier --batch-size, --max-tokens and --tokens-per-sample"
        raise UserError(f"{problem} {batches:,}: give {flags} {anew}")
    completed, remainder = divmod(position * processes_before, iterator.num_shards)
    if remainder:
        stopped = f"after {position:,} batches in each of {processes_before} processes"
        problem = f"training stopped within an epoch, {stopped}, which {iterator.num_shards} cannot"
        remedy = f"give --distributed-world-size {processes_before} {anew}"
        raise UserError(f"{problem} share: {remedy}")
    original(iterator, {**state, "iterations_in_epoch": completed})
