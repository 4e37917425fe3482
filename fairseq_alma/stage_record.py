"""The measurements that the records of a run need of a stage's models (see `fairseq_alma.evaluate`)."""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar

from alma.errors import UserError
from alma.flops import Shape
from alma.metrics import bits_per_byte, perplexity
from fairseq_alma.checkpoint import averaged, glance, glance_at
from fairseq_alma.ensemble import EnsembleLanguageModel
from fairseq_alma.evaluation import Evaluation, evaluate


def build_untrained(arguments: list[str], seeds: Sequence[int]):
    """The config, task, models and their configs of a fairseq-train command line, as it would initialise
    them with each of `seeds` (default: with its own)."""
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(default_task="alma_lm"), arguments)
    )
    task = tasks.setup_task(cfg.task)
    models = []
    for seed in seeds or [cfg.common.seed]:
        np.random.seed(seed)  # noqa: NPY002  as fairseq-train does
        utils.set_torch_seed(seed)
        models.append(task.build_model(cfg.model))
    return cfg, task, models, [cfg.model] * len(models)


def load_trained(arguments: list[str], weights: str, context_window: int):
    """The config, task, models and their configs of a fairseq-eval-lm command line."""
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_eval_lm_parser(default_task="alma_lm"), arguments)
    )
    if cfg.common_eval.path is None:
        raise UserError("no checkpoint: give --path CHECKPOINT, or --untrained and fairseq-train's flags")
    cfg.task.tokens_per_sample -= context_window
    paths = utils.split_paths(cfg.common_eval.path)
    states = glance_at(paths, weights)
    task = tasks.setup_task(cfg.task)
    models = [_load(path, task, weights) for path in paths]
    configs = [state["cfg"]["model"] for state in states]
    return cfg, task, models, [each for config in configs for each in members_of(config)]


def _load(path: str, task, weights: str) -> torch.nn.Module:
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    if weights == "average":
        state = averaged(path, state)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=task, state=state)
    return model


def members_of(config: dict[str, Any]) -> list[Namespace]:
    """The model configs in a checkpoint's: several in one of `fairseq_alma.combine`."""
    combined = config["_name"] == "alma_ensemble"
    return [Namespace(**each) for each in (config["members"] if combined else [config])]


def training_record(checkpoint: str, shape: Shape) -> dict[str, Any]:
    """What the training of a stage took, from its last checkpoint (the best may be an earlier one).

    `flops` are those of training, forward and backward, as in the paper; `validation_flops` (None in
    checkpoints of earlier versions) and `growth_flops` (choosing the experts to split) come on top.
    """
    last = Path(checkpoint).with_name("checkpoint_last.pt")
    state = glance(str(last if last.exists() else checkpoint))
    counts = state["extra_state"].get("AlmaLMTask")
    if counts is None:
        raise UserError(f"{checkpoint} was not trained by --task alma_lm: its tokens are not known")
    return {
        "updates": state["optimizer_history"][-1]["num_updates"],
        "tokens": counts["train_tokens"],
        "flops": shape.training_flops(counts["train_tokens"]),
        "validation_flops": shape.forward_flops(counts["valid_tokens"]) if "valid_tokens" in counts else None,
        "growth_flops": shape.forward_flops(counts["growth_tokens"]),
        "seconds": counts["seconds"],
        "peak_memory_bytes": counts["peak_memory"],
    }


def describe(task, result: Evaluation, split: str) -> dict[str, Any]:
    """Perplexity per token, and per word and byte where the data say how many there are."""
    part = {"valid": task.stream.valid, "test": task.stream.test}.get(split) if task.stream else None
    nll = result.nll / result.tokens
    return {
        "nll": nll,
        "perplexity": perplexity(nll),
        "tokens": result.tokens,
        "words": part and part.words,
        "bytes": part and part.bytes,
        "perplexity_per_word": part and perplexity(result.nll / part.words),
        "bits_per_byte": part and bits_per_byte(result.nll, part.bytes),
        "experts": {
            layer: {
                "share": (load / load.sum()).tolist(),
                "loss": (result.expert_loss[layer] / load.clamp(min=1)).tolist(),
            }
            for layer, load in result.expert_tokens.items()
        },
    }


def measure(cfg, task, model, split: str, context_window: int) -> Evaluation:
    """Evaluate on a split. UserError: its loss is not finite."""
    if torch.cuda.is_available() and not cfg.common.cpu:
        model = model.cuda()
    task.load_dataset(split)
    batches = task.eval_lm_dataloader(
        dataset=task.dataset(split),
        max_tokens=cfg.dataset.max_tokens,
        batch_size=cfg.dataset.batch_size,
        max_positions=model.max_positions(),
        num_workers=0,
        context_window=context_window,
    )
    if sys.stderr.isatty():
        batches = progress_bar.progress_bar(batches, log_format="tqdm", prefix=f"evaluating on {split}")
    result = evaluate(model, batches, task.dictionary.pad())
    if not math.isfinite(result.nll):
        raise UserError(f"the loss on {split} is {result.nll}: training has diverged; try a lower --lr")
    return result


def measure_trained(arguments: list[str], weights: str, context_window: int, valid: bool) -> dict[str, Any]:
    """The record of a fairseq-eval-lm command line, evaluated on its --gen-subset (see `_record`).

    `weights` as in `defaults.WEIGHTS`. Its `training` has an entry for each checkpoint, none for one of
    `fairseq_alma.combine`.
    """
    cfg, task, models, configs = load_trained(arguments, weights, context_window)
    record, shapes = _record(cfg, task, models, configs, cfg.dataset.gen_subset, context_window, valid)
    training = []
    if len(shapes) == len(models):
        paths = utils.split_paths(cfg.common_eval.path)
        training = [training_record(*each) for each in zip(paths, shapes, strict=True)]
    return record | {"training": training}


def measure_untrained(
    arguments: list[str], seeds: Sequence[int], context_window: int, valid: bool
) -> dict[str, Any]:
    """The same of the model that a fairseq-train command line initialises, on `test`."""
    cfg, task, models, configs = build_untrained(arguments, seeds)
    record, _ = _record(cfg, task, models, configs, "test", context_window, valid)
    return record | {"training": []}


def _record(
    cfg, task, models: list, configs: list, split: str, context_window: int, valid: bool
) -> tuple[dict[str, Any], list[Shape]]:
    """The record without `training`, and the shapes of the models; `valid`: with a validation score."""
    model = models[0] if len(models) == 1 else EnsembleLanguageModel.of(models)
    record = describe(task, measure(cfg, task, model, split, context_window), split)
    score = None
    if valid:
        result = measure(cfg, task, model, "valid", context_window)
        loss = result.nll / result.tokens
        score = {"loss": loss, "perplexity": perplexity(loss)}
    shapes = [Shape.of(config, len(task.dictionary)) for config in configs]
    experts = {shape.experts for shape in shapes if shape.switch_layers}
    return record | {
        "valid": score,
        "parameters": sum(p.numel() for p in model.parameters()),
        "eval_flops_per_example": sum(s.forward_flops(s.positions) for s in shapes),
        "eval_flops_per_example_with_attention": sum(
            s.forward_flops(s.positions, s.positions) for s in shapes
        ),
        "members": sum(shape.members for shape in shapes),
        "expert_count": experts.pop() if len(experts) == 1 else None,
    }, shapes
