"""Measure a stage's models for the records of a run (`fairseq_alma.evaluate`)."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar
from fairseq.models.transformer import TransformerDecoder

from alma.errors import UserError
from alma.evaluations import item_losses_file, write_item_losses
from alma.flops import Shape, Weights
from alma.metrics import bits_per_byte, perplexity
from alma.schema import AMOUNT, LARGEST, require
from alma.stream import document_losses
from fairseq_alma.checkpoint import memory_map_last, memory_map_members
from fairseq_alma.data.token_blocks import Tokens
from fairseq_alma.ensemble import EnsembleDecoder, ensemble_of
from fairseq_alma.moe.metrics import Evaluation, LossesInOrder, evaluate
from fairseq_alma.training import tf32

_COUNTS = ("train_tokens", "valid_tokens", "growth_tokens", "seconds", "peak_memory")
"""Measurements of a training that the task saves in checkpoints (`get_checkpoint_dict`)."""


@dataclass
class Loaded:
    """A model to evaluate, which may be an ensemble, with what its evaluation needs."""

    cfg: Any  # fairseq's configuration
    task: Any  # an AlmaLMTask
    model: torch.nn.Module
    shapes: list[Shape | Weights]  # sizes of each member, for counting FLOPs and parameters
    paths: list[str]  # checkpoint of each member; empty for untrained models
    context_window: int  # tokens of context before each evaluated block; as --context-window


def build_untrained(arguments: list[str], seeds: Sequence[int], context_window: int = 0) -> Loaded:
    """Initialise the model of a fairseq-train command line once for each of `seeds`.

    Several seeds give an ensemble. Without `seeds`, the command line's --seed is used.
    """
    parser = options.get_training_parser(default_task="alma_lm")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    task = tasks.setup_task(cfg.task)
    models = []
    for seed in seeds or [cfg.common.seed]:
        np.random.seed(seed)  # noqa: NPY002  as fairseq-train does
        utils.set_torch_seed(seed)
        models.append(task.build_model(cfg.model))
    shapes = [_shape(cfg.model, models[0].decoder)] * len(models)
    # Not earlier: the models are built for blocks that include the context.
    task.args.tokens_per_sample -= context_window
    return Loaded(cfg, task, ensemble_of(models), shapes, [], context_window)


def load_trained(arguments: list[str], weights: str, context_window: int) -> Loaded:
    """Load the checkpoints of a fairseq-eval-lm command line; `weights`: as
    `checkpoint.with_weights`."""
    parser = options.get_eval_lm_parser(default_task="alma_lm")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    if cfg.common_eval.path is None:
        raise UserError(
            "no checkpoint: give --path CHECKPOINT, or --untrained and fairseq-train's flags"
        )
    cfg.task.tokens_per_sample -= context_window
    paths = utils.split_paths(cfg.common_eval.path)
    members = memory_map_members(paths, weights)
    task = tasks.setup_task(cfg.task)
    models = []
    shapes = []
    for path, member in zip(paths, members, strict=True):
        state = checkpoint_utils.load_checkpoint_to_cpu(path) | {"model": member["model"]}
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
            [path], task=task, state=state
        )
        models.append(model)
        shapes.append(_shape(Namespace(**member["cfg"]["model"]), model.decoder))
    return Loaded(cfg, task, ensemble_of(models), shapes, paths, context_window)


def _shape(args, decoder) -> Shape | Weights:
    """The sizes of a model, for counting FLOPs and parameters; `args` is its configuration."""
    if isinstance(decoder, TransformerDecoder | EnsembleDecoder):
        return Shape.of(args, len(decoder.dictionary))
    weights: set[torch.nn.Parameter] = set()
    for module in decoder.modules():
        if not isinstance(module, torch.nn.Embedding):
            weights.update(module.parameters(recurse=False))
    matrices = {
        weight for weight in weights if weight.numel() > max(weight.shape)
    }  # no bias of (1, 1, D)
    if getattr(decoder, "share_input_output_embed", False):
        matrices.add(decoder.embed_tokens.weight)
    return Weights(sum(matrix.numel() for matrix in matrices), args.tokens_per_sample)


def training_record(checkpoint: str, shape: Shape | Weights) -> dict[str, Any]:
    """The cost of training a stage, from its last checkpoint (`checkpoint` may be the best).

    `flops` count the forward and backward passes of training, as in the paper; `validation_flops`
    and `growth_flops` (choosing the experts to split) are not included. `tf32`: only if products
    of fp32 were TF32.
    """
    state = memory_map_last(checkpoint)
    counts = state["extra_state"].get("AlmaLMTask")
    if counts is None:
        raise UserError(f"{checkpoint} has no token counts: it was not trained by --task alma_lm")
    try:
        require(counts, dict.fromkeys(_COUNTS, AMOUNT), _COUNTS)
    except ValueError as error:
        raise UserError(
            f"{checkpoint}: its token counts are damaged ({error}): train again"
        ) from None
    record = {
        "updates": state["optimizer_history"][-1]["num_updates"] - counts.get("first_update", 0),
        "tokens": counts["train_tokens"],
        "flops": shape.training_flops(counts["train_tokens"]),
        "validation_flops": shape.forward_flops(counts["valid_tokens"]),
        "growth_flops": shape.forward_flops(counts["growth_tokens"]),
        "seconds": counts["seconds"],
        "peak_memory_bytes": counts["peak_memory"],
    }
    if counts.get("tf32"):
        record["tf32"] = True
    return record


def describe(split: str, loaded: Loaded, item_losses: Path | None = None) -> dict[str, Any]:
    """Perplexity on a split per token, and per word and byte if the stream says how many it has.

    item_losses: file for the losses of single documents, of a held-out part of a stream. UserError:
    the model cannot read all tokens of the split, or the loss is not finite.
    """
    task = loaded.task
    in_order = LossesInOrder() if item_losses else None
    result = _evaluate(split, loaded, in_order)
    tokens = len(Tokens(*task.sources[split]))
    if result.tokens != tokens:
        problem = f"only {result.tokens:,} of {tokens:,} tokens can be evaluated"
        remedy = "leave out --sample-break-mode, or give a larger --tokens-per-sample"
        raise UserError(f"{split}: {problem}: {remedy}")
    nll = result.nll / tokens
    if not perplexity(nll) <= LARGEST:
        problem = "training has diverged; try a lower --lr"
        raise UserError(f"the loss on {split} is {nll:.4g}: {problem}")
    if item_losses and in_order:
        part = next(part for part in task.stream.held_out if part.name == split)
        index = f"{task.stream.path(part)}.idx"
        write_item_losses(item_losses, document_losses(in_order.joined(), index, part.documents))
    experts = {}
    for layer, load in result.expert_tokens.items():
        losses = (result.expert_loss[layer] / load.clamp(min=1)).tolist()
        experts[layer] = {"share": (load / load.sum()).tolist(), "loss": losses}
    part = None
    if task.stream:
        part = {"valid": task.stream.valid, "test": task.stream.test}.get(split)
    return {
        "nll": nll,
        "perplexity": perplexity(nll),
        "tokens": result.tokens,
        "words": part and part.words,
        "bytes": part and part.bytes,
        "perplexity_per_word": part and perplexity(result.nll / part.words),
        "bits_per_byte": part and bits_per_byte(result.nll, part.bytes),
        "experts": experts,
    }


def _evaluate(split: str, loaded: Loaded, in_order: LossesInOrder | None) -> Evaluation:
    """Evaluate the model on a split, on a GPU if there is one, without TF32.

    in_order: to which the loss of each token is added.
    """
    cfg = loaded.cfg
    task = loaded.task
    model = loaded.model
    if torch.cuda.is_available() and not cfg.common.cpu:
        model = model.cuda()
        tf32.allow(False)  # torch's default allows it in convolutions
    task.load_dataset(split)
    batches = task.eval_lm_dataloader(
        dataset=task.dataset(split),
        max_tokens=cfg.dataset.max_tokens,
        batch_size=cfg.dataset.batch_size,
        max_positions=model.max_positions(),  # type: ignore[operator]
        num_workers=0,
        context_window=loaded.context_window,
    )
    if sys.stderr.isatty():
        batches = progress_bar.progress_bar(
            batches, log_format="tqdm", prefix=f"evaluating on {split}"
        )
    return evaluate(model, batches, task.dictionary.pad(), in_order)


def measure(loaded: Loaded, valid: bool, run: Path | None = None) -> dict[str, Any]:
    """Measure the model on --gen-subset (default: test).

    `valid`: measure the loss on the validation split too. `training` has the cost of training each
    checkpoint; it is empty for untrained models. On an ordered stream, `matrix` has the perplexity
    on the held-out part of each mega-batch, `matrix_experts` each expert's share of its tokens, by
    Switch layer, and, if it is dated, `matrix_periods` the periods. run: as of `on_held_out`.
    """
    record = describe(loaded.cfg.dataset.gen_subset, loaded)
    stream = loaded.task.stream
    if stream and stream.ordered:
        cells = on_held_out(loaded, range(1, len(stream.held_out) + 1), run)
        record["matrix"] = [cell["value"] for cell in cells]
        if "experts" in cells[0]:
            record["matrix_experts"] = [cell["experts"] for cell in cells]
        if stream.held_out[0].period:
            record["matrix_periods"] = [part.period for part in stream.held_out]
    record["valid"] = None
    if valid:
        on_valid = describe("valid", loaded)
        record["valid"] = {"loss": on_valid["nll"], "perplexity": on_valid["perplexity"]}
    shapes = loaded.shapes
    with_attention = sum(shape.forward_flops(shape.positions, shape.positions) for shape in shapes)
    experts = {shape.experts for shape in shapes if shape.switch_layers}
    return record | {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "eval_flops_per_example": sum(shape.forward_flops(shape.positions) for shape in shapes),
        "eval_flops_per_example_with_attention": with_attention,
        "members": sum(shape.members for shape in shapes),
        "expert_count": experts.pop() if len(experts) == 1 else None,
        "training": list(map(training_record, loaded.paths, shapes)) if loaded.paths else [],
    }


def on_held_out(
    loaded: Loaded, megabatches: Sequence[int], run: Path | None = None
) -> list[dict[str, Any]]:
    """Test the model on the held-out parts of `megabatches`, numbers from 1 on.

    Returns for each the fields of an `alma.evaluations.LateEvaluation` but `stage`, and `tokens`.
    run: the run directory for the losses of single documents (`alma.evaluations.item_losses_file`).
    UserError: the stream has no such held-out part.
    """
    stream = loaded.task.stream
    parts = stream.held_out if stream else ()
    cells = []
    for megabatch in megabatches:
        if not 1 <= megabatch <= len(parts):
            problem = f"--held-out {megabatch}: the stream has {len(parts)} held-out parts"
            remedy = "give numbers of its mega-batches, from 1 on"
            raise UserError(f"{problem}: {remedy}")
        part = parts[megabatch - 1]
        file = item_losses_file(run, loaded.task.args.stage, megabatch) if run else None
        result = describe(part.name, loaded, file)
        cell = {"megabatch": megabatch, "value": result["perplexity"], "tokens": result["tokens"]}
        if part.period:
            cell["period"] = part.period
        if result["experts"]:
            cell["experts"] = _shares(result["experts"])
        cells.append(cell)
    return cells


def _shares(experts: dict[str, Any]) -> dict[str, list[float]]:
    """Each expert's share of the tokens (sum 1), by layer; `experts` is a field of `describe`."""
    return {layer: numbers["share"] for layer, numbers in experts.items()}
