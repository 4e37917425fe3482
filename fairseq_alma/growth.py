"""Grow a Switch Transformer between stages by splitting its losing experts (paper, section 5 and App. A).

The losing experts of a layer have the largest summed validation loss, without dropped tokens. A split copies
an expert, and the router (`--grow-router`) changes in one of three ways:

* copy: copies the router row, as the paper's language models do (section 5). All gates are divided by 1 + the
  copied probabilities.
* preserve: copies the router row and keeps the model's function (see `Router`, `copies`).
* tree: adds a gate for the split and keeps the model's function (section 4.2; see `Router`, `parent`).

Two equal router rows tie, and argmax picks the first, the parent: its copy would get hardly any tokens.
Noise, which the paper does not mention, breaks the tie; `--grow-router copy --grow-noise 0` is a plain copy.
The result is SAVE_DIR/grown.pt, a checkpoint for fairseq.

Shapes: E experts, D model, K split experts.
"""

import logging
import os
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import numpy_seed
from fairseq.distributed import utils as distributed_utils
from torch import Tensor

from alma.errors import UserError
from alma.files import checkpoint_file
from fairseq_alma.checkpoint import memory_map
from fairseq_alma.moe.layer import STACKED, SwitchFFN, switch_layers
from fairseq_alma.moe.metrics import evaluate
from fairseq_alma.moe.router import Router, Routing, upgrade_router
from fairseq_alma.training import schedule
from fairseq_alma.training.precision import FP32, by_parameter

logger = logging.getLogger(__name__)

GROWN = "grown.pt"
_ROWS = (*STACKED, "router.weight")
"""Parameters of a Switch layer; dimension 0 is the expert."""


def losing_experts(losses: Tensor, count: int) -> list[int]:
    """The `count` experts with the largest summed loss, largest first; `losses` (E,).

    UserError: `count` > E, since a growth splits each expert at most once.
    """
    if count > losses.numel():
        raise UserError(
            f"--grow-experts {count}: a growth splits each of the {losses.numel()} experts at most once"
        )
    return torch.topk(losses, count).indices.tolist()


def grow_model_state(
    state: dict[str, Tensor],
    parents: dict[str, list[int]],
    router: str,
    noise: float = 0.0,
    mean_tokens: dict[str, Tensor] | None = None,
    seed: int = 1,
) -> None:
    """Split experts in the Switch layers of a model's state dict, in place.

    `parents[prefix]` lists the experts to split in the layer `prefix`, such as `decoder.layers.1.fc1`. The
    router rows of parent and copy differ by Gaussian noise of standard deviation `noise`, half on each, which
    changes the gates least; in a tree the noise is the gate of the split. It is orthogonal to the parent's
    mean token, `mean_tokens[prefix]` (E, D), and so divides the tokens evenly. Otherwise most or all go to
    one of the two (LOG.md). UserError: another `router` after a tree.
    """
    generator = torch.Generator().manual_seed(seed)
    for prefix, split in parents.items():
        upgrade_router(state, f"{prefix}.router.")
        if router != "tree" and (state[f"{prefix}.router.parent"] >= 0).any():
            raise UserError(f"{prefix} was grown as a tree: use --grow-router tree again")
        for name in (*_ROWS, "router.copies", "router.parent"):
            key = f"{prefix}.{name}"
            state[key] = torch.cat([state[key], state[key][split]])
        between = torch.zeros(len(split), state[f"{prefix}.router.weight"].size(1))
        if noise and mean_tokens:
            mean = torch.nn.functional.normalize(mean_tokens[prefix][split].float(), dim=-1)
            between = noise * torch.randn(mean.shape, generator=generator)
            between -= (between * mean).sum(-1, keepdim=True) * mean
        _split_router(state, f"{prefix}.router", split, router, between)


def _split_router(
    state: dict[str, Tensor], prefix: str, split: list[int], router: str, between: Tensor
) -> None:
    """Turn the last K rows of a router, copies of rows `split`, into new experts' rows; `between` (K, D)."""
    weight, copies, parent = (f"{prefix}.{name}" for name in ("weight", "copies", "parent"))
    rows = state[weight].float()
    new = list(range(len(rows) - len(split), len(rows)))
    if router == "tree":
        rows[new] = between
        state[copies][new] = 1
        state[parent][new] = torch.tensor(split)
    else:
        rows[split] -= between / 2
        rows[new] += between / 2
    if router == "preserve":
        state[copies][split + new] *= 2
    state[weight] = rows.to(state[weight])


