"""Peak memory of a training step of the paper's models, counted on the meta device, against the
estimate.

On the meta device tensors have shapes and no values, so a step of any size runs on any machine in
seconds. The step is fairseq's: forward and backward pass, gradients scaled and clipped, update by
the optimizer. It uses the kernels of a GPU: one each for dropout, attention and log-softmax; tokens
padded to the capacity. Every storage counts while it exists; CUDA's context and gaps between
storages do not. The estimate is that of `alma train`, less its 1 GB for the context.
"""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fairseq import optim, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import ModuleProxyWrapper
from fairseq.distributed import utils as distributed_utils
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from benchmarks.storages import LiveStorages
from benchmarks.timing import Rows
from fairseq_alma import check
from fairseq_alma.moe import layer
from fairseq_alma.moe.dispatchers import PaddedDispatcher
from fairseq_alma.moe.router import Routing
from fairseq_alma.training.adam import FusedAdam
from slurm.engine.machine import Machine
from slurm.lm.estimate import PROCESS, Cost

VOCABULARY = 50_000
V100 = 32_000_000_000
_CHUNKED = "--criterion chunked_cross_entropy"
SETTINGS = [
    ("switch_gmoe_base", 8, 1, "--fp16"),
    ("switch_gmoe_base", 8, 1, f"--fp16 {_CHUNKED}"),
    ("switch_gmoe_base", 8, 1, f"--fp16 {_CHUNKED} --checkpoint-activations"),
    ("switch_gmoe_base", 8, 1, f"--memory-efficient-fp16 {_CHUNKED}"),
    ("switch_gmoe_base", 8, 1, f"--bf16 {_CHUNKED}"),
    ("switch_gmoe_base", 8, 1, ""),
    ("switch_gmoe_base", 8, 8, f"--fp16 {_CHUNKED}"),
    ("switch_gmoe_base", 8, 8, f"--fp16 {_CHUNKED} --moe-expert-parallel"),
    ("switch_gmoe_large", 4, 8, "--fp16"),
    ("switch_gmoe_large", 12, 8, "--fp16"),
    ("switch_gmoe_large", 12, 8, ""),
    ("switch_gmoe_large", 12, 1, f"--fp16 {_CHUNKED} --checkpoint-activations"),
]
"""--arch, experts, processes (GPUs), flags; the paper trains on 8 V100 with 32 GB, 8 sequences on
each."""
BATCH = 8
LENGTH = 512
MODELS = {
    "base, 16 experts, 139M": "switch_gmoe_base --moe-expert-count 16",
    "large, 16 experts, 549M": "switch_gmoe_large --moe-expert-count 16",
    "GPT-3 XL, dense, 1.3B": "transformer_lm_gpt3_xl",
}
"""--arch and its flags."""
CARDS = (1, 8, 16)
SAVINGS = {
    "nothing": "",
    "checkpointed": "--checkpoint-activations",
    "offloaded": "--offload-activations",
    "os": "--zero-sharding os",
    "os, checkpointed": "--zero-sharding os --checkpoint-activations",
    "expert parallel": "--moe-expert-parallel",
}
"""Flags that save memory, by the name of their column."""
OF_SEVERAL = ("--zero-sharding", "--moe-expert-parallel")
"""Flags that need several processes."""


