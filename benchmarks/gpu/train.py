"""Step `train`: tokens per second, model FLOPs and peak memory of fairseq-train at the paper's sizes.

Every row is a process of its own, one after another. MFU is the model's FLOPs, without attention scores as in
the paper, over those of a large matrix product in the same dtype in this step. Peak memory is torch's, in an
update; the estimate is that of `alma train --dry-run`, without the context of CUDA.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.gpu.switch import DTYPES
from benchmarks.gpu.training import Data, Model, random_data, train
from benchmarks.timing import device, finished, seconds
from benchmarks.training_memory import estimated

CHUNKED = "--criterion chunked_cross_entropy"
PRECISIONS = {"--bf16": "bf16", "--fp16": "fp16", "--amp": "fp16", "": "fp32"}
"""Flags, and the dtype of the matrix products."""
MORE = ("--compile", CHUNKED, f"{CHUNKED} --compile", "--update-freq 3", "--batch-size 8")
INTERVAL, WARM_UP = 5, 2
"""Updates of a measurement; measurements before the first that counts."""


def settings(tiny: bool) -> list[tuple[Model, str]]:
    """Models and flags; what matters most comes first, and transformer_lm before its peers."""
    base, peer = Model("base", 8, tiny), Model("base", 0, tiny)
    if tiny:
        return [(peer, ""), (base, "")]
    large, large_peer = Model("large", 12), Model("large", 0)
    return [
        *((model, flags) for flags in PRECISIONS for model in (peer, base)),
        *((base, f"--bf16 {more}") for more in MORE),
        *((model, flags) for flags in ("--bf16", "--fp16") for model in (large_peer, large)),
        *((large, f"--bf16 {more}") for more in ("--compile", "--checkpoint-activations")),
        (base, "--fp16 --batch-size 8 --update-freq 3"),
        (large, ""),
    ]


def cases(asked: Asked) -> Iterator[Case]:
    """A process each."""
    with random_data(asked.tiny) as data:
        peak = {name: product(dtype, 64 if asked.tiny else 8192) for name, dtype in DTYPES.items()}
        rates = {f"{name}, TFLOP/s": rate / 1e12 for name, rate in peak.items()}
        yield {"model": "matrix product"}, partial(dict, rates)
        speeds: dict[tuple[str, str], float] = {}
        for model, flags in settings(asked.tiny):
            labels = {"model": model.name, "flags": flags or "fp32"}
            yield labels, partial(measure, data, model, flags, asked, peak, speeds)


def product(dtype: torch.dtype, size: int) -> float:
    """FLOPs per second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
    finished(lambda: a @ b, 3)
    return median(10 * 2 * size**3 / seconds(partial(finished, lambda: a @ b, 10)) for _ in range(5))


def measure(
    data: Data,
    model: Model,
    flags: str,
    asked: Asked,
    peak: dict[str, float],
    speeds: dict[tuple[str, str], float],
) -> Row:
    """Train; compare with transformer_lm, if that has run with the same flags."""
    words = data.words(model, f"{flags} --no-save", INTERVAL * (WARM_UP + asked.repeats), INTERVAL)
    records = train(words, asked.log)[WARM_UP:]
    row: Row = {"tokens/s": [record["wps"] for record in records]}
    speed = speeds[model.name, flags] = median(row["tokens/s"])
    row["TFLOP/s"] = speed * data.flops(model) / 1e12
    row["MFU"] = speed * data.flops(model) / peak[PRECISIONS[flags.split(" ")[0]]]
    if model.experts and (other := speeds.get((Model(model.size, 0).name, flags))):
        row["speed / transformer_lm"] = speed / other
    if model.experts:
        row["estimate GB"] = estimated(words, data.vocabulary - 4) / 1e9
    if "gb_free" in records[-1]:  # on a GPU
        total = torch.cuda.get_device_properties(0).total_memory
        row["peak GB"] = (total - records[-1]["gb_free"] * 2**30) / 1e9
    return row
