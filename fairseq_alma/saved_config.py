"""The configuration that a checkpoint holds, checked before anything is built from it.

fairseq builds the model that a checkpoint names and evaluates some of its texts as Python. So a
file of plain data could run code. `check` accepts known architectures, values of the declared types
and texts without calls.
"""

import ast
import math
from argparse import Action, ArgumentParser
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from omegaconf import DictConfig, ListConfig, OmegaConf

from alma.errors import UserError
from alma.schema import shown

TASK = "alma_lm"
FAIRSEQ_MODELS = ("transformer_lm", "lstm_lm", "fconv_lm", "lightconv_lm")
"""The models of fairseq that the task trains and that a checkpoint may name."""
_NAMES = """
    adafactor_eps adam_betas adamax_betas adaptive_input_cutoff adaptive_softmax_cutoff
    character_filters conv_aggregator_layers conv_feature_layers decoder_attention decoder_glu
    decoder_kernel_size_list decoder_layers decoder_xformers_att_config downsample
    encoder_attention encoder_glu encoder_kernel_size_list encoder_layers
    encoder_xformers_att_config extra_data extra_lang_pairs feature_encoder_spec gated_attention
    lamb_betas langtoks left_pad_source left_pad_target lr pipeline_balance
    pipeline_decoder_balance pipeline_decoder_devices pipeline_devices pipeline_encoder_balance
    pipeline_encoder_devices pretrained project_input sampling_weights self_attention
    update_freq weight_softmax wer_args xformers_att_config
"""
EVALUATED = frozenset(_NAMES.split())
"""Settings whose texts fairseq evaluates; tests compare them with its sources."""
_LONGEST = 4000  # characters of a text that fairseq evaluates
_MOST_COPIES = 10_000  # elements that `[x] * n` may have in it
_DEEPEST = 20
_LITERALS: tuple[type[ast.AST], ...] = (ast.Expression, ast.List, ast.Tuple, ast.Dict, ast.Constant)
_LITERALS += (ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Mult)

_task_of_command = TASK


def set_task(name: str) -> None:
    """Tell which task this process runs: what another task of fairseq's builds is not checked
    here."""
    global _task_of_command
    _task_of_command = name


def applies() -> bool:
    """Whether this process runs our task, so that `check` looks at a checkpoint."""
    return _task_of_command == TASK


def is_trained(arch: str) -> bool:
    """Whether the task trains models of `arch`: ours, those of FAIRSEQ_MODELS, and language models
    that a --user-dir of the command line has registered."""
    from fairseq.models import (
        ARCH_MODEL_NAME_REGISTRY,
        ARCH_MODEL_REGISTRY,
        MODEL_REGISTRY,
        FairseqLanguageModel,
    )

    kind = ARCH_MODEL_REGISTRY.get(arch, MODEL_REGISTRY.get(arch))
    if kind is None or not issubclass(kind, FairseqLanguageModel):
        return False
    if kind.__module__.startswith("fairseq."):
        return ARCH_MODEL_NAME_REGISTRY.get(arch, arch) in FAIRSEQ_MODELS
    return True


def check(path: str, state: dict[str, Any]) -> None:
    """Check the settings of a checkpoint that was loaded from `path`, and forget its --user-dir.

    UserError: another architecture, a value of another type, an object that is no plain data, a
    text that is evaluated and has more than literals, or one that could pass for a flag.
    """
    if not applies():
        return
    if state.get("args") is not None:
        raise UserError(
            f"{path}: its settings are of an old fairseq (args): save it with a newer one"
        )
    cfg = state.get("cfg")
    if cfg is None:  # nothing is built from it
        return
    plain: Any = OmegaConf.to_container(cfg) if isinstance(cfg, DictConfig) else cfg
    try:
        if type(plain) is not dict:
            raise ValueError(f"its settings are {type(plain).__name__}")
        _check_plain("cfg", plain)
        if not isinstance(plain.get("checkpoint", {}), dict):
            raise ValueError("cfg.checkpoint is no group of settings")
        name = _model_of(plain.get("model"))
        for section, settings in plain.items():
            if isinstance(settings, dict):
                _check_texts(section, settings)
        _check_model(name, plain["model"])
        _check_task(plain.get("task"))
        _check_meters(state.get("extra_state"))
    except ValueError as error:
        remedy = "it could run code, or is damaged; take another copy, or train the model again"
        raise UserError(f"{path}: {error}: {remedy}") from None
    for settings in cfg.values():
        if isinstance(settings, dict | DictConfig) and settings.get("user_dir"):
            settings["user_dir"] = None  # code is imported only from the command line's


def check_literal(text: str) -> None:
    """ValueError: `text` is no Python literal, such as `[(512, 3)] * 4`; sums and multiples of
    lists are."""
    if not text.strip():
        return
    try:
        if len(text) > _LONGEST:
            raise ValueError
        tree = ast.parse(text.strip(), mode="eval")
        nodes = list(ast.walk(tree))
        if not all(isinstance(node, _LITERALS) for node in nodes):
            raise ValueError
        products = [
            node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        ]
        if math.prod(_factor(product) for product in products) > _MOST_COPIES:
            raise ValueError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"{shown(text)} is evaluated by fairseq and is no literal such as [1, 2]"
        ) from None


