"""Flags of the engine: those of transformers.TrainingArguments, and a few of its own.

flags.yaml says of each flag of TrainingArguments what it does to a training that is interrupted and
started again, and refuses with a remedy those that a restart would not keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from alma import averages
from alma.errors import UserError, closest
from transformers_alma import accelerate_config

FLAGS = Path(__file__).with_name("flags.yaml")
DEFAULTS: dict[str, Any] = {
    "output_dir": ".",
    "save_total_limit": 1,
    "train_sampling_strategy": "sequential",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Values of TrainingArguments where they are not those of transformers."""
_OURS = "of this engine: "
_BY_LAUNCHER = "set by `alma train`: "


def _argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": _OURS + text})


def _by_launcher(default: Any, text: str) -> Any:
    """A flag that `alma train` sets, and no user."""
    return field(default=default, metadata={"help": _BY_LAUNCHER + text})


@dataclass
class EngineArguments:
    """Flags that TrainingArguments lacks, with the names of transformers' run_clm.py."""

    block_size: int | None = _argument(
        None, "tokens of a block (default: positions of the model, at most 1,024)"
    )
    dtype: str = _argument(
        "float32", "of the weights in training: float32, bfloat16, float16, or auto, as saved"
    )
    attn_implementation: str | None = _argument(None, "such as sdpa or flash_attention_2")
    random_weights: bool = _argument(
        False, "start from random weights of the seed, not from those in the folder"
    )
    lora: int = _argument(0, "train adapters of this rank (LoRA) instead of all weights")
    lora_alpha: int | None = _argument(None, "scale of the adapters (default: 2 x --lora)")
    lora_dropout: float = _argument(0.0, "dropout before the adapters")
    lora_target_modules: str | None = _argument(
        None, "layers that get adapters, such as q_proj,v_proj (default: all linear layers)"
    )
    num_processes: int | None = _argument(
        None, "processes of a training (default: one for each GPU)"
    )
    accelerate_config: str | None = _argument(
        None, "a file of `accelerate config`, such as one with FSDP"
    )
    init: str = _by_launcher("", "folder of the model")
    init_sha256: str = _by_launcher("", "checksum of its weights")
    average: str = _by_launcher("0", "average of the weights")
    first_token: int | None = _by_launcher(
        None, "id that begins each block (default: the token before it)"
    )
    num_machines: int = _by_launcher(1, "nodes that share the processes")
    machine_rank: int = _by_launcher(0, "number of this node, from 0")
    attempt: str = _by_launcher("", "id of this start on several nodes")


_SET_BY_THE_LAUNCHER = {
    declared.name
    for declared in fields(EngineArguments)
    if declared.metadata["help"].startswith(_BY_LAUNCHER)
}


