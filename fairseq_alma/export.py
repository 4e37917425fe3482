"""Export a model of fairseq to Hugging Face, for `alma export`.

`AutoModelForCausalLM.from_pretrained(DIR)` loads a dense model, a GPT-2. A Switch Transformer,
whose code is modeling_alma.py, needs `trust_remote_code=True`. With a tokenizer, `AutoTokenizer`
loads that, too.
"""

from pathlib import Path

from alma.card import card_of
from alma.errors import UserError, require_package
from alma.markers import deployed_by
from alma.records import Run
from alma.stream import is_stream


def checkpoint_of(run: Path, t: int | None = None) -> str:
    """The checkpoint that `run` evaluated last, or after mega-batch `t`.

    UserError: none, or several; its file is missing.
    """
    deployed = deployed_by(run, t)
    if deployed.models != 1:
        last = deployed.checkpoints[-1]
        remedy = f"give a checkpoint, such as {last}, and its stream as --tokenizer"
        raise UserError(
            f"{run} deploys an ensemble of {deployed.models} models, and export takes one: {remedy}"
        )
    checkpoint = deployed.checkpoints[0]
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint}: missing: restore it, or export another stage by --t")
    return str(checkpoint)


def _evaluated_weights(run: Run) -> str:
    """The value of --weights with which `run` evaluates its checkpoints."""
    average = str(run.config.get("average", ""))
    if average.startswith("last:"):
        return average
    return "average" if average else "trained"


def _tokenizer_of(run: str, checkpoint: str) -> Path | None:
    """The stream of a run whose tokenizer is that of the model; None: it has none for the model.

    UserError: the stream is gone.
    """
    from fairseq_alma.checkpoint import memory_map

    task = memory_map(checkpoint)["cfg"]["task"]
    data = Path(task["data"])
    if not data.is_dir():
        raise UserError(f"{data}: the stream of {run} is not here; give it as --tokenizer")
    if not is_stream(data):
        return None
    of_a_model = (data / "tokenizer.json").is_file() or (data / "vocab.json").is_file()
    starts_from_it = task.get("end_token", -1) >= 0
    return data if starts_from_it or not of_a_model else None


def export(
    model: str,
    out: Path,
    t: int | None = None,
    tokenizer: Path | None = None,
    weights: str | None = None,
) -> None:
    """Write the model of a run or of a checkpoint into the directory `out`.

    `t`: of a run, the model after that mega-batch, by default the last one; `tokenizer`: a stream,
    by default that of a run; `weights`: as --weights, by default those that a run evaluates.
    UserError: transformers is missing, the run deploys no single model, or as
    `hugging_face.export`.
    """
    require_package("transformers", "alma export", "export")
    checkpoint = model
    is_run = Path(model, "run.json").is_file()
    if is_run:
        weights = weights or _evaluated_weights(Run.read(model))
        checkpoint = checkpoint_of(Path(model), t)
    from fairseq_alma import hugging_face  # torch: seconds to import

    if is_run and tokenizer is None:
        tokenizer = _tokenizer_of(model, checkpoint)
    card = card_of(Path(model), t) if is_run else None
    hugging_face.export(checkpoint, out, tokenizer, weights or "trained", card)
    has_code = (out / "modeling_alma.py").is_file()
    remote = ", trust_remote_code=True" if has_code else ""
    print(f"{out}: load it with AutoModelForCausalLM.from_pretrained(…{remote})")
