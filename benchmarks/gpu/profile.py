"""Step `profile`: where the time of an update goes, by torch.profiler.

Shares of the wall-clock time of UPDATES updates of fairseq-train: `outside updates` is data loading, logging
and the rest of fairseq's loop; `host waits` are calls that wait for the GPU; `GPU idle` is the time without a
kernel or copy. The profiler itself takes time on the host, so idle and waits are upper bounds.

    python -m benchmarks.gpu.profile OUT.json WORDS OF fairseq-train
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from alma.errors import UserError
from alma.files import write_json_atomic
from benchmarks.gpu import frame
from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.gpu.training import Model, random_data
from benchmarks.timing import finished

WARM_UP, UPDATES = 10, 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""CUDA's calls that return when the GPU is done; cudaMemcpyAsync, which may not wait, is not one."""
KERNELS = 4


def cases(asked: Asked) -> Iterator[Case]:
    """A process each."""
    base, peer = Model("base", 8, asked.tiny), Model("base", 0, asked.tiny)
    settings = [(base, "--bf16"), (peer, "--bf16"), (base, "--fp16"), (base, "--bf16 --compile"), (base, "")]
    settings += [(base, "--bf16 --batch-size 8"), (Model("large", 12), "--bf16")]
    with random_data(asked.tiny) as data:
        for number, (model, flags) in enumerate(settings[:1] if asked.tiny else settings):
            words = data.words(model, f"{flags} --no-save", WARM_UP + UPDATES + 1, 1000)
            out = data.folder / f"{number}"
            labels = {"model": model.name, "flags": flags or "fp32"}
            yield labels, partial(measure, words, asked.log, out)


def measure(words: list[str], log: Path, out: Path) -> Row:
    """Shares of a profiled process."""
    code, text = frame.child(["benchmarks.gpu.profile", str(out), *words], log)
    if code or not out.exists():
        raise UserError(f"exit code {code}: {text[-200:]}")
    return json.loads(out.read_text())


def profiled(out: Path) -> Any:
    """A Trainer.train_step that profiles updates WARM_UP to WARM_UP + UPDATES and writes their shares."""
    from fairseq.trainer import Trainer
    from torch.profiler import profile

    original, profiler, called, inside, started = Trainer.train_step, profile(), 0, 0.0, 0.0

    def train_step(self: Trainer, samples: Any, *arguments: Any) -> Any:
        nonlocal called, inside, started
        if called == WARM_UP:
            profiler.start()
            finished(dict, 0)  # waits for the GPU
            started, inside = time.perf_counter(), 0.0
        if called == WARM_UP + UPDATES:
            finished(dict, 0)
            wall = time.perf_counter() - started
            profiler.stop()
            write_json_atomic(out, shares(profiler.events(), wall, inside))
        called, before = called + 1, time.perf_counter()
        result = original(self, samples, *arguments)
        inside += time.perf_counter() - before
        return result

    return train_step


def shares(events: Iterable[Any], wall: float, inside: float) -> Row:
    """The row of `wall` seconds, of which `inside` were in updates, from torch.profiler's events."""
    found = list(events)
    gpu = [event for event in found if str(event.device_type).endswith("CUDA")]
    on_gpu = [event for event in gpu if not event.is_user_annotation]  # those are names of blocks of kernels
    waits = [event for event in found if event.name in WAITS]
    kernels: Counter[str] = Counter()
    for event in on_gpu:
        kernels[event.name[:40]] += event.time_range.elapsed_us()
    busy = union([(event.time_range.start, event.time_range.end) for event in on_gpu]) / 1e6
    top = [f"{name} {microseconds / 1e6 / wall:.0%}" for name, microseconds in kernels.most_common(KERNELS)]
    return {
        "update, ms": 1000 * wall / UPDATES,
        "outside updates": 1 - inside / wall,
        "host waits": sum(event.time_range.elapsed_us() for event in waits) / 1e6 / wall,
        "waits / update": len(waits) / UPDATES,
        "GPU idle": 1 - busy / wall,
        "kernels / update": len(on_gpu) / UPDATES,
        "longest kernels": "; ".join(top),
    }


def union(intervals: list[tuple[float, float]]) -> float:
    """The length of what at least one interval covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def main() -> None:
    """Run fairseq-train with a profiled trainer."""
    out, *words = sys.argv[1:]
    from fairseq.trainer import Trainer
    from fairseq_cli.train import cli_main

    sys.argv = ["fairseq-train", *words]
    with mock.patch.object(Trainer, "train_step", profiled(Path(out))):
        cli_main()


if __name__ == "__main__":
    main()
