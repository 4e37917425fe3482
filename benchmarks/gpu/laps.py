"""A training by fairseq-train in this process, measured: what is left of one for the next is only
what Python has imported.

After WARM_UP updates the clock is read every INTERVAL updates, for which the host waits for the
GPU, until `seconds` have passed. Then some updates are profiled, and the training ends.
"""

import contextlib
import gc
import io
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
from torch import profiler as torch_profiler

from alma.errors import UserError
from benchmarks.gpu import kernels
from benchmarks.gpu.process import Row
from benchmarks.timing import finished

WARM_UP = 12
"""Updates before the clock starts: kernels are compiled, and the allocator is filled."""
INTERVAL = 10
"""Updates of a measurement."""
PROFILED = 6
ENDLESS = 1_000_000
"""Updates of a training that ends by the clock."""
FULL = "highest"
"""torch's precision of fp32 products without TF32."""
LOGGER = "fairseq.logging.progress_bar"


@dataclass
class Lengths:
    """Of the parts of a training."""

    seconds: float
    """Measured at least."""
    warm_up: int = WARM_UP
    interval: int = INTERVAL
    profiled: int = PROFILED
    updates: int = 0
    """Measured at least."""


@dataclass
class Stopwatch:
    """Takes the place of Trainer.train_step and measures it."""

    lengths: Lengths
    intervals: list[float] = field(default_factory=list)
    """Seconds of an update, by interval."""
    profile: Row = field(default_factory=dict)
    calls: int = 0
    started: float = 0.0
    inside: float = 0.0
    profiler: Any = None

    def train_step(self, original: Any, trainer: Trainer, samples: Any) -> Any:
        """An update by `original`, which raises if memory runs out: fairseq would go on."""
        self._begin()
        before = time.perf_counter()
        result = original(trainer, samples, raise_oom=True)
        self.inside += time.perf_counter() - before
        self.calls += 1
        if self._is_over():
            # fairseq reads it after each update
            trainer.cfg.optimization.max_update = max(1, trainer.get_num_updates())
        return result

    @property
    def _measured(self) -> int:
        """Updates since the warm-up, but for profiled ones."""
        return self.lengths.interval * len(self.intervals)

    def _begin(self) -> None:
        """Before an update."""
        torch.compiler.cudagraph_mark_step_begin()
        if self.calls == self.lengths.warm_up:
            self._start_clock()

    def _is_over(self) -> bool:
        """After an update: read the clock where that is due; whether the training has what it is
        for."""
        since = self.calls - self.lengths.warm_up - self._measured
        if self.profiler is not None:
            if since < self.lengths.profiled:
                return False
            self._end_profile()
            return True
        if since < self.lengths.interval:
            return False
        finished(dict, 0)  # waits for the GPU
        self.intervals.append((time.perf_counter() - self.started) / self.lengths.interval)
        has_time = self.lengths.interval * sum(self.intervals) >= self.lengths.seconds
        if not has_time or self._measured < self.lengths.updates:
            self._start_clock()
            return False
        self._begin_profile()
        return False

    def _start_clock(self) -> None:
        finished(dict, 0)
        self.started = time.perf_counter()

    def _begin_profile(self) -> None:
        # Without the operators of the host the profiler hardly slows it down.
        activity = torch_profiler.ProfilerActivity.CPU
        if torch.cuda.is_available():
            activity = torch_profiler.ProfilerActivity.CUDA
        self.profiler = torch_profiler.profile(activities=[activity])
        self.profiler.start()
        self._start_clock()
        self.inside = 0.0

    def _end_profile(self) -> None:
        finished(dict, 0)
        wall = time.perf_counter() - self.started
        self.profiler.stop()
        updates = self.lengths.profiled
        self.profile = kernels.shares(self.profiler.events(), wall, self.inside, updates)


class Log(logging.Handler):
    """Keeps what fairseq logs of each interval."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log."""
        if record.name == "train_inner":
            self.losses.append(float(json.loads(record.getMessage())["loss"]))


@dataclass
class Lap:
    """What a training has shown."""

    intervals: list[float]
    """Seconds of an update."""
    profile: Row
    losses: list[float]
    """As logged, in bits a token."""
    peak: int
    """Bytes of the GPU; 0 without one."""
    tf32: bool
    """Whether fp32 products took TF32."""


def lap(words: Sequence[str], lengths: Lengths) -> Lap:
    """Run `fairseq-train` with `words`. UserError: it ended without a measurement."""
    stopwatch = Stopwatch(lengths)
    log = Log()
    original = Trainer.train_step

    def train_step(trainer: Trainer, samples: Any, **_: Any) -> Any:
        return stopwatch.train_step(original, trainer, samples)

    with contextlib.ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(listening(log))
        stack.enter_context(mock.patch.object(Trainer, "train_step", train_step))
        # of an update that has failed
        stack.enter_context(mock.patch.object(Trainer, "save_checkpoint"))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # fairseq resets the peak in each update
        stack.enter_context(mock.patch.object(torch.cuda, "reset_peak_memory_stats"))
        train(words)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        tf32 = torch.get_float32_matmul_precision() != FULL
    if not stopwatch.profile:
        raise UserError(f"the training ended after {stopwatch.calls} updates, unmeasured")
    return Lap(stopwatch.intervals, stopwatch.profile, log.losses, peak, tf32)


def train(words: Sequence[str]) -> None:
    """`fairseq-train` in this process. UserError: it has exited."""
    with mock.patch.object(sys, "argv", ["fairseq-train", *words]):
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                cli_main()
        except SystemExit as ended:
            if ended.code:
                text = errors.getvalue().strip()[-300:]
                raise UserError(f"exit code {ended.code}: {text}") from ended
        finally:
            print(errors.getvalue())


@contextlib.contextmanager
def listening(log: Log) -> Iterator[None]:
    """Give `log` what fairseq logs."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(log)
    try:
        yield
    finally:
        logger.removeHandler(log)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Undo what a training changes for its whole process, and free its memory."""
    precision = torch.get_float32_matmul_precision()
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        metrics.reset()
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
