"""Check the configuration in a checkpoint before anything is built from it.

fairseq builds the model that the configuration names, and passes some of its strings to Python's
`eval`. A checkpoint of plain data could therefore run code. `check` accepts only known
architectures, values of the declared types, and literals where fairseq evaluates a string.
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
"""fairseq's models that the task can train, and that a checkpoint may therefore name."""
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
"""Names of settings whose strings fairseq passes to `eval`; a test searches fairseq for others."""
_LONGEST = 4000  # most characters of a string that fairseq evaluates
_MOST_COPIES = 10_000  # most elements that `[x] * n` in such a string may make
_DEEPEST = 20
_LITERALS: tuple[type[ast.AST], ...] = (ast.Expression, ast.List, ast.Tuple, ast.Dict, ast.Constant)
_LITERALS += (ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Mult)

_task_of_command = TASK


def set_task(name: str) -> None:
    """Set the task that this process runs; checkpoints of other tasks are left to fairseq."""
    global _task_of_command
    _task_of_command = name


def applies() -> bool:
    """Whether this process runs our task; for other tasks `check` does nothing."""
    return _task_of_command == TASK


def is_trained(arch: str) -> bool:
    """Whether the task can train `arch`.

    True for this plug-in's archs, archs of the models in FAIRSEQ_MODELS, and language models that
    the command line's --user-dir has registered.
    """
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
    """Check the settings in `state`, loaded from `path`, and clear their user_dir.

    Raises UserError for an unknown architecture, a value of the wrong type, an object that is not
    plain data, a string that fairseq evaluates but that is no literal, or a string that starts with
    a dash and could be parsed as a flag.
    """
    if not applies():
        return
    if state.get("args") is not None:
        raise UserError(
            f"{path}: its settings are of an old fairseq (args): save it with a newer one"
        )
    cfg = state.get("cfg")
    if cfg is None:  # a grown checkpoint has no settings; nothing is built from it
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
            settings["user_dir"] = None  # import code from the command line's --user-dir only


def check_literal(text: str) -> None:
    """Raise ValueError unless `text` is a Python literal.

    Sums and multiples of lists also count as literals, such as `[(512, 3)] * 4`.
    """
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
    """The integer n in a product `list * n` or `n * list`; ValueError if neither side is one."""
    for side in (product.left, product.right):
        if isinstance(side, ast.Constant) and type(side.value) is int:
            return max(1, abs(side.value))
    raise ValueError


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raise ValueError unless `value` is plain data without unsafe strings.

    Unsafe strings begin with a dash (argparse would take them for flags) or contain `${...}`
    (OmegaConf would resolve them). `name` is the setting's name, for messages.
    """
    if value is None or type(value) in (bool, int, float):
        return
    if type(value) is str:
        if len(value) > 1 and value.startswith("-"):  # a single dash means standard input
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
    """Raise ValueError if a string that fairseq evaluates is not a literal."""
    for name in EVALUATED & settings.keys():
        value = settings[name]
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                try:
                    check_literal(text)
                except ValueError as error:
                    raise ValueError(f"cfg.{section}.{name}: {error}") from None


def _model_of(settings: Any) -> str:
    """The name of the model in its `settings`.

    Raises ValueError if there is none, or if the task does not train this architecture.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("_name"), str):
        raise ValueError("cfg.model names no model")
    name = settings["_name"]
    if not is_trained(name):
        names = ", ".join(("switch_gmoe*", *FAIRSEQ_MODELS))
        yours = "your own (--user-dir FOLDER on the command line)"
        raise ValueError(f"cfg.model is a {shown(name)}: only {names} and {yours} are built")
    return name


def _check_model(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting has another type than the model `name` declares."""
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
    """Raise ValueError if a setting of the task has another type than AlmaLMConfig declares."""
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if not isinstance(settings, dict):
        raise ValueError("cfg.task is missing")
    _check_fields("task", settings, TASK_DATACLASS_REGISTRY[TASK])


def _check_fields(section: str, settings: Mapping[str, Any], declared: Any) -> None:
    """Raise ValueError if a setting has another type than its field in the dataclass `declared`."""
    for name, field in declared.__dataclass_fields__.items():
        if name.startswith("_") or settings.get(name) is None:
            continue
        try:
            msgspec.convert(settings[name], field.type)
        except ValueError as error:
            raise ValueError(f"cfg.{section}.{name} is {shown(settings[name])}: {error}") from None


def _fits(action: Action, value: Any) -> bool:
    """Whether argparse could have set `value` for the flag `action`.

    fairseq's older models declare their settings as argparse flags, not as dataclasses.
    """
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
    )  # parsed by a function of fairseq, which evaluates text: see `_check_texts`


def _check_meters(extra: Any) -> None:
    """Raise ValueError if the saved statistics name a class that is not a meter of fairseq.

    fairseq looks up these classes by name and instantiates them.
    """
    metrics = extra.get("metrics") if isinstance(extra, dict) else None
    for meters in metrics.values() if isinstance(metrics, dict) else ():
        for meter in meters if isinstance(meters, list | tuple) else ():
            kind = meter[2] if isinstance(meter, list | tuple) and len(meter) > 2 else None
            if not isinstance(kind, str) or not (kind.endswith("Meter") and kind.isidentifier()):
                raise ValueError(f"its statistics hold {shown(kind)}, which is no meter")
