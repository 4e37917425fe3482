"""Step `resume`: a training that a signal stopped and the same command went on with, against one that ran through.

SIGTERM ends fairseq-train at once: it resumes from the last checkpoint, and repeats the updates since then.
After SIGUSR1 it saves first (exit code 75), and repeats none. On a GPU sums have no fixed order, so losses are
compared within TOLERANCE; a second training without a signal shows how much of that the GPU itself takes.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from alma.errors import UserError
from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.gpu.training import Data, Model, command, make_data, train, updates_of

UPDATES, SAVED, STOP_AT = 30, 8, 20
"""Of a training; between two checkpoints; the update after which the signal comes."""
TOLERANCE = 0.01
SIGNALS = {"none": 0, "SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1}
CODES = {"none": 0, "SIGTERM": -signal.SIGTERM, "SIGUSR1": os.EX_TEMPFAIL}


def cases(asked: Asked) -> Iterator[Case]:
    """Precisions, and signals in each."""
    model = Model("base", 8, asked.tiny)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder, "stream"), asked.tiny)._replace(batch=2 if asked.tiny else 16)
        for flags in ("",) if asked.tiny else ("--bf16", "--fp16", ""):
            through: list[float] = []
            for name in ("SIGTERM",) if asked.tiny else SIGNALS:
                base = Path(folder, f"{flags}{name}")
                labels = {"model": model.name, "flags": flags or "fp32", "signal": name}
                yield labels, partial(measure, data, model, flags, name, base, through)


def measure(data: Data, model: Model, flags: str, name: str, base: Path, through: list[float]) -> Row:
    """Losses with a signal against those `through`, which the first call of a precision makes.

    UserError: an update is missing, or the losses differ by more than TOLERANCE.
    """
    words = command(data, model, f"{flags} --disable-validation --save-interval-updates {SAVED}", UPDATES)
    if not through:
        log = base.with_name("through.log")
        log.unlink(missing_ok=True)
        train([*words, "--save-dir", f"{base}_through"], log)
        through += [record["loss"] for record in updates_of(log)]
    log = base.with_suffix(".log")
    words += ["--save-dir", str(base)]
    number = SIGNALS[name]
    sent = {f'"num_updates": "{STOP_AT}"': number} if number else None
    code = train(words, log, sent, (CODES[name],))
    before = updates_of(log)
    if number:
        train(words, log)
    after = updates_of(log)[len(before) :] or before
    losses = {int(record["num_updates"]): record["loss"] for record in (*before, *after)}
    if sorted(losses) != list(range(1, UPDATES + 1)):
        raise UserError(f"logged are the updates {sorted(losses)}, not 1 to {UPDATES}")
    worst = max(abs(losses[i + 1] / loss - 1) for i, loss in enumerate(through))
    if worst > TOLERANCE:
        raise UserError(f"a loss differs by {worst:.1%} from that of a training without a signal")
    done = int(before[-1]["num_updates"])
    repeated = done - int(after[0]["num_updates"]) + 1 if number else 0
    row: Row = {"exit code": code, "updates before": done, "repeated": repeated}
    return row | {"worst loss difference": f"{worst:.1e}", "weights": weights_differ(base, f"{base}_through")}


def weights_differ(one: Path, other: str) -> str:
    """The norm of the difference of the last weights, over their norm."""
    both = [torch.load(Path(f, "checkpoint_last.pt"), "cpu", weights_only=False) for f in (one, other)]
    ours, theirs = (torch.cat([x.flatten().float() for x in state["model"].values()]) for state in both)
    return f"{((ours - theirs).norm() / theirs.norm()).item():.1e}"
