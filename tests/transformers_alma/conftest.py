"""Tiny folders of Hugging Face, a stream in their tokens, and the engine in forked children."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from alma.files import make_directory
from tests.byte_level import byte_level
from tests.conftest import ROOT, Finished
from tests.transformers_alma.tiny import TinyEngine

TOKENS = 300
ROWS = 320  # of the models: more than the tokenizer has tokens, as in Qwen
END = 7  # not the first id, so that a row that is off by one shows
BLOCK = 32
SHARED: dict[str, Any] = {"vocab_size": ROWS, "bos_token_id": None, "eos_token_id": END}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"num_key_value_heads": 1},
    "Qwen2": SIZES | {"num_key_value_heads": 1},
    "Qwen3": SIZES | {"num_key_value_heads": 1, "head_dim": 8},
    "GPTNeoX": SIZES,
    "OPT": {
        "hidden_size": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
    },
    "Gemma": SIZES | {"num_key_value_heads": 1, "head_dim": 8},
    "Mixtral": SIZES | {"num_key_value_heads": 1, "num_local_experts": 4},
    "Mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
"""Settings of the architectures, by the name of transformers' class of configurations."""


@pytest.fixture(scope="session")
def transformers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads: other tests fork
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def tokenizer(transformers, text):
    """A byte-level tokenizer, with special tokens before and after the end of a text."""
    special = [f"<|{i}|>" for i in range(END + 2)]
    engine = byte_level([(text / "help.txt").read_text("utf-8")], TOKENS, special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=f"<|{END}|>")


@pytest.fixture(scope="session")
def make(transformers, tokenizer, tmp_path_factory) -> Callable[..., Path]:
    """`make(kind, **settings)` -> a folder with a model of random weights and the tokenizer."""

    def run(kind: str, **settings) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        config = getattr(transformers, f"{kind}Config")(**SHARED | KINDS[kind] | settings)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # no 0 or 1 may hide a mistake
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return run


@pytest.fixture(scope="session")
def llama(make) -> Path:
    return make("Llama")


@pytest.fixture(scope="session")
def own_stream(llama, text, tmp_path_factory) -> Path:
    """A stream of two mega-batches in the tokens of the folders."""
    out = tmp_path_factory.mktemp("own") / "stream"
    words = "--ordered --workers 1 --words 2000 --eval-words 800 --valid-words 300"
    words += " --max-document-words 100 --seed 1"
    sources = [f"{name}={text}/{name}.txt" for name in ("help", "reference")]
    command = [sys.executable, "-m", "data_prep", *sources, "--tokenizer", llama]
    subprocess.run([*command, *words.split(), "--out", out], check=True, cwd=ROOT)
    return out


class Killed(BaseException):
    """In place of the launcher's own death."""


@pytest.fixture(scope="module")
def tiny_engine(transformers, tmp_path_factory) -> TinyEngine:
    """A tiny model and stream; what trainings import is imported, for forks."""
    pytest.importorskip("accelerate")
    from transformers_alma import preloaded  # noqa: F401

    return TinyEngine(tmp_path_factory.mktemp("tiny"))


def _engine(words: list[str]) -> None:
    """The engine in a forked child."""
    from transformers_alma.__main__ import main

    sys.argv = ["transformers_alma", *words]
    main()


@pytest.fixture
def train(transformers, child, monkeypatch, tmp_path, capsys) -> Callable[..., str]:
    """`train(stream, *words, code=0)`: what `alma train` prints; the engine runs in forks."""
    from slurm.engine import children
    from slurm.launch import main
    from slurm.lm import request
    from transformers_alma import check, preloaded  # noqa: F401

    def ask(command, name, text):
        if command[-1] != "transformers_alma.check":
            return children_ask(command, name, text)
        questions = json.loads(text)
        return json.dumps([check.resolve(check.Requested(**question)) for question in questions])

    def run(command, log, name, watch=None, environment=None):
        assert tuple(command[1:3]) == ("-m", "transformers_alma")
        make_directory(log.parent)
        started = child(log, partial(_engine, list(command[3:])))
        folder = Path(command[-1]).parent
        if launch.kill_at and log.name == "train.log":
            started.kill_when(folder.joinpath(launch.kill_at).exists)
            raise Killed
        done: Finished = started.wait()
        if done.code == 2:
            raise children.UserError(done.error)
        if done.code == 75:
            raise children.Saved(f"{name}: stopped by a signal")
        assert done.code == 0, done.output

    children_ask = children.ask
    monkeypatch.setattr(request.children, "ask", ask)
    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    monkeypatch.setattr("slurm.lm.launcher.forks", lambda *_: children.contextlib.nullcontext())

    def launch(*words: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["alma train", *map(str, words)])
        capsys.readouterr()
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code
        except Killed:
            ended = -signal.SIGKILL
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.out + printed.err

    launch.kill_at = ""  # a file of a training that ends it, and the launcher, when it is there
    return launch
