"""Step `ladder`: what each change of an update gains, in twelve minutes of a GPU.

All cases run in one process, each with a model and trainer of its own; changes are taken back by
`benchmarks.gpu.before`. `+gelu` has that change, `+foreach` that and the one before it, and so on;
`all` has all of them and `--compile`. `off again` shows the drift of the machine.

FLOPs of a token are 6 for each weight of a matrix product that is active, the output layer's
included, and 12 L D T for attention. They are divided by those of a large matrix product of this
run in the same dtype, and in half precision by the 989 TFLOP/s of the data sheet of an H100 or
H200. `text` trains on documentation of Python with all changes and without any: losses differ by
at most TOLERANCE.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import profiler as torch_profiler

from alma.errors import UserError
from alma.flops import BACKWARD, Shape
from benchmarks.gpu import before, kernels
from benchmarks.gpu.language import CHUNKED, COMPILED, RandomTokens, product
from benchmarks.gpu.laps import ENDLESS, FULL, INTERVAL, Lap, Lengths, lap, train
from benchmarks.gpu.process import Cases, Row
from benchmarks.gpu.stream import make_stream
from benchmarks.gpu.tests import tests_of_an_update
from benchmarks.timing import device, finished
from benchmarks.training_memory import estimated
from fairseq_alma.moe.layer import SwitchFFN

DATA_SHEET = 989e12
"""FLOPs per second of an H100 or H200 in bf16 or fp16, dense."""
BF16 = "--bf16"
EXPERTS = 8
SECONDS = 8.0
"""Measured of a training."""
TEXT_UPDATES = 300
TOLERANCE = 0.01
CHUNKS = (1024, 4096, 8192)
TOKENS = (4096, 16_384, 32_768, 65_536)
"""Of a Switch layer alone."""
COMPILED_TOKENS = (4096, 16_384)
"""Those where the host sets the time of a layer that is not compiled."""
LAYER_PASSES = 20
REDUCED = "reduce-overhead"
"""Mode of torch.compile: CUDA graphs."""


@dataclass(frozen=True)
class LadderTraining:
    """Of a case: a model on random tokens, with some of before.CHANGES."""

    name: str
    changes: Sequence[str] = before.CHANGES
    flags: str = BF16
    size: str = "base"
    experts: int = EXPERTS
    mode: str = ""
    """Of torch.compile."""

    @property
    def labels(self) -> Row:
        """Of its case."""
        model = f"{self.size}, {self.experts} experts" if self.experts else f"{self.size}, dense"
        return {"case": self.name, "model": model, "flags": self.flags or "fp32"}

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrix products."""
        if "--bf16" in self.flags:
            return torch.bfloat16
        return torch.float16 if "--fp16" in self.flags else torch.float32


ALL = LadderTraining("all", flags=f"{BF16} {COMPILED}")


def rungs() -> list[LadderTraining]:
    """Trainings with one change after another."""
    trainings = []
    for count, change in enumerate(before.CHANGES, start=1):
        trainings.append(LadderTraining(f"+{change}", before.CHANGES[:count]))
    trainings.append(replace(ALL, name="+compile"))
    trainings.append(replace(ALL, name=REDUCED, mode=REDUCED))
    return [*trainings, LadderTraining("off again", ())]


def chunks(tiny: bool) -> list[LadderTraining]:
    """The chunked loss by the tokens of a chunk."""
    trainings = []
    for chunk in (16, 32, 64) if tiny else CHUNKS:
        flags = f"{BF16} {CHUNKED} --loss-chunk-tokens {chunk}"
        trainings.append(LadderTraining(f"chunks of {chunk}", flags=flags))
    return trainings


def others(tiny: bool) -> list[LadderTraining]:
    """Peers and the path of a V100."""
    shorter = "--batch-size 2" if tiny else "--batch-size 8"
    return [
        LadderTraining("large", size="large", experts=12, flags=f"{BF16} {COMPILED}"),
        LadderTraining("transformer_lm", experts=0),
        LadderTraining("V100", flags=f"--fp16 {shorter} --update-freq 3"),
        LadderTraining("TF32", flags=""),
        LadderTraining("no TF32", flags="--no-tf32"),
    ]