def grow_optimizer_state(
    optimizer: dict[str, Any], shapes: dict[str, torch.Size], parents: dict[str, list[int]]
) -> dict[str, Any]:
    """The optimizer's state dict, one state per parameter; new experts get the states of their parents.

    `shapes` are the parameters' before growth, in the model's order. fp32 weights are dropped: the grown
    model's own state dict has them.
    """
    optimizer = by_parameter(optimizer, list(shapes.values()))
    rows = {f"{prefix}.{name}": split for prefix, split in parents.items() for name in _ROWS}
    grown = {}
    for index, (name, shape) in enumerate(shapes.items()):
        saved = optimizer["state"].get(index, {})  # none: SGD without momentum
        state = {key: value for key, value in saved.items() if key != FP32}
        for key, value in state.items():
            of_columns = key == "exp_avg_sq_col" and len(shape) == 2  # Adafactor's, without the experts
            if name in rows and torch.is_tensor(value) and value.shape[:1] == shape[:1] and not of_columns:
                state[key] = torch.cat([value, value[rows[name]]])
        if state:
            grown[index] = state
    return {**optimizer, "state": grown}


def _move_z(
    optimizer: dict[str, Any],
    shapes: dict[str, torch.Size],
    parents: dict[str, list[int]],
    before: dict[str, Tensor],
    after: dict[str, Tensor],
) -> None:
    """Change Schedule-Free's z of the grown routers as growth has changed their weights, in place.

    Else the weights, a mean of all z, would lose the noise again. `before`, `after`: the model's state dicts.
    """
    for prefix, split in parents.items():
        name = f"{prefix}.router.weight"
        state = optimizer["state"].get(list(shapes).index(name), {})
        if "z" in state:
            state["z"] += after[name] - torch.cat([before[name], before[name][split]])


def prepare(cfg, trainer) -> None:
    """Check --moe-expert-count against the checkpoint to load, and grow it for --grow-experts.

    `cfg` is a copy of fairseq's checkpoint config and changes to load the grown checkpoint; `trainer` has
    built the model and loaded nothing yet. UserError: no previous stage, or counts that do not match.
    """
    task, experts = trainer.task.args, getattr(trainer.cfg.model, "moe_expert_count", None)
    path = os.path.join(cfg.save_dir, cfg.restore_file)
    if cfg.restore_file != "checkpoint_last.pt":
        path = cfg.restore_file
    fresh = not os.path.exists(path)
    if fresh and cfg.finetune_from_model:
        path = cfg.finetune_from_model
        if not os.path.exists(path):
            raise UserError(
                f"--finetune-from-model {path}: no such checkpoint; train the previous stage first"
            )
    elif fresh:
        if task.grow_experts:
            raise UserError(
                f"--grow-experts {task.grow_experts} needs the previous stage: give its checkpoint as "
                "--finetune-from-model, or drop the flag in stage 0"
            )
        return
    if experts is None:
        if task.grow_experts:
            raise UserError("--grow-experts needs an arch with experts: --arch switch_gmoe")
        return
    weights = memory_map(path)["model"].items()
    before = next((len(value) for name, value in weights if name.endswith(".fc1.router.weight")), None)
    grow_by = task.grow_experts if fresh else 0
    if before is None or before + grow_by != experts:
        raise UserError(_count_mismatch(path, before, grow_by, experts))
    if grow_by:
        grown = os.path.join(cfg.save_dir, GROWN)
        _write_grown(path, grown, trainer)
        cfg.finetune_from_model = grown


def _count_mismatch(path: str, before: int | None, grow_by: int, experts: int) -> str:
    if before is None:
        return f"{path} has no Switch layers: --arch switch_gmoe cannot load it"
    if before > experts:
        return f"{path} has {before} experts, --moe-expert-count is {experts}: experts are never taken away"
    if grow_by:
        fit = f"with --grow-experts {grow_by} use --moe-expert-count {before + grow_by}"
        return f"{path} has {before} experts: {fit}"
    return (
        f"{path} has {before} experts: use --moe-expert-count {before}, or --grow-experts {experts - before} "
        "to split its losing experts"
    )


