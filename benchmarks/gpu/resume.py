"""Step `resume`: a training that a signal stopped and that went on, against one that ran through.

SIGTERM ends fairseq-train at once: it resumes from the last checkpoint, and repeats the updates since then.
After SIGUSR1 it saves first (exit code 75), and repeats none. On a GPU sums have no fixed order, so losses
are equal within TOLERANCE; a second training without a signal shows how much of that the GPU itself takes.
`worst loss` and `weights` are relative differences.
"""

import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from alma.errors import UserError
from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.gpu.training import Model, random_data, train

UPDATES, SAVED, STOP_AT = 100, 16, 40
"""Of a training; between two checkpoints; the update after which the signal comes."""
TOLERANCE = 0.01
SIGNALS = {"none": (0, 0), "SIGTERM": (signal.SIGTERM, -signal.SIGTERM), "SIGUSR1": (signal.SIGUSR1, 75)}
"""Signals, and the exit code after each."""


def cases(asked: Asked) -> Iterator[Case]:
    """Precisions, and signals in each."""
    model = Model("base", 8, asked.tiny)
    with random_data(asked.tiny) as data:
        for flags in ("",) if asked.tiny else ("--bf16", "--fp16", ""):
            through: list[float] = []
            for name in ("SIGTERM",) if asked.tiny else SIGNALS:
                labels = {"model": model.name, "flags": flags or "fp32", "signal": name}
                words = data.words(model, f"{flags} --save-interval-updates {SAVED}", UPDATES)
                yield labels, partial(measure, words, name, data.folder / f"run{flags}", through, asked.log)


def measure(words: list[str], name: str, base: Path, through: list[float], log: Path) -> Row:
    """Losses with a signal against those `through`, which the first call of a precision makes.

    UserError: an update is missing, or the losses differ by more than TOLERANCE.
    """
    number, code = SIGNALS[name]
    if not through:
        through += [update["loss"] for update in train([*words, "--save-dir", f"{base}_through"], log)]
    save = f"{base}_{name}"
    words = [*words, "--save-dir", save]
    before = train(words, log, number, f'"num_updates": "{STOP_AT}"', code)
    after = train(words, log) if number else before
    losses = {int(record["num_updates"]): record["loss"] for record in (*before, *after)}
    if sorted(losses) != list(range(1, UPDATES + 1)):
        raise UserError(f"logged are the updates {sorted(losses)}, not 1 to {UPDATES}")
    worst = max(abs(losses[i + 1] / loss - 1) for i, loss in enumerate(through))
    if worst > TOLERANCE:
        raise UserError(f"a loss differs by {worst:.1%} from that of a training without a signal")
    done = int(before[-1]["num_updates"])
    repeated = done - int(after[0]["num_updates"]) + 1 if number else 0
    states = [
        torch.load(f"{each}/checkpoint_last.pt", "cpu", weights_only=True)
        for each in (save, f"{base}_through")
    ]
    ours, theirs = (torch.cat([x.flatten().float() for x in state["model"].values()]) for state in states)
    weights = ((ours - theirs).norm() / theirs.norm()).item()
    shutil.rmtree(save)  # gigabytes
    row: Row = {"exit code": code, "updates before": done, "repeated": repeated}
    return row | {"worst loss": f"{worst:.1e}", "weights": f"{weights:.1e}"}
