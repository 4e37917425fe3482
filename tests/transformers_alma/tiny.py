"""A tiny model, two parts of a stream of random ids, and trainings of them in forked children."""

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from alma.files import sha256_file
from alma.stream import dtype_code, write_index
from alma.trainer import StageTask, TextPart
from tests.byte_level import byte_level
from tests.conftest import Child, Finished

END = 0
IDS = 64
TOKENS = 300  # of a model with a tokenizer
UPDATES = 6
FLAGS = (
    "--block_size 16 --per_device_train_batch_size 2 --learning_rate 1e-2 --use_cpu --save_steps 2"
).split()
SETTINGS = {
    "vocab_size": IDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "eos_token_id": END,
}


def make_model(folder: Path, **settings) -> str:
    """A folder with a tiny Qwen2 of random weights."""
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen2Config(**(SETTINGS | settings))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def make_tokenizer(folder: Path, text: str) -> None:
    """Give a folder a byte-level tokenizer of TOKENS ids, whose end of text is END."""
    import transformers

    engine = byte_level([text], TOKENS, ["<|end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|end|>")
    tokenizer.save_pretrained(folder)


def make_parts(folder: Path) -> list[TextPart]:
    """Two parts of random ids, of one document each."""
    rng = np.random.default_rng(1)
    parts = []
    for name in ("megabatch_00", "test"):
        files = (str(folder / f"{name}.bin"), str(folder / f"{name}.idx"))
        ids = rng.integers(4, IDS, 400).astype(np.uint16)
        ids.tofile(files[0])
        write_index(files[1], np.array([len(ids)]), dtype_code(IDS))
        part = TextPart(
            name=name,
            period="",
            words=1,
            bytes=1,
            tokens=len(ids),
            files=files,
            documents=1,
            end_token=END,
        )
        parts.append(part)
    return parts


def task(out: Path, parts: Sequence[TextPart], **fields) -> StageTask:
    """The task of a training in `out`, or what `fields` make of it."""
    values = {
        "action": "train",
        "out": str(out),
        "stream": "",
        "dictionary": IDS,
        "learner": "sm",
        "stage": 0,
        "t": 1,
        "megabatches": 1,
        "waiting_time": 1,
        "train": (parts[0],),
        "valid": (parts[1],),
        "seeds": (1,),
        "budget": {"updates": UPDATES},
    }
    out.mkdir(exist_ok=True)
    return StageTask(**(values | fields))


class TinyEngine:
    """A tiny model and stream, and the engine's arguments for them."""

    def __init__(self, folder: Path) -> None:
        self.base = make_model(folder / "model")
        self.parts = make_parts(folder)

    def arguments(self, *flags: str):
        """FLAGS and others, parsed."""
        from transformers_alma.arguments import parse

        return parse([*FLAGS, "--init", self.base, *flags])


def kill_before_update(step: int) -> None:
    """Kill this process before an update 1, 2, ..."""
    from transformers import Trainer

    compute = Trainer.training_step

    def replaced(trainer: Trainer, *args: object, **kwargs: object):
        if trainer.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(trainer, *args, **kwargs)

    Trainer.training_step = replaced


def start(function: Callable[[], object], log: Path, rank: int = 0, world: int = 1) -> Child:
    """Call a function in a fork, as one of `world` processes of a training."""

    def run() -> None:
        if world > 1:
            os.environ |= {
                "ALMA_LAUNCHER": str(os.getppid()),
                "ALMA_STOP_FILE": str(log.parent / f"stop{rank}"),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
            }
        function()

    return Child(log, run)


def together(functions: Sequence[Callable[[], object]], folder: Path) -> list[Finished]:
    """Call each function in a process of one training, in forks; wait for all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    folder.mkdir(exist_ok=True)
    children = []
    for rank, function in enumerate(functions):
        children.append(start(function, folder / f"{rank}.log", rank, len(functions)))
    del os.environ["MASTER_PORT"]
    return [child.wait() for child in children]


def losses(output: str) -> list[tuple[int, float]]:
    """Updates and losses that a training has printed."""
    whole_lines = output.rpartition("\n")[0].splitlines()
    lines = [line for line in whole_lines if line.startswith("alma | train_inner | ")]
    records = [json.loads(line.rpartition(" | ")[2]) for line in lines]
    return [(record["num_updates"], record["loss"]) for record in records]


def checksums(folder: Path) -> dict[str, str]:
    """The checksums of all weights in a folder, by their path in it."""
    files = folder.rglob("*.safetensors")
    return {str(file.relative_to(folder)): sha256_file(file) for file in files}
