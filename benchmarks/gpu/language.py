"""Steps `train`, `profile` and `resume`: whole processes of fairseq-train.

train: a Switch model and fairseq's transformer_lm of equal active size, on random tokens. MFU is
the model's FLOPs, without attention scores as in the paper, over those of a large matrix product in
the same dtype. Peak memory is torch's, in an update; the estimate is that of `alma train
--dry-run`, without CUDA's context.

profile: shares of the wall-clock time of PROFILED updates. `outside updates` is data loading,
logging and the rest of fairseq's loop; the others are those of `benchmarks.gpu.kernels`.

resume: SIGTERM ends fairseq-train at once: it resumes from the last checkpoint and repeats the
updates since then. After SIGUSR1 it saves first (exit code 75) and repeats none. On a GPU sums have
no fixed order, so losses are equal within TOLERANCE. `worst loss` and `weights` are relative
differences.

torch and fairseq are imported where a step itself needs them: most of it happens in its child
processes.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

from alma.errors import UserError
from alma.files import write_json_atomic
from alma.flops import ARCHS, Arch, Shape
from benchmarks.gpu import kernels, process
from benchmarks.gpu.process import Cases, Row
from benchmarks.timing import device, finished, seconds

OPTIMIZER = "--optimizer adam --adam-betas (0.9,0.98) --lr 2e-4 --clip-norm 1 --num-workers 0"
"""The same for both tasks, whose defaults differ."""
DENSE = (
    "--task language_modeling --arch transformer_lm --activation-fn gelu "
    "--decoder-normalize-before --decoder-learned-pos --share-decoder-input-output-embed"
)
"""fairseq's Transformer with as many active parameters."""
COMPILED = "--compile"
CHUNKED = f"{COMPILED} --criterion chunked_cross_entropy"
SETTINGS = [
    ("base", 8, "--bf16"),
    ("base", 8, f"--bf16 {COMPILED}"),
    ("base", 8, f"--bf16 {CHUNKED}"),
]
SETTINGS += [("large", 12, "--bf16"), ("base", 8, "--fp16"), ("base", 8, "")]
SETTINGS += [("base", 8, "--fp16 --batch-size 8 --update-freq 3")]
"""Size, experts and flags, the most important first."""
INTERVAL = 5
"""Updates of a measurement."""
INTERVALS = 8
"""Measurements that count."""
WARM_UP = 2
"""Measurements before them."""


class RandomTokens(NamedTuple):
    """A stream of random tokens for all steps, and models of the paper's sizes on it: tiny ones on
    a CPU."""

    folder: Path
    tiny: bool
    vocabulary: int
    """Of the model, special tokens included."""
    length: int

    @classmethod
    def of(cls, args: Any) -> "RandomTokens":
        """Written by the first step that asks."""
        sizes = (104, 32) if args.tiny else (50_264, 512)
        data = cls(Path(f"{args.environment}-tokens-{sizes[0]}"), args.tiny, *sizes)
        if not (data.folder / "stream.json").exists():
            from benchmarks.streams import write_stream

            data.folder.mkdir(parents=True, exist_ok=True)
            write_stream(data.folder, 40_000 if args.tiny else 8_000_000, 70, data.vocabulary - 4)
        return data

    def arch(self, size: str) -> Arch:
        """Layers, width and heads."""
        return Arch(layers=2, dim=32, heads=2) if self.tiny else ARCHS[f"switch_gmoe_{size}"]

    def words(
        self, size: str, experts: int, flags: str, updates: int, interval: int = 1
    ) -> list[str]:
        """What follows `fairseq-train`: it ends after `updates`, each with a third of the paper's
        tokens, and logs each `interval`-th. With 0 experts: transformer_lm, without the plug-in's
        own flags."""
        flags = flags if experts else flags.replace(CHUNKED, "").replace(COMPILED, "").strip()
        layers, dim, heads = self.arch(size)
        model = (
            f"--task alma_lm --arch switch_gmoe_{size} --moe-expert-count {experts}"
            if experts
            else DENSE
        )
        model += f" --decoder-layers {layers} --decoder-embed-dim {dim}"
        model += f" --decoder-attention-heads {heads} --decoder-ffn-embed-dim {4 * dim}"
        words = [str(self.folder), *model.split(), *OPTIMIZER.split()]
        words += f"--tokens-per-sample {self.length} --batch-size {2 if self.tiny else 64}".split()
        words += f"--log-format json --log-interval {interval} --max-update {updates}".split()
        return [*words, "--disable-validation", "--save-dir", f"{self.folder}/none", *flags.split()]