@dataclass(frozen=True)
class Arguments:
    """Parsed flags: ours, and those of TrainingArguments by name."""

    engine: EngineArguments
    training: dict[str, Any]

    @property
    def has_several_processes(self) -> bool:
        """Whether several processes do a training."""
        return (self.engine.num_processes or 1) > 1

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a share of the weights (FSDP)."""
        config = self.engine.accelerate_config
        return self.has_several_processes and accelerate_config.is_sharded(config, self.training)

    def training_arguments(self, **values: Any) -> TrainingArguments:
        """TrainingArguments with `values` in place of some of the flags.

        UserError: flags that contradict each other or the machine, such as bf16 on a GPU without.
        """
        try:
            return TrainingArguments(**{**self.training, **values})
        except (ValueError, ImportError) as error:
            raise UserError(" ".join(str(error).split())) from error


@cache
def refused() -> dict[str, str]:
    """The remedy for each flag of TrainingArguments that is refused."""
    return yaml.safe_load(FLAGS.read_text())["refused"]


class FlagParser(HfArgumentParser):
    """The parser of all flags; a wrong one raises a UserError."""

    def __init__(self) -> None:
        kinds: Any = (TrainingArguments, EngineArguments)
        super().__init__(kinds, allow_abbrev=False, add_help=False)

    def error(self, message: str) -> NoReturn:
        """Instead of printing the usage."""
        raise UserError(f"{message} (flags of transformers' TrainingArguments)")


def parse(words: Sequence[str]) -> Arguments:
    """Parse the flags of the engine. UserError: unknown, refused, or a wrong value."""
    flags = FlagParser()
    values, unknown = flags.parse_known_args(list(words))
    if unknown:
        names = [name for action in flags._actions for name in action.option_strings]
        similar = closest(unknown[0].partition("=")[0], names)
        hint = f": did you mean {similar}?" if similar else ": leave it out"
        raise UserError(f"{unknown[0]}: no flag of transformers' TrainingArguments{hint}")
    parsed = vars(values)
    ours = {name: parsed.pop(name) for name in EngineArguments.__dataclass_fields__}
    for name, default in DEFAULTS.items():
        if parsed[name] == flags.get_default(name):
            parsed[name] = default
    arguments = Arguments(EngineArguments(**ours), parsed)
    _check(arguments)
    return arguments


def check_given(words: Sequence[str]) -> None:
    """UserError: a flag that the user may not give."""
    remedies = refused()
    for word in words:
        name = word.partition("=")[0]
        option = name.lstrip("-").replace("-", "_").removeprefix("no_")
        if not name.startswith("--"):
            continue
        if option in _SET_BY_THE_LAUNCHER:
            raise UserError(f"{name}: leave it out, `alma train` sets it")
        if option in remedies:
            raise UserError(f"{name}: {remedies[option]}")


def _check(arguments: Arguments) -> None:
    """UserError: a value out of range."""
    training = arguments.training
    engine = arguments.engine
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if training[name] < 1:
            raise UserError(f"--{name} {training[name]}: at least 1")
    if training["save_total_limit"] < 1:
        reason = "a restart needs the last checkpoint"
        raise UserError(f"--save_total_limit {training['save_total_limit']}: {reason}; give 1")
    if training["save_strategy"] != "steps":
        raise UserError(f"--save_strategy {training['save_strategy']}: give --save_steps N")
    if training["save_steps"] < 1:
        raise UserError(f"--save_steps {training['save_steps']:g}: give a number of updates")
    if engine.block_size is not None and engine.block_size < 2:
        problem = "a block has a token of context and at least one to predict"
        raise UserError(f"--block_size {engine.block_size}: {problem}; give 2 or more")
    dtypes = ("float32", "bfloat16", "float16", "auto")
    if engine.dtype not in dtypes:
        raise UserError(f"--dtype {engine.dtype}: choose from {', '.join(dtypes)}")
    if engine.num_processes is not None and engine.num_processes < 1:
        raise UserError(f"--num_processes {engine.num_processes}: at least 1")
    if engine.accelerate_config:
        accelerate_config.check(engine.accelerate_config, training)
    if averages.last_of(engine.average):
        remedy = "give a decay such as .999, or poly:8"
        raise UserError(f"--average {engine.average} is not for transformers' Trainer: {remedy}")
    _check_sharding(arguments)
    _check_adapters(engine)


def _check_sharding(arguments: Arguments) -> None:
    """UserError: flags that FSDP does not go with."""
    training = arguments.training
    engine = arguments.engine
    if not accelerate_config.is_sharded(engine.accelerate_config, training):
        return
    if training["use_cpu"]:
        raise UserError("--use_cpu: accelerate shards models (FSDP) on GPUs alone: leave FSDP out")
    if averages.read(engine.average):
        problem = "each process has a share of the weights"
        raise UserError(f"--average {engine.average}: {problem} with FSDP: leave out --average")


def _check_adapters(engine: EngineArguments) -> None:
    """UserError: flags of adapters that contradict others."""
    if engine.lora < 0:
        raise UserError(f"--lora {engine.lora}: give a rank such as 16")
    if engine.random_weights and engine.lora:
        raise UserError("--random_weights: adapters need a trained model; leave out --lora")
    given_without_lora = engine.lora_alpha or engine.lora_target_modules or engine.lora_dropout
    if given_without_lora and not engine.lora:
        raise UserError("--lora_alpha, --lora_dropout and --lora_target_modules need --lora R")