def ladder(args: Any) -> Cases:
    """All cases, what decides most first."""
    tiny = args.tiny
    yield {"case": "tests of an update"}, partial(tests_of_an_update, tiny)
    data = RandomTokens.of(args)
    for training in (LadderTraining("off", ()), ALL, *rungs()):
        yield training.labels, partial(measured, training, data)
    for training in chunks(tiny):
        yield training.labels, partial(measured, training, data)
    for tokens in (64, 128) if tiny else TOKENS:
        yield {"case": "Switch beside dense", "tokens": tokens}, partial(layers, tokens, tiny)
    for training in others(tiny):
        yield training.labels, partial(measured, training, data)
    yield {"case": "one process has nothing to shard"}, partial(refused, data)
    text = Path(f"{args.environment}-ladder-text")
    yield {"case": "text: stream"}, partial(make_stream, text, 1, tiny)
    yield {"case": "text: off and on"}, partial(on_text, text, data)


def lengths_of(tiny: bool) -> Lengths:
    """Of a training on random tokens."""
    if tiny:
        return Lengths(seconds=0, warm_up=1, interval=1, profiled=1, updates=2)
    return Lengths(seconds=SECONDS)


def measured(training: LadderTraining, data: RandomTokens) -> Row:
    """Speed, time by kernel and memory of a training."""
    flags = f"{training.flags} --no-save"
    interval = 1 if data.tiny else INTERVAL
    words = data.words(training.size, training.experts, flags, ENDLESS, interval)
    result = run(training, words, lengths_of(data.tiny))
    layers_, dim, _ = data.arch(training.size)
    shape = Shape(layers_, dim, 4 * dim, data.vocabulary, data.length, training.experts, moe_freq=2)
    tokens = tokens_of_update(words)
    flops_of_token = (1 + BACKWARD) * shape.forward_flops(1, attention_over=data.length)
    row = figures(training, result, tokens, flops_of_token, data)
    row["peak GB"] = result.peak / 1e9
    if training.changes == before.CHANGES:  # the estimate is of today's code
        row |= memory(words, result, data.vocabulary - 4)
    return row


def run(training: LadderTraining, words: Sequence[str], lengths: Lengths) -> Lap:
    """The training with its changes, and none of the others."""
    missing = [change for change in before.CHANGES if change not in training.changes]
    with ExitStack() as stack:
        stack.enter_context(before.without(missing))
        if training.mode:
            compile_with_mode = partial(torch.compile, mode=training.mode)
            stack.enter_context(mock.patch.object(torch, "compile", compile_with_mode))
        return lap(words, lengths)


def figures(
    training: LadderTraining, result: Lap, tokens: int, flops_of_token: int, data: RandomTokens
) -> Row:
    """Speeds: `tokens` are those of an update."""
    speeds = [tokens / seconds for seconds in result.intervals]
    flops = flops_of_token * median(speeds)
    row: Row = {
        "tokens/s": speeds,
        "MFLOP / token": flops_of_token / 1e6,
        "TFLOP/s": flops / 1e12,
        "of a product": flops / product_speed(training.dtype, result.tf32, data.tiny),
    }
    if training.dtype != torch.float32:
        row["of the data sheet"] = flops / DATA_SHEET
    return row | result.profile | {"loss": result.losses[-1] if result.losses else None}