def _write_grown(path: str, grown: str, trainer) -> None:
    """Split the losing experts of the checkpoint at `path` and save it as `grown`. Collective.

    Each process evaluates a part of the validation set, so that none times out. Process 0 chooses the experts
    and saves; its UserError is raised on all.
    """
    (model,), _ = checkpoint_utils.load_model_ensemble([path], task=trainer.task)
    losses, means = _evaluate(model.to(trainer.device), trainer)
    refused: list[UserError | None] = [None]
    if distributed_utils.get_global_rank() == 0:
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        try:
            state = _grown_state(path, trainer, losses, means, shapes)
            with checkpoint_file(grown) as file:
                torch.save(state, file)
        except UserError as error:
            refused = [error]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(refused, src=0, device=trainer.device)
    if refused[0]:
        raise refused[0]


def _evaluate(model, trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By Switch layer, over the validation set: loss (E,) and sum of tokens (E, D) of each expert."""
    task, dataset = trainer.task, trainer.cfg.dataset
    if "valid" not in task.datasets:
        task.load_dataset("valid")
    with numpy_seed(trainer.cfg.common.seed):
        batches = task.eval_lm_dataloader(
            task.dataset("valid"),
            max_tokens=dataset.max_tokens_valid,
            batch_size=dataset.batch_size_valid,
            max_positions=model.max_positions(),
            num_shards=trainer.data_parallel_world_size,
            shard_id=trainer.data_parallel_rank,
            num_workers=0,
        )
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SwitchFFN)}
    token_sums = {name: _sum_tokens(layer.router) for name, layer in layers.items()}
    result = evaluate(model, batches, task.dictionary.pad())
    task.growth_tokens = int(_over_processes(torch.tensor(result.tokens), trainer))
    losses = {}
    for (name, layer), number in zip(layers.items(), switch_layers(model), strict=True):
        no_batch = torch.zeros(layer.experts, dtype=torch.float64)  # with more processes than batches
        losses[name] = _over_processes(result.expert_loss.get(number, no_batch), trainer)
    # Only the direction of the mean tokens matters, so sums suffice.
    return losses, {name: _over_processes(total, trainer) for name, total in token_sums.items()}


def _over_processes(value: Tensor, trainer) -> Tensor:
    """The sum of `value` over processes, on the CPU. Collective."""
    if trainer.data_parallel_world_size > 1:
        value = value.to(trainer.device)
        torch.distributed.all_reduce(value, group=trainer.data_parallel_process_group)
    return value.cpu()


def _grown_state(
    path: str,
    trainer,
    losses: dict[str, Tensor],
    means: dict[str, Tensor],
    shapes: dict[str, torch.Size],
) -> dict[str, Any]:
    """The grown checkpoint. UserError: too few experts, another router after a tree, no optimizer state."""
    args = trainer.task.args
    parents = {prefix: losing_experts(sums, args.grow_experts) for prefix, sums in losses.items()}
    for prefix, split in parents.items():
        logger.info(f"growing {prefix}: splitting experts {split}, which have the largest validation loss")
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    seed = trainer.cfg.common.seed + args.stage
    before = dict(state["model"])
    grow_model_state(state["model"], parents, args.grow_router, args.grow_noise, means, seed)
    if schedule.keeps_optimizer(args):
        schedule.check_optimizer(path, state)
        state["last_optimizer_state"] = grow_optimizer_state(state["last_optimizer_state"], shapes, parents)
        _move_z(state["last_optimizer_state"], shapes, parents, before, state["model"])
    else:
        state.pop("last_optimizer_state", None)
    if args.schedule == "stage":
        state["optimizer_history"][-1]["num_updates"] = 0
    elif average := (state.get("extra_state") or {}).get("ema"):
        grow_model_state(average, parents, args.grow_router, args.grow_noise, means, seed)
    state["cfg"] = None  # the training that loads grown.pt has its own
    state["growth"] = parents
    return state


def _sum_tokens(router: Router) -> Tensor:
    """A tensor (E, D) to which every forward pass of the router adds the tokens of each expert."""
    experts, dim = router.weight.shape
    sums = torch.zeros(experts, dim, device=router.weight.device)

    def add(module: Router, inputs: tuple[Tensor, ...], routing: Routing) -> None:
        real_S = routing.expert_S < experts
        sums.index_add_(0, routing.expert_S[real_S], inputs[0][real_S].float())

    router.register_forward_hook(add)
    return sums
