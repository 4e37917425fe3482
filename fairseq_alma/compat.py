"""Work-arounds for fairseq 0.12, each with its upstream issue and with what would make it unnecessary.

`install` lists the functions of fairseq that it replaces. Two more work-arounds are classes, used by `hooks`:
the optimizers of `training.precision` and the weight average of `training.average`.
"""

import functools
import importlib.util
import os
import shutil
import socket
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from omegaconf import open_dict

from alma.files import checkpoint_file


@functools.cache
def install() -> None:
    """Replace these functions of fairseq, in this order; a second call does nothing."""
    replace(options, "parse_args_and_arch", _bf16_without_tpu)
    replace(distributed_utils, "call_main", _processes_on_cpu)
    replace(distributed_utils, "_broadcast_object_slow", _broadcast_object)
    replace(distributed_fairseq_model, "DistributedDataParallel", _data_parallel_on_cpu)
    replace(checkpoint_utils, "load_model_ensemble_and_task", _split_paths)
    replace(checkpoint_utils, "torch_persistent_save", _save_atomically)
    replace(PathManager, "copy", _copy_atomically)
    if not hasattr(np, "compat"):
        # TokenBlockDataset's break mode "eos" (fairseq-interactive) uses np.compat.long, gone in NumPy 2.
        # No upstream issue known; unnecessary once fairseq supports NumPy 2.
        np.compat = types.SimpleNamespace(long=np.int64)  # type: ignore[attr-defined]  # noqa: NPY201


def replace(owner: Any, name: str, replacement: Callable) -> None:
    """Make `owner.name(...)` call `replacement(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original, updated=())
    def call(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, call)


def _bf16_without_tpu(original, *args, **kwargs):
    """Train with --bf16 on a GPU or CPU: fairseq's parser turns --bf16 into --tpu.

    https://github.com/facebookresearch/fairseq/issues/4696; unnecessary once the two flags are independent.
    """
    parsed = original(*args, **kwargs)
    given = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(given, "tpu", False) and importlib.util.find_spec("torch_xla") is None:
        given.tpu = False
    return parsed


def _processes_on_cpu(original, cfg, main, **kwargs) -> None:
    """Train on a CPU with several processes, spawned (--distributed-world-size) or started by torchrun.

    fairseq derives the number of processes from the number of GPUs. Without one, torchrun's processes each
    train alone, or divide by zero devices.
    https://github.com/facebookresearch/fairseq/issues/2879; unnecessary once fairseq supports this.
    """
    processes = _processes_to_spawn(cfg)
    if not processes:
        original(cfg, main, **kwargs)
        return
    start_rank = cfg.distributed_training.distributed_rank
    cfg.distributed_training.distributed_rank = None
    arguments = (main, cfg, {"start_rank": start_rank, **kwargs})
    torch.multiprocessing.start_processes(  # forks need not import torch and fairseq
        distributed_utils.distributed_main, args=arguments, nprocs=processes, start_method="fork"
    )


def _processes_to_spawn(cfg) -> int:
    """Set `cfg` up for a run without a GPU; 0 if no process is to be spawned here."""
    distributed = cfg.distributed_training
    if torch.cuda.is_available() and not cfg.common.cpu:
        return 0
    with open_dict(cfg):
        cfg.common.fp16_no_flatten_grads = True  # flattening needs a GPU
        if distributed.distributed_init_method is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            distributed.distributed_init_method = "env://"
            distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
            distributed.distributed_rank = int(os.environ["RANK"])
            distributed.distributed_no_spawn = True
        if distributed.distributed_world_size <= 1:
            return 0
        distributed.distributed_backend = "gloo"
        distributed.device_id = 0
        if distributed.distributed_init_method or distributed.distributed_no_spawn:
            return 0
        with socket.socket() as server:
            server.bind(("localhost", 0))
            distributed.distributed_init_method = f"tcp://localhost:{server.getsockname()[1]}"
        distributed.distributed_num_procs = distributed.distributed_world_size
    return distributed.distributed_world_size


def _broadcast_object(original, obj, src_rank: int, group, dist_device):
    """Broadcast the checkpoint that rank 0 has read, so that several processes can resume.

    fairseq sends it as a torch file; torch >= 2.6 refuses to load the classes in it.
    https://github.com/facebookresearch/fairseq/issues/5603; unnecessary once fairseq supports torch 2.6.
    """
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]


def _data_parallel_on_cpu(original, module, device_ids=None, output_device=None, **kwargs):
    """Build DistributedDataParallel on a CPU, where it accepts no device ids; fairseq always passes one.

    https://github.com/facebookresearch/fairseq/issues/2879; unnecessary once fairseq supports this.
    """
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module, device_ids=device_ids, output_device=output_device, **kwargs)


def _split_paths(original, filenames, *args, **kwargs):
    """Load `--path a.pt:b.pt` as an ensemble in fairseq-eval-lm too, as fairseq-generate does.

    fairseq-eval-lm takes --path as one file name. No upstream issue known; unnecessary once it splits --path.
    """
    return original(split_paths(filenames), *args, **kwargs)


def split_paths(filenames: Sequence[str]) -> list[str]:
    """The paths in file names such as "a.pt:b.pt"."""
    return [path for name in filenames for path in utils.split_paths(name)]


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
    """Copy a checkpoint by a hard link (a temporary file on file systems without links) and a rename.

    fairseq copies checkpoint_last.pt in place, so a kill leaves half a file and nothing to resume from.
    https://github.com/facebookresearch/fairseq/issues/5490 asks for links; unnecessary once it is done.
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
