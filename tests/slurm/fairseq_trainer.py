"""fairseq-train as a trainer: its rows equal those of the built-in `sm` with the same flags.

alma train STREAM --learner sm --trainer 'python -m tests.slurm.fairseq_trainer FLAGS...'
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from alma.trainer import StageTask

COSTS = ("updates", "tokens", "seconds", "flops", "validation_flops", "peak_memory_bytes")
SIZES = ("--tokens-per-sample", "--max-tokens", "--batch-size")
"""Flags of the training that an evaluation has too."""


def run(module: str, *words: object) -> None:
    """Run a module in this process, which then gets ALMA's signals."""
    sys.argv = [module, *map(str, words)]
    runpy.run_module(module, run_name="__main__")


def measure(task: StageTask, paths: str, flags: list[str]) -> dict[str, Any]:
    """What ALMA's own evaluation measures."""
    file = Path(task.out, "measured.json")
    words = [task.stream, "--task", "alma_lm", "--valid", "--out", file]
    words += ["--stage", str(task.stage or 0)]
    words += ["--waiting-time", str(task.waiting_time), "--seed", str(task.seeds[0])]
    if paths:
        pairs = zip(flags, [*flags[1:], ""], strict=True)
        sizes = [word for flag, value in pairs if flag in SIZES for word in (flag, value)]
        run("fairseq_alma.evaluate", *words, "--gen-subset", "test", "--path", paths, *sizes)
    else:
        run("fairseq_alma.evaluate", *words, "--untrained", *flags)
    return json.loads(file.read_text())


def main() -> None:
    task = StageTask.read(sys.argv[-1])
    flags = sys.argv[1:-1]
    if task.action == "train":
        words = ["--task", "alma_lm", "--stage", str(task.stage), "--seed", str(task.seeds[0])]
        words += ["--waiting-time", str(task.waiting_time), "--save-dir", task.out]
        if task.checkpoint:
            words += ["--finetune-from-model", task.checkpoint]
        run("fairseq_cli.train", task.stream, *words, *flags)
        best = "checkpoint_best.pt"
        if not Path(task.out, best).exists():
            best = "checkpoint_last.pt"
        measured = measure(task, str(Path(task.out, best)), flags)
        costs = {name: measured["training"][0][name] for name in COSTS}
        task.finish(parameters=measured["parameters"], checkpoint=best, **costs)
        return
    measured = measure(task, ":".join(task.members), flags)
    losses = {
        "test": (measured["nll"], measured["tokens"]),
        "valid": (measured["valid"]["loss"], task.valid[0].tokens),
    }
    flops = measured["eval_flops_per_example"]
    task.finish(losses, parameters=measured["parameters"], eval_flops_per_example=flops)


if __name__ == "__main__":
    main()