def updates_of(
    words: Sequence[str], number: int = 0, after: str = "", code: int = 0
) -> list[dict[str, float]]:
    """Run fairseq-train; returns what it logged of its updates. UserError: its exit code is not
    `code`.

    `number`, `after`: see `process.child`.
    """
    ended, text = process.child(["fairseq_cli.train", *words], number, after)
    lines = text.splitlines()
    if ended != code:
        raise UserError(f"exit code {ended}: {' '.join(line[-150:] for line in lines[-2:])}")
    updates = []
    for line in lines:
        if "train_inner | " in line:
            update = json.loads(line.split("train_inner | ")[1])
            updates.append({name: float(value) for name, value in update.items()})
    return updates


def train(args: Any) -> Cases:
    """Models and precisions."""
    for size, experts, flags in [("base", 8, "")] if args.tiny else SETTINGS:
        labels = {"model": f"{size}, {experts} experts", "flags": flags or "fp32"}
        yield labels, partial(trained, RandomTokens.of(args), size, experts, flags)


def trained(data: RandomTokens, size: str, experts: int, flags: str) -> Row:
    """Train both models."""
    import torch

    from benchmarks.training_memory import estimated

    updates = INTERVAL * (WARM_UP + (2 if data.tiny else INTERVALS))
    words = data.words(size, experts, f"{flags} --no-save", updates, INTERVAL)
    switch = updates_of(words)[WARM_UP:]
    peer = tokens_per_second(tuple(data.words(size, 0, f"{flags} --no-save", updates, INTERVAL)))
    row: Row = {"tokens/s": [update["wps"] for update in switch], "transformer_lm, tokens/s": peer}
    speed = median(row["tokens/s"])
    layers, dim, _ = data.arch(size)
    flops = Shape(layers, dim, 4 * dim, data.vocabulary, data.length, experts, 2).training_flops(1)
    dtype = {"--bf16": torch.bfloat16, "--fp16": torch.float16}.get(
        flags.partition(" ")[0], torch.float32
    )
    row |= {"speed / transformer_lm": speed / peer, "TFLOP/s": speed * flops / 1e12}
    row["MFU"] = speed * flops / product(dtype, 64 if data.tiny else 8192)
    row["estimate GB"] = estimated(words, data.vocabulary - 4) / 1e9
    if "gb_free" in switch[-1]:  # on a GPU
        total = torch.cuda.get_device_properties(0).total_memory
        row["peak GB"] = (total - switch[-1]["gb_free"] * 2**30) / 1e9
        row["peak / estimate"] = row["peak GB"] / row["estimate GB"]
    return row


@cache
def tokens_per_second(words: tuple[str, ...]) -> float:
    """Median of a training by fairseq-train."""
    return median(update["wps"] for update in updates_of(words)[WARM_UP:])


def product(dtype: Any, size: int) -> float:
    """FLOPs per second of a square matrix product."""
    import torch

    a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
    finished(lambda: a @ b, 3)
    return median(
        10 * 2 * size**3 / seconds(partial(finished, lambda: a @ b, 10)) for _ in range(5)
    )


SKIPPED = 10  # updates
PROFILED = 10


def profile(args: Any) -> Cases:
    """The base model, and its peer."""
    data = RandomTokens.of(args)
    for experts, flags in [(8, "")] if args.tiny else [(8, "--bf16"), (0, "--bf16")]:
        words = data.words("base", experts, f"{flags} --no-save", SKIPPED + PROFILED + 1, 1000)
        yield (
            {"experts": experts, "flags": flags or "fp32"},
            partial(profiled, words, data.folder / "profile.json"),
        )


