"""Models of the engine: from a folder of Hugging Face, with or without adapters (LoRA).

Nothing in a folder is run: models whose code is in the folder are refused.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from alma.errors import UserError, require_package
from alma.files import sha256_file
from alma.hub_files import WEIGHTS
from transformers_alma.arguments import EngineArguments

ADAPTER = "adapter_config.json"
RAW = "raw"  # folder in a checkpoint with an average: the weights from which training goes on
_MOST_POSITIONS = 1024  # of the default --block_size
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_FAULTS = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, ImportError),
    SafetensorError,
)


@contextmanager
def reading(folder: object) -> Iterator[None]:
    """Raise a UserError for what transformers raises if a folder has no whole model."""
    try:
        yield
    except UserError:
        raise
    except _FAULTS as error:
        problem = " ".join(str(error).split())[:300]
        text = f"transformers cannot load it ({problem}): save the model by its save_pretrained"
        raise UserError(f"--init {folder}: {text}") from error


def config_of(folder: str) -> PreTrainedConfig:
    """The configuration in a folder. UserError: none, or not of a causal language model."""
    if not Path(folder, "config.json").is_file():
        raise UserError(f"--init {folder}: no config.json: give a folder of save_pretrained")
    with reading(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = f"model_type {config.model_type} is no causal language model of transformers"
        raise UserError(f"--init {folder}: {problem}: train it by --trainer COMMAND")
    return config


def positions_of(config: PreTrainedConfig) -> int | None:
    """The most tokens of a block; None: the model sets no limit."""
    text_config = config.get_text_config()
    for name in _POSITIONS:
        number = getattr(text_config, name, None)
        if isinstance(number, int) and number > 0:
            return number
    return None


def block_size_of(config: PreTrainedConfig, requested: int | None) -> int:
    """The tokens of a block. UserError: more than the model has positions."""
    positions = positions_of(config)
    if requested is None:
        return min(positions or _MOST_POSITIONS, _MOST_POSITIONS)
    if positions is not None and requested > positions:
        problem = f"the model has {positions:,} positions"
        raise UserError(f"--block_size {requested:,}: {problem}: give {positions} or less")
    return requested


def parameters_of(config: PreTrainedConfig, engine: EngineArguments) -> tuple[int, int]:
    """The parameters of the model, and those that are trained; no weight is made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        whole = model.num_parameters()
        if not engine.lora:
            return whole, whole
        adapted = _with_new_adapters(model, engine)
    return whole, sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)


def weight_files(folder: str) -> list[Path]:
    """The files of a folder with weights: safetensors if there are any."""
    for pattern in WEIGHTS:
        files = sorted(Path(folder).glob(pattern))
        if files:
            return files
    return []


def check_weights(folder: str) -> None:
    """UserError: a folder has no weights, or a file of them is cut."""
    files = weight_files(folder)
    if not files:
        problem = "no weights (*.safetensors or pytorch_model*.bin)"
        remedy = "copy them there, or give `-- --random_weights` to start from random ones"
        raise UserError(f"--init {folder}: {problem}: {remedy}")
    for file in files:
        if file.suffix == ".safetensors":
            with reading(file), safe_open(file, framework="pt"):
                pass


def checksum_of(folder: str) -> str:
    """The SHA-256 of the SHA-256 of the configuration and of each file with weights."""
    states = []
    for file in (Path(folder, "config.json"), *weight_files(folder)):
        state = file.stat()
        states.append((file, state.st_size, state.st_mtime_ns))
    return _checksum(tuple(states))


@lru_cache(maxsize=8)  # the runs of a sweep start from one model
def _checksum(states: tuple[tuple[Path, int, int], ...]) -> str:
    """The checksum of files, of which size and time have not changed since it was computed."""
    return hashlib.sha256("".join(sha256_file(file) for file, *_ in states).encode()).hexdigest()


def check_unchanged(engine: EngineArguments) -> None:
    """UserError: the model of --init is not the one with which the run began."""
    if engine.init_sha256 and checksum_of(engine.init) != engine.init_sha256:
        problem = "its weights have changed since the launch"
        raise UserError(f"--init {engine.init}: {problem}: restore them, or choose another --out")


def load(
    checkpoint: str | None, engine: EngineArguments, seed: int, is_trainable: bool = False
) -> Any:
    """The model of a checkpoint of this engine; None: that of --init, as it starts.

    seed: of random weights. is_trainable: whether adapters are to be trained. UserError: damaged,
    or changed.
    """
    if checkpoint is None:
        check_unchanged(engine)
        if engine.random_weights:
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config_of(engine.init), **_kinds(engine))
        return pretrained(engine.init, engine)
    if not adapted(Path(checkpoint)):
        return pretrained(checkpoint, engine)
    require_package("peft", "a checkpoint with adapters", "lora")
    from peft import PeftModel

    check_unchanged(engine)
    base = pretrained(engine.init, engine)
    with reading(checkpoint):
        return PeftModel.from_pretrained(base, checkpoint, is_trainable=is_trainable)


def load_to_train(checkpoint: str | None, engine: EngineArguments, seed: int) -> Any:
    """As `load`, of the weights from which training goes on, with trained adapters (--lora)."""
    if checkpoint and Path(checkpoint, RAW).is_dir():
        checkpoint = str(Path(checkpoint, RAW))
    model: Any = load(checkpoint, engine, seed, is_trainable=True)
    if engine.lora and checkpoint is None:
        torch.manual_seed(seed)
        return _with_new_adapters(model, engine)
    return model


def _kinds(engine: EngineArguments) -> dict[str, Any]:
    """Arguments of from_pretrained and from_config."""
    kinds: dict[str, Any] = {}
    if engine.dtype != "auto":
        kinds["dtype"] = getattr(torch, engine.dtype)
    elif not engine.random_weights:  # from_config takes the type of the configuration itself
        kinds["dtype"] = "auto"
    if engine.attn_implementation:
        kinds["attn_implementation"] = engine.attn_implementation
    return kinds


def pretrained(folder: str, engine: EngineArguments) -> PreTrainedModel:
    """The model of a folder. UserError: damaged, or without some of its weights."""
    config_of(folder)
    model: Any = None
    report: Any = {}
    auto_model: Any = AutoModelForCausalLM
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of missing weights, which are an error below
    try:
        with reading(folder):
            model, report = auto_model.from_pretrained(
                folder,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                **_kinds(engine),
            )
    finally:
        logger.setLevel(level)
    missing = sorted(report["missing_keys"])
    if missing:
        problem = f"{len(missing)} of its weights are missing, such as {missing[0]}"
        raise UserError(f"--init {folder}: {problem}: copy the folder again")
    return model


def _with_new_adapters(model: PreTrainedModel, engine: EngineArguments) -> Any:
    """The model with adapters that compute nothing yet. UserError: no such layers."""
    require_package("peft", "--lora", "lora")
    from peft import LoraConfig, get_peft_model

    layers: Any = "all-linear"
    if engine.lora_target_modules:
        layers = engine.lora_target_modules.split(",")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=engine.lora,
        lora_alpha=engine.lora_alpha or 2 * engine.lora,
        lora_dropout=engine.lora_dropout,
        target_modules=layers,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--lora_target_modules {engine.lora_target_modules}: {problem}") from error


def adapted(checkpoint: Path) -> bool:
    """Whether a checkpoint has adapters, and not a whole model."""
    return (checkpoint / ADAPTER).is_file()
