"""Updates that never wait for the GPU.

fairseq waits several times in each update: it tests whether the norm of the gradients is finite,
and computes its statistics on the host. Meanwhile the GPU runs out of work. Here the host reads the
norm an update later, and the statistics when they are logged, validated or saved:

* The fused Adam gets a flag on the GPU and leaves weights and moments as they are if the norm is
  not finite, or differs between the processes. The weight average takes an update's weights once
  the host has read its flag.
* If the flag says so, the update is taken back and repeated with fairseq's own test, which ends the
  training with fairseq's message. The seed is that of the update, so dropout repeats too. No
  checkpoint is written before the flag of its last update has been read.

With several processes, neither the sums over them nor the gradients' factor wait. All numbers stay
equal to the bit. Other optimizers, and --fp16, whose loss scale depends on the
norm, wait once in each update. Unnecessary once fairseq tests the norm on the device.

`hooks` replaces methods of fairseq's Trainer by functions of this module. Their first argument is
the replaced method.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from torch import Tensor

from fairseq_alma.training.adam import FusedAdam
from fairseq_alma.training.weight_average import WeightAverage


class HostCopy:
    """Values of tensors on the host. The copy is queued after the work of the tensors' device."""

    def __init__(self, tensors: list[Tensor]):
        self._tensors: list[Tensor] = []  # those on the host; of the others shape and dtype
        self._event: torch.cuda.Event | None = None
        numbers = defaultdict(list)
        for tensor in tensors:
            if _is_on_device(tensor):
                numbers[tensor.dtype].append(tensor.detach().reshape(-1))
                self._tensors.append(torch.empty_like(tensor, device="meta"))
            else:
                self._tensors.append(tensor)
        if not numbers:
            return
        self._joined: dict[torch.dtype, Tensor] = {}
        for dtype, parts in numbers.items():
            joined = torch.cat(parts)
            memory = torch.empty(joined.shape, dtype=dtype, pin_memory=True)
            self._joined[dtype] = memory.copy_(joined, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> list[Tensor]:
        """The tensors on the host; waits until the device has computed them."""
        if self._event is None:
            return self._tensors
        self._event.synchronize()
        starts: defaultdict[torch.dtype, int] = defaultdict(int)
        on_host = []
        for tensor in self._tensors:
            if not _is_on_device(tensor):
                on_host.append(tensor)
                continue
            start = starts[tensor.dtype]
            end = start + tensor.numel()
            on_host.append(self._joined[tensor.dtype][start:end].view(tensor.shape))
            starts[tensor.dtype] = end
        return on_host


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


class Statistics:
    """The norm and fairseq's logging outputs of an update, on their way to the host."""

    def __init__(self, norm: Tensor, outputs: list[dict[str, Any]]):
        self._outputs = []
        tensors = [norm]
        for output in outputs:
            tensors += [value for value in output.values() if isinstance(value, Tensor)]
            numbers = {key: value for key, value in output.items() if not isinstance(value, Tensor)}
            self._outputs.append(dict.fromkeys(output) | numbers)  # frees the device's tensors
        self._copy = HostCopy(tensors)

    def read(self) -> tuple[Tensor, list[dict[str, Any]]]:
        """The norm and the logging outputs, on the host."""
        norm, *tensors = self._copy.read()
        values = iter(tensors)
        outputs = []
        for output in self._outputs:
            on_host = {}
            for key, value in output.items():
                on_host[key] = next(values) if value is None else value
            outputs.append(on_host)
        return norm, outputs


@dataclass(eq=False)
class Unread:
    """An update whose flag the host has not read."""

    samples: list[Any]
    flag: HostCopy
    """1 if the norm is not finite, or differs between the processes, else 0."""
    statistics: Statistics | None = None


class NotFinite(Exception):
    """The norm of `LateUpdates.unread` is not finite: call `LateUpdates.repeat`."""


class LateUpdates:
    """What the host has not read yet of a trainer's updates."""

    def __init__(self, trainer, optimizer: Any):
        """`optimizer` is the one that updates the parameters of this process."""
        config = trainer.cfg
        self.trainer = trainer
        self.optimizer = optimizer
        self.can_defer = (
            isinstance(optimizer, FusedAdam)
            and optimizer.is_fused
            and getattr(trainer.optimizer, "scaler", None) is None
            and not config.optimization.use_bmuf
            and config.distributed_training.ddp_backend != "slowmo"
        )
        self.is_repeating = False
        self.samples: list[Any] = []  # the batches of the update that is running
        self.norm = torch.zeros(())  # the norm of its gradients
        self.unread: Unread | None = None
        self.statistics: list[Statistics] = []

    def defers(self) -> bool:
        """Whether the host reads the norm of the running update in the next one."""
        average = self.trainer._ema
        is_ours = average is None or isinstance(average, WeightAverage)
        return self.can_defer and is_ours and not self.is_repeating

    def begin(self) -> None:
        """Set the flag of the running update; its optimizer step follows. Collective."""
        trainer = self.trainer
        is_good = self.norm.isfinite()
        norms = trainer._grad_norm_buf
        if norms is not None:  # one for each process
            norms.zero_()
            norms[trainer.data_parallel_rank] = self.norm
            distributed_utils.all_reduce(norms, group=trainer.data_parallel_process_group)
            # fairseq's test. A comparison with nan is False.
            differences = (norms - norms[0]).abs()
            is_good = (differences.max() / (norms[0] + 1e-6) < 1e-6) & norms.isfinite().all()
        flag = is_good.logical_not().float()
        self.optimizer.found_inf = flag
        self.unread = Unread(self.samples, HostCopy([flag]))
        if trainer._ema is not None:
            trainer._ema.is_late = True

    def check(self) -> None:
        """Read the flag of the last update, and let the average take its weights.

        Raises NotFinite if the flag is set.
        """
        if self.unread is None:
            return
        (flag,) = self.unread.flag.read()
        if flag.tolist():
            raise NotFinite
        self.unread = None
        if self.trainer._ema is not None:
            self.trainer._ema.catch_up()

    def repeat(self) -> Any:
        """Take the last update back and repeat it with fairseq's test, which raises its error.

        Returns the output of the update if its norm is finite this time.
        """
        trainer = self.trainer
        unread = self.unread
        assert unread is not None
        self.unread = None
        self.statistics = [entry for entry in self.statistics if entry is not unread.statistics]
        self.optimizer.found_inf = None
        self.optimizer.undo_step()
        if trainer._ema is not None:
            trainer._ema.is_late = False
            trainer._ema.due = None
        trainer.set_num_updates(trainer.get_num_updates() - 1)
        self.is_repeating = True
        try:
            return trainer.train_step(unread.samples)
        finally:
            self.is_repeating = False

    def log(self) -> None:
        """Log the statistics as fairseq does after each update."""
        if not self.statistics:
            return
        trainer = self.trainer
        clip_norm = trainer.cfg.optimization.clip_norm
        # fairseq's names, also if its own contexts have ended.
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            for entry in self.statistics:
                norm, outputs = entry.read()
                metrics.log_speed("ups", 1.0, priority=100, round=2)
                metrics.log_scalar("gnorm", norm, priority=400, round=3)
                if clip_norm > 0:
                    percent = torch.where(norm > clip_norm, 100.0, 0.0)
                    metrics.log_scalar("clip", percent, priority=500, round=1)
                trainer.task.reduce_metrics(outputs, trainer.get_criterion())
                if "loss" in trainer._warn_once:  # the criterion logs none
                    metrics.log_scalar("loss", -1)
        self.statistics = []


def of(trainer) -> LateUpdates | None:
    """What `hooks` attached to a trainer of the task alma_lm; None for others."""
    return getattr(trainer, "late", None)


def settle(trainer) -> None:
    """Read all of the updates so far. Raises FloatingPointError as fairseq's train_step does."""
    late = of(trainer)
    if late is None:
        return
    try:
        late.check()
    except NotFinite:
        late.repeat()
    late.log()


def train_step(original, trainer, samples, *args, **kwargs):
    """Repeat the update before, or this one, if its norm was not finite."""
    trainer.optimizer  # noqa: B018 - builds it, and with it `LateUpdates`
    late = of(trainer)
    if late is None:
        return original(trainer, samples, *args, **kwargs)
    late.samples = samples
    try:
        return original(trainer, samples, *args, **kwargs)
    except NotFinite:
        repeats_this = late.unread is not None and late.unread.samples is samples
        output = late.repeat()
    if repeats_this:
        return output
    return trainer.train_step(samples, *args, **kwargs)


def clip_grad_norm(original, trainer, clip_norm: float) -> Tensor:
    """Return a norm on the host, which fairseq can test without a wait: 0 if the update defers."""
    norm = original(trainer, clip_norm)
    late = of(trainer)
    if late is None:
        return norm
    late.norm = norm
    late.check()
    return torch.zeros(()) if late.defers() else norm.cpu()


def check_grad_norms(original, trainer, norm: Tensor) -> None:
    """Leave the test of the norms to the next update if this one defers."""
    late = of(trainer)
    if late is None or not late.defers():
        original(trainer, norm)
    else:
        late.begin()


def reduce_and_log_stats(original, trainer, outputs, sample_size, norm=None) -> dict[str, Any]:
    """Keep the statistics of an update until they are logged.

    The first update of a process logs at once: fairseq's speed meters start with it.
    """
    late = of(trainer)
    if late is None or norm is None:  # norm None: validation
        return original(trainer, outputs, sample_size, norm)
    if not all("ups" in meters for meters in metrics.get_active_aggregators()):
        return original(trainer, outputs, sample_size, late.norm)
    entry = Statistics(late.norm, outputs)
    late.statistics.append(entry)
    if late.unread is not None:
        late.unread.statistics = entry
    if trainer.get_num_updates() % trainer.cfg.common.log_interval == 0:
        late.check()
        late.log()
    return {}


class _SampleSize(Tensor):
    """The sample size of all processes, on the device. fairseq's `sample_size or 1.0` reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __bool__(self) -> bool:
        """True, without reading: it is not 0, see `aggregate_logging_outputs`."""
        return True


def aggregate_logging_outputs(original, trainer, outputs, sample_size, *counts, **kwargs):
    """Put 1 for a sample size of 0, as fairseq's `sample_size or 1.0` does, but on the device."""
    outputs, (total, *counts) = original(trainer, outputs, sample_size, *counts, **kwargs)
    if of(trainer) is not None and isinstance(total, Tensor):
        total = torch.where(total == 0, 1.0, total).as_subclass(_SampleSize)
    return outputs, (total, *counts)


def all_reduce_dict(original, data, device: torch.device, group) -> dict[str, Any]:
    """Copy the numbers on the host to the device without a wait; fairseq's own copy waits."""
    names = []
    numbers = []
    for name, value in data.items():
        if not isinstance(value, Tensor):
            names.append(name)
            numbers.append(value)
    if not names:
        return original(data, device, group)
    on_host = torch.tensor(numbers, dtype=torch.double)
    on_device = on_host.to(device, non_blocking=True).unbind()
    return original({**data, **dict(zip(names, on_device, strict=True))}, device, group)


def begin_valid_epoch(original, trainer, epoch: int) -> None:
    """Validate no weights of an update that has not been checked."""
    settle(trainer)
    original(trainer, epoch)


def consolidate_optimizer(original, trainer) -> None:
    """Save no weights of an update that has not been checked; fairseq calls this first."""
    settle(trainer)
    original(trainer)
