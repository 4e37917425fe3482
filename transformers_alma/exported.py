"""Models of fairseq that `alma export` wrote, whose code lies beside their weights.

The code in a folder is never run: that of this installation takes its place.
"""

import importlib.util
import json
import sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

_NAME = "modeling_alma"
_CODE = Path(__file__).resolve().parent.parent / "fairseq_alma" / f"{_NAME}.py"
"""Needs torch and transformers alone. `import fairseq_alma` would load fairseq."""
_CLASS_OF_CONFIG = f"{_NAME}.AlmaConfig"  # as `fairseq_alma.hugging_face` writes it


def register_code(folder: str) -> None:
    """Let transformers load the model in `folder`, if `alma export` wrote it with code."""
    if _NAME in sys.modules or not _has_code_of_alma(folder):
        return
    spec = importlib.util.spec_from_file_location(_NAME, _CODE)
    assert spec
    assert spec.loader
    code = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = code
    spec.loader.exec_module(code)
    AutoConfig.register(code.AlmaConfig.model_type, code.AlmaConfig)
    AutoModelForCausalLM.register(code.AlmaConfig, code.AlmaForCausalLM)


def _has_code_of_alma(folder: str) -> bool:
    """Whether the configuration names the code that `alma export` writes."""
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        return bool(config["auto_map"]["AutoConfig"] == _CLASS_OF_CONFIG)
    except (OSError, ValueError, KeyError, TypeError):
        return False