def _factor(product: ast.BinOp) -> int:
    """The number by which a product repeats its list. ValueError: neither side is a whole
    number."""
    for side in (product.left, product.right):
        if isinstance(side, ast.Constant) and type(side.value) is int:
            return max(1, abs(side.value))
    raise ValueError


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    """ValueError: a value is no plain data, or a text that begins with a dash or refers to other
    settings."""
    if value is None or type(value) in (bool, int, float):
        return
    if type(value) is str:
        if len(value) > 1 and value.startswith("-"):  # alone: standard input
            raise ValueError(f"{name} is {shown(value)}, which could pass for a flag")
        if "${" in value:
            raise ValueError(f"{name} is {shown(value)}, which refers to other settings")
        return
    if depth > _DEEPEST or type(value) not in (list, tuple, dict):
        raise ValueError(f"{name} holds {type(value).__name__}, which is no plain data")
    items: Iterator[tuple[Any, Any]] = iter(
        value.items() if isinstance(value, dict) else enumerate(value)
    )
    for key, item in items:
        if type(key) not in (str, int):
            raise ValueError(f"{name} has a key that is no text")
        _check_plain(f"{name}.{shown(key)[1:-1] if isinstance(key, str) else key}", item, depth + 1)


def _check_texts(section: str, settings: Mapping[str, Any]) -> None:
    """ValueError: a text that fairseq evaluates is no literal."""
    for name in EVALUATED & settings.keys():
        value = settings[name]
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                try:
                    check_literal(text)
                except ValueError as error:
                    raise ValueError(f"cfg.{section}.{name}: {error}") from None


def _model_of(settings: Any) -> str:
    """The model that its settings name. ValueError: an architecture that the task does not train,
    or none."""
    if not isinstance(settings, dict) or not isinstance(settings.get("_name"), str):
        raise ValueError("cfg.model names no model")
    name = settings["_name"]
    if not is_trained(name):
        names = ", ".join(("switch_gmoe*", *FAIRSEQ_MODELS))
        yours = "your own (--user-dir FOLDER on the command line)"
        raise ValueError(f"cfg.model is a {shown(name)}: only {names} and {yours} are built")
    return name


def _check_model(name: str, settings: Mapping[str, Any]) -> None:
    """ValueError: a setting of the model `name` has another type than its class declares."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

    kind = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    of_class = [key for key, registered in MODEL_REGISTRY.items() if registered is kind]
    declared = next(
        (MODEL_DATACLASS_REGISTRY[key] for key in of_class if key in MODEL_DATACLASS_REGISTRY), None
    )
    if declared is not None:
        _check_fields("model", settings, declared)
        return
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    kind.add_args(parser)
    for action in parser._actions:
        if settings.get(action.dest) is not None and not _fits(action, settings[action.dest]):
            raise ValueError(
                f"cfg.model.{action.dest} is {shown(settings[action.dest])}, of another type"
            )


def _check_task(settings: Any) -> None:
    """ValueError: a setting of the task has another type than ours declares."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if not isinstance(settings, dict):
        raise ValueError("cfg.task is missing")
    _check_fields("task", settings, TASK_DATACLASS_REGISTRY[TASK])


def _check_fields(section: str, settings: Mapping[str, Any], declared: Any) -> None:
    """ValueError: a setting has not the type of its field in the dataclass `declared`."""
    for name, field in declared.__dataclass_fields__.items():
        if name.startswith("_") or settings.get(name) is None:
            continue
        try:
            msgspec.convert(settings[name], field.type)
        except ValueError as error:
            raise ValueError(f"cfg.{section}.{name} is {shown(settings[name])}: {error}") from None


def _fits(action: Action, value: Any) -> bool:
    """Whether a value can be that of a flag of fairseq's older models."""
    if action.nargs == 0:
        return isinstance(value, bool)
    if action.choices is not None:
        return value in action.choices
    if action.type is float:
        return type(value) in (int, float)
    if action.type is int:
        return type(value) is int
    if action.type in (None, str):
        return isinstance(value, str)
    return isinstance(
        value, bool | list | str | ListConfig
    )  # by a function, which `_check_texts` knows


def _check_meters(extra: Any) -> None:
    """ValueError: saved statistics name what is no meter; fairseq looks their classes up by
    name."""
    metrics = extra.get("metrics") if isinstance(extra, dict) else None
    for meters in metrics.values() if isinstance(metrics, dict) else ():
        for meter in meters if isinstance(meters, list | tuple) else ():
            kind = meter[2] if isinstance(meter, list | tuple) and len(meter) > 2 else None
            if not isinstance(kind, str) or not (kind.endswith("Meter") and kind.isidentifier()):
                raise ValueError(f"its statistics hold {shown(kind)}, which is no meter")
