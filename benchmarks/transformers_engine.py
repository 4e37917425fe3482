"""The engine `transformers` beside the same transformers.Trainer run by hand.

Both train a Qwen2 model of random weights on the same blocks, on one thread of a CPU, each in a
process of its own, in turn. By hand the blocks are tensors in memory; the engine reads them from
the memory-mapped tokens of a stage, counts its seconds, looks for signals and makes its checkpoints
whole. Times are those of `Trainer.train`: in seconds, and in seconds of the CPU, which depend less
on other work of the machine. `start` is what a process of the engine needs besides.

`python -m benchmarks.transformers_engine engine|hand STAGE.json FLAGS` is one of the processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from alma.stream import dtype_code, write_index
from alma.tables import number
from alma.trainer import StageTask, TextPart
from benchmarks.timing import Rows, spread

TOKENS = 200_000
END = 0
KINDS = ("engine", "hand")
_TIMES = "times.json"


@dataclass(frozen=True)
class ModelSize:
    """A model and the length of a measurement."""

    model: dict[str, int]
    block: int
    batch: int
    updates: int


SIZES = {
    "tiny": ModelSize(
        {
            "vocab_size": 640,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        },
        block=64,
        batch=8,
        updates=150,
    ),
    "10M": ModelSize(
        {
            "vocab_size": 8000,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
        },
        block=128,
        batch=2,
        updates=6,
    ),
}


def measure(repeats: int) -> Rows:
    """A row for each size."""
    rows = []
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            words = make(Path(folder), size)
            measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for turn in tqdm(range(repeats + 1), disable=None, unit="turn"):
                for kind in KINDS:
                    times = _process(kind, Path(folder), words, turn)
                    if turn:  # the first turn fills the caches
                        measured[kind].append(times)
        rows.append(_row(name, size, measured))
    return rows


def _row(name: str, size: ModelSize, measured: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Speeds and their ratios, above 1 if the engine is faster."""
    pairs = list(zip(measured["engine"], measured["hand"], strict=True))
    tokens = size.updates * size.batch * (size.block - 1)
    row: dict[str, Any] = {"size": name, "parameters": int(pairs[0][0]["parameters"])}
    for kind in KINDS:
        best = min(times["seconds"] for times in measured[kind])
        row[f"{kind} tokens/s"] = number(tokens / best)
    for unit in ("seconds", "cpu"):
        title = "speed" if unit == "seconds" else "speed by CPU seconds"
        row[title] = spread([hand[unit] / engine[unit] for engine, hand in pairs])
    row["start s"] = f"{median(times['start'] for times in measured['engine']):.1f}"
    return row


def make(folder: Path, size: ModelSize) -> list[str]:
    """Write a model and a mega-batch of random tokens; returns the flags of the engine."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(size.model)
    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=END)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    vocabulary = size.model["vocab_size"]
    ids = np.random.default_rng(1).integers(4, vocabulary, TOKENS).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    write_index(folder / "train.idx", np.array([TOKENS]), dtype_code(vocabulary))
    words = f"--block_size {size.block} --per_device_train_batch_size {size.batch} --use_cpu"
    return [*words.split(), "--init", str(folder / "model"), "--max_steps", str(size.updates)]


def task_of(folder: Path, out: Path, updates: int) -> StageTask:
    """A training of so many updates on the tokens of `make`."""
    files = (str(folder / "train.bin"), str(folder / "train.idx"))
    counts = {"words": TOKENS, "bytes": TOKENS, "tokens": TOKENS}
    part = TextPart(name="train", period="", files=files, end_token=END, **counts)
    return StageTask(
        action="train",
        out=str(out),
        stream=str(folder),
        dictionary=TOKENS,
        learner="sm",
        stage=0,
        t=1,
        megabatches=1,
        waiting_time=1,
        train=(part,),
        valid=(part,),
        seeds=(1,),
        budget={"updates": updates},
    )


def _process(kind: str, folder: Path, words: list[str], turn: int) -> dict[str, float]:
    """The times of a process."""
    import msgspec

    out = folder / f"{kind}_{turn}"
    out.mkdir()
    updates = int(words[-1])
    file = out / "stage.json"
    file.write_bytes(msgspec.json.encode(task_of(folder, out, updates)))
    command = [sys.executable, "-m", "benchmarks.transformers_engine", kind, *words, str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{kind}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    times = json.loads((out / _TIMES).read_text())
    return {**times, "start": seconds - times["seconds"]}


def by_hand(task: StageTask, words: list[str]) -> None:
    """What a user of transformers writes: a Trainer on a list of blocks."""
    from transformers import AutoModelForCausalLM, Trainer

    from transformers_alma.arguments import parse
    from transformers_alma.blocks import Layout, PartBlocks, StageBlocks
    from transformers_alma.training import MODEL

    arguments = parse(words)
    engine = arguments.engine
    updates = task.budget["updates"]
    training = arguments.training_arguments(
        seed=task.seeds[0], output_dir=task.out, logging_steps=max(1, updates // 20)
    )
    layout = Layout(engine.block_size or 0, task.end_token)
    parts = [PartBlocks(part.map_tokens(), layout) for part in task.train]
    count = updates * training.train_batch_size
    blocks = StageBlocks(parts, [], 0.0, [*task.seeds, task.t], count)
    in_memory: Any = [blocks[number] for number in range(count)]
    model = AutoModelForCausalLM.from_pretrained(engine.init)
    trainer = Trainer(model, training, train_dataset=in_memory)
    trainer.train()
    trainer.save_model(str(Path(task.out, MODEL)))


def timed(task: StageTask) -> None:
    """Let Trainer.train write its times into the folder of the task."""
    from transformers import Trainer

    train: Any = Trainer.train

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        cpu_began = time.process_time()
        result = train(self, *args, **kwargs)
        times = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu_began}
        times["parameters"] = self.model.num_parameters()
        Path(task.out, _TIMES).write_text(json.dumps(times))
        return result

    Trainer.train = measured  # type: ignore[method-assign]


def main() -> None:
    """One of the processes."""
    kind, *words, file = sys.argv[1:]
    task = StageTask.read(file)
    timed(task)
    if kind == "hand":
        by_hand(task, words)
        return
    from transformers_alma.__main__ import main as engine

    sys.argv = ["transformers_alma", *words, file]
    engine()


if __name__ == "__main__":
    main()