class MetaStorages(LiveStorages):
    """Counts storages on the meta device, and gives the numbers that a step reads there."""

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # Norms are finite, and all processes have batches of the same size.
            return (
                BATCH * LENGTH if args[0].dtype is torch.int64 else args[0].dtype is not torch.bool
            )
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            to_host = kwargs.get("device") == torch.device("cpu")
            kwargs = kwargs | {"device": "meta"}  # the meta device has no values to copy
            if to_host:  # norms, and offloaded activations
                return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def like_a_gpu() -> Iterator[None]:
    """Run models on the meta device with a GPU's kernels."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, training)[0]

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False
    ) -> Tensor:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        if attn_mask is not None:  # of fairseq's own attention: a view, not a copy for each head
            attn_mask = attn_mask.expand(*q.shape[:-1], k.size(-2))
        return efficient(q, k, v, attn_mask, True, dropout_p, is_causal)[0]

    def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        fused = x.dtype == torch.float16 and dtype == torch.float32
        return torch._log_softmax(x if fused or dtype is None else x.to(dtype), dim, fused)

    def dispatcher(x_SD: Tensor, routing: Routing, capacity: int) -> PaddedDispatcher:
        return PaddedDispatcher(routing, capacity)

    with contextlib.ExitStack() as stack:
        # Autocast, which is off in these steps, does not know the meta device.
        stack.enter_context(
            mock.patch.object(torch, "autocast", return_value=contextlib.nullcontext())
        )
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", return_value=False))
        stack.enter_context(mock.patch.object(layer, "fastest_dispatcher", dispatcher))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=None))
        stack.enter_context(mock.patch.object(F, "dropout", dropout))
        stack.enter_context(mock.patch.object(F, "log_softmax", log_softmax))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        yield


def words(data: str, arch: str, *flags: str) -> list[str]:
    """A command line of fairseq-train at the paper's batch size and sequence length."""
    model = f"--arch {arch} --tokens-per-sample {LENGTH} --batch-size {BATCH}"
    training = "--optimizer adam --lr 1e-3 --max-update 10"
    return [data, "--task", "alma_lm", *model.split(), *training.split(), *flags]


class Step:
    """fairseq's training step on one of `processes`, on the meta device."""

    def __init__(self, words: Sequence[str], processes: int):
        parser = options.get_training_parser(default_task="alma_lm")
        self.cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(words)))
        self.task = tasks.setup_task(self.cfg.task)
        common = self.cfg.common
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}
        dtype = next((type_ for name, type_ in half.items() if common[name]), torch.float32)
        with torch.device("meta"):
            self.model = self.task.build_model(self.cfg.model).to(dtype)
            self.criterion = self.task.build_criterion(self.cfg.criterion)
            tokens = torch.empty(BATCH, LENGTH, dtype=torch.int64)
            inputs = {"src_tokens": tokens, "src_lengths": tokens[:, 0]}
            self.sample: dict[str, Any] = {
                "nsentences": BATCH,
                "ntokens": BATCH * LENGTH,
                "padded": False,
            }
            self.sample |= {"target": tokens, "net_input": inputs}
        self.trained: torch.nn.Module = self.model
        if processes > 1:
            kind = torch.nn.parallel.DistributedDataParallel
            experts = [
                name for name, param in self.model.named_parameters() if hasattr(param, "expert")
            ]
            kind._set_params_and_buffers_to_ignore_for_model(self.model, experts)
            parallel = kind(self.model, init_sync=False, broadcast_buffers=False)
            parallel.register_comm_hook(None, noop_hook)
            self.trained = ModuleProxyWrapper(parallel)
        params = [param for param in self.model.parameters() if param.requires_grad]
        common.fp16_no_flatten_grads = True
        if dtype is torch.float32:
            self.optimizer = optim.build_optimizer(self.cfg.optimizer, params)
        elif common.memory_efficient_fp16 or common.memory_efficient_bf16:
            self.optimizer = optim.MemoryEfficientFP16Optimizer.build_optimizer(self.cfg, params)
        else:
            self.optimizer = optim.FP16Optimizer.build_optimizer(self.cfg, params)
        holds_state = self.optimizer.optimizer
        if self.cfg.distributed_training.zero_sharding == "os":
            optim.shard_(self.optimizer, dist.group.WORLD)
            holds_state = self.optimizer.optimizer.optim
        holds_state.__class__ = FusedAdam

    def run(self, memory: MetaStorages, peaks: dict[str, int]) -> None:
        """One update; the peak of each phase, in bytes, in `peaks`."""
        self.optimizer.zero_grad()
        with memory.phase(peaks, "forward and backward"):
            self.task.train_step(self.sample, self.trained, self.criterion, self.optimizer, 0)
        with memory.phase(peaks, "update"):
            self.optimizer.multiply_grads(1 / self.sample["ntokens"])
            self.optimizer.clip_grad_norm(self.cfg.optimization.clip_norm)
            self.optimizer.step()


def _communicated(*_: Any, **__: Any) -> SimpleNamespace:
    """The handle of a collective that has nothing to do; a mock would keep its tensors."""
    return SimpleNamespace(wait=lambda: True)