def profiled(words: list[str], out: Path) -> Row:
    """Shares of a profiled process."""
    out.unlink(missing_ok=True)
    code, text = process.child(["benchmarks.gpu.language", str(out), *words])
    if code or not out.exists():
        raise UserError(f"exit code {code}: {text[-200:]}")
    return json.loads(out.read_text())


def profile_training() -> None:
    """Run fairseq-train and profile its updates SKIPPED to SKIPPED + PROFILED."""
    from fairseq.trainer import Trainer
    from fairseq_cli.train import cli_main
    from torch import profiler as torch_profiler

    out, *words = sys.argv[1:]
    original = Trainer.train_step
    profiler = torch_profiler.profile()
    called = 0
    inside = 0.0
    started = 0.0

    def train_step(self: Trainer, samples: Any, *arguments: Any) -> Any:
        nonlocal called, inside, started
        if called == SKIPPED:
            profiler.start()
            finished(dict, 0)  # waits for the GPU
            started = time.perf_counter()
            inside = 0.0
        if called == SKIPPED + PROFILED:
            finished(dict, 0)
            wall = time.perf_counter() - started
            profiler.stop()
            row = kernels.shares(profiler.events(), wall, inside, PROFILED)
            write_json_atomic(Path(out), row)
        called += 1
        before = time.perf_counter()
        result = original(self, samples, *arguments)
        inside += time.perf_counter() - before
        return result

    sys.argv = ["fairseq-train", *words]
    with mock.patch.object(Trainer, "train_step", train_step):
        cli_main()


UPDATES = 60
"""Of a training."""
SAVED = 16
"""Updates between two checkpoints."""
STOP_AT = 24
"""The update after which the signal comes."""
TOLERANCE = 0.01
CODES = {"SIGTERM": -signal.SIGTERM, "SIGUSR1": 75}
"""Exit codes after signals."""


def resume(args: Any) -> Cases:
    """SIGTERM in bf16 first."""
    signals = [("--bf16", "SIGTERM"), ("--fp16", "SIGUSR1")]
    batch = "--batch-size 8"
    if args.tiny:
        signals = [("", "SIGTERM")]
        batch = ""
    for flags, name in signals:
        data = RandomTokens.of(args)
        words = data.words("base", 8, f"{flags} {batch} --save-interval-updates {SAVED}", UPDATES)
        yield {"flags": flags or "fp32", "signal": name}, partial(resumed, words, name, data.folder)


def resumed(words: list[str], name: str, folder: Path) -> Row:
    """Losses with the signal against those of a training without it, which runs at the same time.

    UserError: an update is missing, or the losses differ by more than TOLERANCE.
    """
    import torch

    saves = [str(folder / name), str(folder / "through")]
    for save in saves:
        shutil.rmtree(save, ignore_errors=True)
    stopped, through = ([*words, "--save-dir", save] for save in saves)
    with ThreadPoolExecutor(1) as pool:
        undisturbed = pool.submit(updates_of, through)
        before = updates_of(
            stopped, getattr(signal, name), f'"num_updates": "{STOP_AT}"', CODES[name]
        )
        after = updates_of(stopped)
        expected = [update["loss"] for update in undisturbed.result()]
    losses = {int(update["num_updates"]): update["loss"] for update in (*before, *after)}
    if sorted(losses) != list(range(1, UPDATES + 1)):
        raise UserError(f"logged are the updates {sorted(losses)}, not 1 to {UPDATES}")
    worst = max(abs(losses[i + 1] / loss - 1) for i, loss in enumerate(expected))
    if worst > TOLERANCE:
        raise UserError(f"a loss differs by {worst:.1%} from that of a training without a signal")
    vectors = []
    for save in saves:
        checkpoint = torch.load(f"{save}/checkpoint_last.pt", "cpu", weights_only=True)
        vectors.append(torch.cat([x.flatten().float() for x in checkpoint["model"].values()]))
    resumed_weights, through_weights = vectors
    weights = ((resumed_weights - through_weights).norm() / through_weights.norm()).item()
    done = int(before[-1]["num_updates"])
    row = {"updates before": done, "repeated": done - int(after[0]["num_updates"]) + 1}
    return row | {"worst loss": f"{worst:.1e}", "weights": f"{weights:.1e}"}


if __name__ == "__main__":
    profile_training()
