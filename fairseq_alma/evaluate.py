"""Evaluate a stage: `python -m fairseq_alma.evaluate STREAM --path CKPT[:CKPT...] --gen-subset test --out F`.

Takes fairseq-eval-lm's flags and gives its perplexity, summed in double precision, together with what the
run records need; several checkpoints are an ensemble, whose members' probabilities are averaged (paper,
section 4.1). `--untrained` takes fairseq-train's flags instead and evaluates the model as initialised.
"""

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

from alma.errors import Parser, UserError, command
from alma.files import make_directory, write_json_atomic
from alma.lm_flops import Shape
from alma.metrics import bits_per_byte, perplexity
from fairseq_alma.checkpoint import glance
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


def load_trained(arguments: list[str], context_window: int):
    """The config, task, models and their configs of a fairseq-eval-lm command line."""
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_eval_lm_parser(default_task="alma_lm"), arguments)
    )
    if cfg.common_eval.path is None:
        raise UserError("no checkpoint: give --path CHECKPOINT, or --untrained and fairseq-train's flags")
    cfg.task.tokens_per_sample -= context_window
    task = tasks.setup_task(cfg.task)
    paths = utils.split_paths(cfg.common_eval.path)
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(paths, task=task)
    configs = [glance(path)["cfg"]["model"] for path in paths]
    return cfg, task, models, [each for config in configs for each in members_of(config)]


def members_of(config: dict[str, Any]) -> list[Namespace]:
    """The model configs in a checkpoint's: several in one of `fairseq_alma.combine`."""
    combined = config["_name"] == "alma_ensemble"
    return [Namespace(**each) for each in (config["members"] if combined else [config])]


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


def run(arguments: list[str], untrained: bool, seeds: Sequence[int], context_window: int) -> dict[str, Any]:
    """Evaluate on --gen-subset (test) and return the record that `--out` gets.

    Its `training` has an entry for each checkpoint, none for one of `fairseq_alma.combine`.
    """
    if untrained:
        cfg, task, models, configs = build_untrained(arguments, seeds)
    else:
        cfg, task, models, configs = load_trained(arguments, context_window)
    model = models[0] if len(models) == 1 else EnsembleLanguageModel.of(models)
    split = "test" if untrained else cfg.dataset.gen_subset
    result = measure(cfg, task, model, split, context_window)
    shapes = [Shape.of(config, len(task.dictionary)) for config in configs]
    training = []
    if not untrained and len(shapes) == len(models):
        paths = utils.split_paths(cfg.common_eval.path)
        training = [training_record(*each) for each in zip(paths, shapes, strict=True)]
    experts = {shape.experts for shape in shapes if shape.switch_layers}
    return describe(task, result, split) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "eval_flops_per_example": sum(s.forward_flops(s.positions) for s in shapes),
        "eval_flops_per_example_with_attention": sum(
            s.forward_flops(s.positions, s.positions) for s in shapes
        ),
        "members": sum(shape.members for shape in shapes),
        "expert_count": experts.pop() if len(experts) == 1 else None,
        "training": training,
    }


@command
def main() -> None:
    """Command line: the options below are ours, all others are fairseq's."""
    parser = Parser(prog="python -m fairseq_alma.evaluate", description=main.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="where the result goes, as JSON")
    add("--untrained", action="store_true", help="evaluate the model of a fairseq-train command line")
    add("--seeds", metavar="S[,S...]", help="with --untrained: a model for each, as an ensemble")
    add("--context-window", type=int, default=0, metavar="N", help="as in fairseq-eval-lm")
    own, arguments = parser.parse_known_args()
    try:
        seeds = [int(seed) for seed in own.seeds.split(",")] if own.seeds else []
    except ValueError:
        raise UserError(f"--seeds {own.seeds}: give whole numbers, such as 1,1001") from None
    record = run(arguments, own.untrained, seeds, own.context_window)
    make_directory(own.out.absolute().parent)
    write_json_atomic(own.out, record)
    print(f"perplexity {record['perplexity']:.2f} over {record['tokens']:,} tokens; written to {own.out}")


if __name__ == "__main__":
    main()
