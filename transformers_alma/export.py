"""Export the model of a run that transformers trained, for `alma export`."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from alma.card import CARD, card_of
from alma.errors import UserError
from alma.files import filled
from alma.hub_files import TOKENIZER, TRAINING_STATE, matching, remove_others
from alma.markers import deployed_by
from alma.records import Run
from transformers_alma import models
from transformers_alma.adapters import merged


def checkpoint_of(run: Path, t: int | None = None) -> Path:
    """The folder of the model that `run` evaluated last, or after mega-batch `t`.

    UserError: it is missing, or one of an ensemble.
    """
    deployed = deployed_by(run, t)
    checkpoint = deployed.checkpoints[-1]
    if deployed.models != 1:
        problem = f"deploys an ensemble of {deployed.models} models, and export takes one"
        raise UserError(f"{run} {problem}: transformers loads each as it is, such as {checkpoint}")
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: missing: restore it, or export another stage by --t")
    return checkpoint


def export(model: str, out: Path, t: int | None = None) -> None:
    """Write the model of a run, its tokenizer and its card into the directory `out`.

    Adapters are merged into their model. `t`: the model after that mega-batch, by default the
    newest. UserError: as `checkpoint_of`; the model of the adapters has changed; the disk is full.
    """
    run = Path(model)
    checkpoint = checkpoint_of(run, t)
    names = matching(checkpoint, ("[!.]*",)) - matching(checkpoint, TRAINING_STATE)
    note = "a copy of"
    with filled(out, "config.json", (OSError, SafetensorError)) as place:
        if models.adapted(checkpoint):
            merged(checkpoint, _base_of(run, checkpoint), place)
            names &= matching(checkpoint, TOKENIZER)
            note = "the model and the adapters of"
        for name in names:
            shutil.copyfile(checkpoint / name, place / name)
        (place / CARD).write_text(card_of(run, t))
        remove_others(out, place)
    print(f"{out}: {note} {checkpoint}")


def _base_of(run: Path, checkpoint: Path) -> str:
    """The folder of the model that adapters belong to. UserError: it has changed."""
    base = json.loads((checkpoint / models.ADAPTER).read_bytes())["base_model_name_or_path"]
    checksum = Run.read(run).config["init_sha256"]
    if not Path(base).is_dir() or models.checksum_of(base) != checksum:
        problem = f"the model of its adapters, {base}, is missing or has changed"
        raise UserError(f"{run}: {problem}: restore it")
    return base
