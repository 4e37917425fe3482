"""fairseq's configurations as hydra composes them, for forked children:
what the parent composed is there.

Hydra needs half a second for each, as long as a small training.
"""

import copy
import functools

from fairseq import options
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

hydras = utils.compose
_parsed = functools.cache(OverridesParser.create().parse_override)


@functools.cache
def _of_groups(*overrides: str) -> DictConfig:
    return hydras("config", overrides=list(overrides), strict=True)


def compose(name: str, overrides: list[str], strict: bool) -> DictConfig:
    """As hydra's: first the groups (`task=alma_lm`), then the values in them."""
    groups = [override for override in overrides if "." not in override.partition("=")[0]]
    try:
        config = copy.deepcopy(_of_groups(*groups))
        values = [_parsed(override) for override in overrides if override not in groups]
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
    except Exception:  # hydra's own error
        return hydras(name, overrides=overrides, strict=strict)
    OmegaConf.set_struct(config, strict)
    return config


def compose_usual() -> None:
    """What most children need: a training, and an evaluation."""
    flags = ["STREAM", "--arch", "switch_gmoe_tiny", "--optimizer", "adam"]
    flags += ["--lr-scheduler", "polynomial_decay", "--cpu"]
    for parser, words in (
        (options.get_training_parser(default_task="alma_lm"), flags),
        (options.get_eval_lm_parser(default_task="alma_lm"), ["STREAM"]),
    ):
        utils.convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