def count(words: Sequence[str], processes: int) -> dict[str, int]:
    """Peak bytes of each phase of a training step."""
    with contextlib.ExitStack() as stack:
        if processes > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            stack.callback(vars(distributed_utils.get_global_group).pop, "_global_group", None)
            stack.callback(dist.destroy_process_group)
            # DistributedDataParallel reorders its buckets once: values go between processes, sizes
            # stay.
            stack.enter_context(
                mock.patch.object(dist.Reducer, "_rebuild_buckets", return_value=False)
            )
            # They fill tensors that are there; torch before 2.8 has no such kernels for the meta
            # device.
            for collective in ("all_reduce", "all_to_all_single", "broadcast"):
                stack.enter_context(mock.patch.object(dist, collective, _communicated))
        stack.enter_context(like_a_gpu())
        memory = stack.enter_context(MetaStorages())
        step = Step(words, processes)
        step.run(memory, {})  # makes the optimizer's state
        peaks: dict[str, int] = {}
        step.run(memory, peaks)
        return peaks


def estimated(words: Sequence[str], vocabulary: int, processes: int = 1) -> int:
    """Bytes of a training step in the estimate of `alma train`, without those of CUDA's context."""
    resolved = check.resolve(list(words))
    settings = resolved["settings"] | {
        "--arch": resolved["arch"],
        "--distributed-world-size": processes,
    }
    cost = Cost(Path(), settings, vocabulary, Machine((V100,) * processes, None))
    assert cost.memory is not None
    return cost.memory - int(PROCESS)


@contextlib.contextmanager
def dictionary(tokens: int) -> Iterator[str]:
    """A folder with a dict.txt, in place of data; fairseq's log is off."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()
        Path(folder, "dict.txt").write_text("".join(f"{number} 1\n" for number in range(tokens)))
        yield folder


def measure(
    vocabulary: int = VOCABULARY, settings: Sequence[tuple[str, int, int, str]] = SETTINGS
) -> Rows:
    """A row for each of the `settings`: arch, experts, processes, flags."""
    rows = []
    with dictionary(vocabulary) as data:
        for arch, experts, processes, flags in tqdm(settings, disable=None):
            line = words(data, arch, "--moe-expert-count", str(experts), *flags.split())
            peaks = count(line, processes)
            guess = estimated(line, vocabulary, processes)
            counted = max(peaks.values())
            rows.append(
                {
                    "model": f"{arch.removeprefix('switch_gmoe_')}, {experts} experts",
                    "flags": flags.replace(_CHUNKED, "chunked loss"),
                    "processes": processes,
                    **{f"{phase}, GB": f"{peak / 1e9:.2f}" for phase, peak in peaks.items()},
                    "estimate, GB": f"{guess / 1e9:.2f}",
                    "estimate / count": f"{guess / counted:.3f}",
                    "fits 32 GB": "yes" if counted + PROCESS < V100 else "no",
                }
            )
    return rows


def measure_savings(
    vocabulary: int = VOCABULARY, models: Mapping[str, str] = MODELS, cards: Sequence[int] = CARDS
) -> Rows:
    """A row for each model and number of GPUs: GB of one GPU, CUDA's context included, by the flags
    that save memory; in fp16 with the chunked loss. `-`: the flags do not apply."""
    rows = []
    ratios = []
    with dictionary(vocabulary) as data:
        for (model, arch), processes in tqdm(list(product(models.items(), cards)), disable=None):
            row: dict[str, Any] = {"model": model, "GPUs": processes}
            for saving, flags in SAVINGS.items():
                if not applies(arch, flags, processes):
                    row[saving] = "-"
                    continue
                line = words(data, *arch.split(), *f"--fp16 {_CHUNKED} {flags}".split())
                counted = max(count(line, processes).values())
                ratios.append(estimated(line, vocabulary, processes) / counted)
                fits = counted + PROCESS < V100
                row[saving] = f"{(counted + PROCESS) / 1e9:.1f}{'' if fits else ' (too much)'}"
            rows.append(row)
    print(f"estimate / count: {min(ratios):.2f} to {max(ratios):.2f}")
    return rows


def applies(arch: str, flags: str, processes: int) -> bool:
    """Whether the `flags` of SAVINGS are accepted for a model on so many processes."""
    if processes == 1 and flags.startswith(OF_SEVERAL):
        return False
    return arch.startswith("switch_") or "--moe-expert-parallel" not in flags