@cache
def product_speed(dtype: torch.dtype, tf32: bool, tiny: bool) -> float:
    """FLOPs per second of a large product of two matrices."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else FULL)
    try:
        return product(dtype, 64 if tiny else 8192)
    finally:
        torch.set_float32_matmul_precision(precision)


def tokens_of_update(words: Sequence[str]) -> int:
    """Of a command line, whose last value of a flag counts."""
    values = {"--update-freq": 1}
    for flag, value in itertools.pairwise(words):
        if flag in ("--batch-size", "--tokens-per-sample", "--update-freq"):
            values[flag] = int(value)
    return values["--batch-size"] * values["--tokens-per-sample"] * values["--update-freq"]


def memory(words: Sequence[str], result: Lap, tokens: int) -> Row:
    """The estimate of memory beside the peak; `tokens` are those of dict.txt."""
    estimate = estimated(words, tokens)
    row: Row = {"estimate GB": estimate / 1e9}
    if result.peak:
        row["peak / estimate"] = result.peak / estimate
    return row


def refused(data: RandomTokens) -> Row:
    """`--zero-sharding os` ends in one line with one process. UserError: it does not."""
    words = data.words("base", EXPERTS, f"{BF16} --zero-sharding os --no-save", 1)
    try:
        train(words)
    except UserError as error:
        message = str(error)
        if "exit code 2" in message and "--zero-sharding" in message:
            return {"message": message.splitlines()[-1]}
        raise
    raise UserError("--zero-sharding os trains with one process")


def on_text(folder: Path, data: RandomTokens) -> Row:
    """Trainings on the stream in `folder` without changes and with all of them; an error if a loss
    differs by more than TOLERANCE."""
    lengths = Lengths(seconds=0, updates=TEXT_UPDATES)
    interval = INTERVAL
    if data.tiny:
        lengths = lengths_of(tiny=True)
        interval = 1
    laps = {}
    row: Row = {}
    on_stream = data._replace(folder=folder / "stream")
    for training in (LadderTraining("off", ()), ALL):
        words = on_stream.words("base", EXPERTS, f"{training.flags} --no-save", ENDLESS, interval)
        laps[training.name] = run(training, words, lengths)
        row[f"{training.name}: loss"] = laps[training.name].losses[-1]
        row[f"{training.name}: peak GB"] = laps[training.name].peak / 1e9
    tokens = len((on_stream.folder / "dict.txt").read_text("utf-8").splitlines())
    row |= memory(words, laps[ALL.name], tokens)
    pairs = zip(laps["off"].losses, laps["all"].losses, strict=False)
    worst = max(abs(on / off - 1) for off, on in pairs)
    row |= {"updates": lengths.updates, "worst loss": f"{worst:.1e}"}
    if worst > TOLERANCE:
        row["error"] = f"a loss with all changes differs by {worst:.1%} from that without"
    return row


def layers(tokens: int, tiny: bool) -> Row:
    """Milliseconds of forward and backward passes of a Switch layer, today's and the earlier one,
    beside those of a dense layer: of kernels, of the host, and both together."""
    dim = 16 if tiny else 512
    experts = 4 if tiny else EXPERTS
    to: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
    x = torch.randn(max(1, tokens // 512), min(512, tokens), dim, requires_grad=True, **to)
    switch = SwitchFFN(dim, 4 * dim, experts, 1.0, F.gelu, nn.Identity()).to(**to)
    dense = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)).to(**to)
    passes: dict[str, tuple[nn.Module, Sequence[str]]] = {
        "dense": (dense, ()),
        "before": (switch, before.CHANGES),
        "now": (switch, ()),
    }
    row: Row = {}
    for name, (layer, missing) in passes.items():
        with before.without(missing):
            row |= times(name, partial(one_pass, layer, x))
    if tokens in COMPILED_TOKENS and torch.cuda.is_available():
        for name, layer in (("dense", dense), ("now", switch)):
            row |= times(f"{name}, compiled", partial(one_pass, torch.compile(layer), x))
        torch.compiler.reset()
    for name in ("before", "now", "now, compiled"):
        for part in ("kernels", "host", "both"):
            peer = row.get(f"dense: {part}, ms")
            if peer and f"{name}: {part}, ms" in row:
                row[f"{name} / dense: {part}"] = row[f"{name}: {part}, ms"] / peer
    return row


def one_pass(layer: Callable[[Tensor], Any], x: Tensor) -> None:
    """Forward and backward."""
    result = layer(x)
    if isinstance(result, Tensor):
        result.sum().backward()
    else:
        output, routing = result
        (output.sum() + routing.balance_loss).backward()


def times(name: str, work: Callable[[], None]) -> Row:
    """Milliseconds of a call: of its kernels, of the host that starts them, and until both are
    done."""
    finished(work, 3)
    started = time.perf_counter()
    for _ in range(LAYER_PASSES):
        work()
    host = time.perf_counter() - started
    finished(dict, 0)
    both = time.perf_counter() - started
    row = {"host": host, "both": both}
    if torch.cuda.is_available():
        with torch_profiler.profile(activities=[torch_profiler.ProfilerActivity.CUDA]) as recorded:
            finished(work, LAYER_PASSES)
        on_gpu = [event for event in recorded.events() if "CUDA" in str(event.device_type)]
        row["kernels"] = kernels.busy(on_gpu) / 1e6
    return {f"{name}: {part}, ms": 1000 * value / LAYER_PASSES for part, value in row.items()}
