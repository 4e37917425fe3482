"""Which engine trains a run: fairseq, transformers, or the user's own program (--trainer).

fairseq is called directly. The other two are programs that get the path of a stage.json
(`alma.trainer`).
"""

import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from alma.errors import UserError
from alma.options import flag_words
from slurm.lm.run_options import Flags, FlagValues, RunOptions

FAIRSEQ = "fairseq"
TRANSFORMERS = "transformers"
_OF_FAIRSEQ = "gpt2"  # the model_type that fairseq computes too


def engine_of(options: RunOptions | Namespace) -> str | None:
    """The engine that run.json records: transformers, or None for fairseq and for --trainer.

    It is that of --engine, by default fairseq for GPT-2 and checkpoints, transformers for other
    folders of Hugging Face. UserError: --engine without what it needs.
    """
    if options.engine == TRANSFORMERS:
        if not options.init:
            raise UserError("--engine transformers needs --init FOLDER, a model of Hugging Face")
        if options.trainer:
            raise UserError("--engine transformers: --trainer is another engine: leave one out")
        if Path(options.init).is_file():
            problem = "a checkpoint of fairseq: give a folder of Hugging Face"
            raise UserError(f"--engine transformers --init {options.init}: {problem}")
        return TRANSFORMERS
    if options.engine == FAIRSEQ or options.trainer or not options.init:
        return None
    model_type = _model_type(Path(options.init))
    return None if model_type in (None, _OF_FAIRSEQ) else TRANSFORMERS


def _model_type(folder: Path) -> str | None:
    """The model_type in the config.json of a folder; None: it has none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return model_type if isinstance(model_type, str) else None


def program_of(options: RunOptions, flags: Flags, settings: FlagValues) -> tuple[str, ...]:
    """The program that does the jobs of a run, in place of fairseq.

    flags: of the user; settings: values of all flags, from `slurm.lm.request.resolved`.
    """
    if options.trainer:
        return tuple(shlex.split(options.trainer))
    words = [sys.executable, "-m", "transformers_alma"]
    for words_of_flag in flags.values():
        words += words_of_flag
    words += settings["words"]
    words += flag_words("--gradient_accumulation_steps", settings["--update-freq"][0])
    words += flag_words("--num_processes", settings["--distributed-world-size"] or 1)
    return tuple(words)
