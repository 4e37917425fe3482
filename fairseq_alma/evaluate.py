"""Evaluate a stage's model: `python -m fairseq_alma.evaluate STREAM --path CKPT --gen-subset test --out F`.

Takes fairseq-eval-lm's flags and gives its perplexity, summed in double precision, together with what the
run records need. `--untrained` takes fairseq-train's flags instead and evaluates the model as initialised.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar

from alma.errors import UserError, command
from alma.files import write_json_atomic
from alma.metrics import bits_per_byte, perplexity
from fairseq_alma.checkpoint import glance
from fairseq_alma.ensemble import EnsembleLanguageModel
from fairseq_alma.evaluation import Evaluation, evaluate
from fairseq_alma.flops import Shape


def build_untrained(arguments: list[str]):
    """The config, task and model of a fairseq-train command line, initialised as fairseq-train would."""
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(default_task="alma_lm"), arguments)
    )
    np.random.seed(cfg.common.seed)  # noqa: NPY002  as fairseq-train does
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    return cfg, task, task.build_model(cfg.model), cfg.model


def load_trained(arguments: list[str]):
    """The config, task and model of a fairseq-eval-lm command line."""
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_eval_lm_parser(default_task="alma_lm"), arguments)
    )
    if cfg.common_eval.path is None:
        raise UserError("no checkpoint: give --path CHECKPOINT, or --untrained and fairseq-train's flags")
    cfg.task.tokens_per_sample -= cfg.eval_lm.context_window
    task = tasks.setup_task(cfg.task)
    models, saved, _ = checkpoint_utils.load_model_ensemble_and_task([cfg.common_eval.path], task=task)
    if len(models) > 1 or isinstance(models[0], EnsembleLanguageModel):
        raise UserError(f"{cfg.common_eval.path} is an ensemble: evaluate it with fairseq-eval-lm")
    return cfg, task, models[0], saved.model


def training_record(checkpoint: str, shape: Shape) -> dict[str, Any]:
    """What the training of a stage took, from its last checkpoint (the best may be an earlier one)."""
    last = Path(checkpoint).with_name("checkpoint_last.pt")
    state = glance(str(last if last.exists() else checkpoint))
    counts = state["extra_state"].get("AlmaLMTask")
    if counts is None:
        raise UserError(f"{checkpoint} was not trained by --task alma_lm: its tokens are not known")
    return {
        "updates": state["optimizer_history"][-1]["num_updates"],
        "tokens": counts["train_tokens"],
        "flops": shape.training_flops(counts["train_tokens"]),
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


def run(arguments: list[str], untrained: bool) -> dict[str, Any]:
    """Evaluate on --gen-subset (test) and return the record that `--out` gets."""
    cfg, task, model, model_args = (build_untrained if untrained else load_trained)(arguments)
    split = "test" if untrained else cfg.dataset.gen_subset
    if torch.cuda.is_available() and not cfg.common.cpu:
        model = model.cuda()
    task.load_dataset(split)
    batches = task.eval_lm_dataloader(
        dataset=task.dataset(split),
        max_tokens=cfg.dataset.max_tokens,
        batch_size=cfg.dataset.batch_size,
        max_positions=model.max_positions(),
        num_workers=0,
        context_window=0 if untrained else cfg.eval_lm.context_window,
    )
    if sys.stderr.isatty():
        batches = progress_bar.progress_bar(batches, log_format="tqdm", prefix=f"evaluating on {split}")
    result = evaluate(model, batches, task.dictionary.pad())
    if not math.isfinite(result.nll):
        raise UserError(f"the loss on {split} is {result.nll}: training has diverged; try a lower --lr")
    shape = Shape.of(model_args, len(task.dictionary))
    return describe(task, result, split) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "eval_flops_per_example": shape.forward_flops(shape.positions),
        "eval_flops_per_example_with_attention": shape.forward_flops(shape.positions, shape.positions),
        "expert_count": shape.experts,
        "training": None if untrained else training_record(cfg.common_eval.path, shape),
    }


@command
def main() -> None:
    """Command line: --out FILE and --untrained are ours, all else is fairseq's."""
    arguments = sys.argv[1:]
    if "--out" not in arguments or arguments[-1] == "--out":
        raise UserError("give --out FILE, where the result goes as JSON")
    position = arguments.index("--out")
    out = arguments[position + 1]
    del arguments[position : position + 2]
    untrained = "--untrained" in arguments
    if untrained:
        arguments.remove("--untrained")
    record = run(arguments, untrained)
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    write_json_atomic(out, record)
    print(f"perplexity {record['perplexity']:.2f} over {record['tokens']:,} tokens; written to {out}")


if __name__ == "__main__":
    main()
