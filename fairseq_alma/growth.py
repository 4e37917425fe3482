"""Grow a Switch Transformer between stages by splitting its losing experts (paper, section 5 and
App. A).

The losing experts of a layer have the largest summed validation loss, without dropped tokens. A
split copies an expert; `--grow-router` says how the router changes (docs/design.md, Growth):

* copy: copies the router row, as the paper's language models do (section 5).
* preserve: copies the router row and keeps the model's function (see `Router`, `copies`).
* tree: adds a gate for the split and keeps the model's function (section 4.2; see `Router`,
  `parent`).

Noise, which the paper does not mention, breaks the tie of two equal rows; `--grow-router copy
--grow-noise 0` is a plain copy. The result is SAVE_DIR/grown.pt, a checkpoint for fairseq.

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
from fairseq_alma.moe.router import Router, Routing
from fairseq_alma.training import schedule
from fairseq_alma.training.precision import FP32

logger = logging.getLogger(__name__)

GROWN = "grown.pt"
_ROWS = (*STACKED, "router.weight")  # parameters of a Switch layer; dimension 0 is the expert


def losing_experts(losses: Tensor, count: int) -> list[int]:
    """The `count` experts with the largest summed `losses` (E,), largest first.

    UserError: `count` > E.
    """
    experts = losses.numel()
    if count > experts:
        problem = f"a growth splits each of the {experts} experts at most once"
        raise UserError(f"--grow-experts {count}: {problem}")
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

    `parents[prefix]` lists the experts to split in the layer `prefix`, such as
    `decoder.layers.1.fc1`; `router` is a value of --grow-router. Gaussian noise of standard
    deviation `noise` separates the router rows of parent and copy: half is added to one and half
    subtracted from the other, which changes the gates least. With "tree", the noise itself is the
    gate of the split. The noise is orthogonal to the parent's mean token, `mean_tokens[prefix]` (E,
    D); otherwise most or all tokens would go to one of the two. `seed` seeds the noise. Raises
    UserError if the layer has a tree and `router` is another.
    """
    generator = torch.Generator().manual_seed(seed)
    for prefix, split in parents.items():
        weight = f"{prefix}.router.weight"
        copies = f"{prefix}.router.copies"
        parent = f"{prefix}.router.parent"
        if router != "tree" and (state[parent] >= 0).any():
            raise UserError(f"{prefix} was grown as a tree: use --grow-router tree again")
        for key in (*(f"{prefix}.{name}" for name in STACKED), weight, copies, parent):
            state[key] = torch.cat([state[key], state[key][split]])
        difference = torch.zeros(len(split), state[weight].size(1))  # (K, D)
        if noise and mean_tokens:
            mean = torch.nn.functional.normalize(mean_tokens[prefix][split].float(), dim=-1)
            difference = noise * torch.randn(mean.shape, generator=generator)
            difference -= (difference * mean).sum(-1, keepdim=True) * mean
        rows = state[weight].float()
        new = list(range(len(rows) - len(split), len(rows)))
        if router == "tree":
            rows[new] = difference
            state[copies][new] = 1
            state[parent][new] = torch.tensor(split)
        else:
            rows[split] -= difference / 2
            rows[new] += difference / 2
        if router == "preserve":
            state[copies][split + new] *= 2
        state[weight] = rows.to(state[weight])


def grow_optimizer_state(
    optimizer: dict[str, Any], shapes: dict[str, torch.Size], parents: dict[str, list[int]]
) -> dict[str, Any]:
    """Return the optimizer's state dict after growth: new experts copy their parents' states.

    `shapes` are those of the parameters before growth, in the model's order; `parents` as in
    `grow_model_state`. The saved fp32 weights are dropped: the grown model's state dict has them.
    """
    split_of = {f"{prefix}.{name}": split for prefix, split in parents.items() for name in _ROWS}
    grown = {}
    for index, (name, shape) in enumerate(shapes.items()):
        saved = optimizer["state"].get(index, {})  # none: SGD without momentum
        state = {key: value for key, value in saved.items() if key != FP32}
        for key, value in state.items():
            # For a matrix (E, D), Adafactor's column statistics are (D,): nothing to copy.
            of_columns = key == "exp_avg_sq_col" and len(shape) == 2
            by_expert = torch.is_tensor(value) and value.shape[:1] == shape[:1] and not of_columns
            if name in split_of and by_expert:
                state[key] = torch.cat([value, value[split_of[name]]])
        if state:
            grown[index] = state
    return {**optimizer, "state": grown}


def prepare(cfg, trainer) -> None:
    """Check --moe-expert-count against the checkpoint to load, and grow it for --grow-experts.

    `cfg` is a copy of fairseq's checkpoint config and changes to load the grown checkpoint;
    `trainer` has built the model and loaded nothing yet. UserError: no previous stage, or counts
    that do not match.
    """
    task = trainer.task.args
    experts = getattr(trainer.cfg.model, "moe_expert_count", None)
    path = cfg.restore_file
    if path == "checkpoint_last.pt":
        path = os.path.join(cfg.save_dir, path)
    fresh = not os.path.exists(path)
    if fresh:
        path = cfg.finetune_from_model
    # Read the weights of dense models too: a damaged checkpoint is reported here.
    weights = memory_map(path)["model"] if path else {}
    if not path or experts is None:
        if task.grow_experts:
            needs = "--arch switch_gmoe*, and the previous stage's checkpoint"
            raise UserError(
                f"--grow-experts {task.grow_experts} needs {needs} as --finetune-from-model; "
                "drop the flag in stage 0"
            )
        return
    routers = [value for name, value in weights.items() if name.endswith(".fc1.router.weight")]
    if not routers:
        raise UserError(f"{path} has no Switch layers: --arch switch_gmoe cannot load it")
    before = len(routers[0])
    grow_by = task.grow_experts if fresh else 0
    if before + grow_by != experts:
        remedy = f"use --moe-expert-count {before + grow_by}"
        if before < experts:
            remedy += f", or --grow-experts {experts - before} to split its losing experts"
        problem = f"{path} has {before} experts, --moe-expert-count is {experts}"
        raise UserError(f"{problem}: {remedy}")
    if grow_by:
        grown = os.path.join(cfg.save_dir, GROWN)
        _write_grown(path, grown, trainer)
        cfg.finetune_from_model = grown


def _write_grown(path: str, grown: str, trainer) -> None:
    """Split the losing experts of the checkpoint at `path` and save it as `grown`. Collective.

    Every process evaluates a part of the validation set: if one evaluated it all, the others would
    time out. Process 0 chooses the experts and saves. Its UserError is raised on all processes: too
    few experts, no optimizer state, or another --grow-router after a tree.
    """
    (model,), _ = checkpoint_utils.load_model_ensemble([path], task=trainer.task)
    model.to(trainer.device)
    losses, mean_tokens = _evaluate(model, trainer)
    errors: list[UserError | None] = [None]
    if distributed_utils.get_global_rank() == 0:
        try:
            state = _grown_state(path, model, losses, mean_tokens, trainer)
            with checkpoint_file(grown) as file:
                torch.save(state, file)
        except UserError as error:
            errors = [error]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(errors, src=0, device=trainer.device)
    if errors[0]:
        raise errors[0]


def _evaluate(model, trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two dicts by layer: the validation loss (E,) and the mean token (E, D) of each expert.

    Mean tokens are not divided by the counts: only their direction matters. Collective.
    """
    task = trainer.task
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, SwitchFFN)
    }
    sums = {
        layer.router: torch.zeros_like(layer.router.weight).float() for layer in layers.values()
    }

    def add_tokens(router: Router, inputs: tuple[Tensor, ...], routing: Routing) -> None:
        real_S = routing.expert_S < len(sums[router])
        sums[router].index_add_(0, routing.expert_S[real_S], inputs[0][real_S].float())

    for router in sums:
        router.register_forward_hook(add_tokens)
    result = evaluate(model, _validation_batches(model, trainer), task.dictionary.pad())
    task.growth_tokens = int(_over_processes(torch.tensor(result.tokens), trainer))
    losses = {}
    for (name, layer), number in zip(layers.items(), switch_layers(model), strict=True):
        no_batch = torch.zeros(layer.experts, dtype=torch.float64)  # more processes than batches
        losses[name] = _over_processes(result.expert_loss.get(number, no_batch), trainer)
    means = {name: _over_processes(sums[layer.router], trainer) for name, layer in layers.items()}
    return losses, means


def _validation_batches(model, trainer):
    """The validation batches of this process."""
    task = trainer.task
    dataset = trainer.cfg.dataset
    if "valid" not in task.datasets:
        task.load_dataset("valid")
    with numpy_seed(trainer.cfg.common.seed):
        return task.eval_lm_dataloader(
            task.dataset("valid"),
            max_tokens=dataset.max_tokens_valid,
            batch_size=dataset.batch_size_valid,
            max_positions=model.max_positions(),
            num_shards=trainer.data_parallel_world_size,
            shard_id=trainer.data_parallel_rank,
            num_workers=0,
        )


def _grown_state(
    path: str, model, losses: dict[str, Tensor], mean_tokens: dict[str, Tensor], trainer
) -> dict[str, Any]:
    """Read the checkpoint `path` of `model` and split its losing experts.

    `losses` and `mean_tokens` are the results of `_evaluate`. Raises UserError as `_write_grown`.
    """
    args = trainer.task.args
    parents = {prefix: losing_experts(loss, args.grow_experts) for prefix, loss in losses.items()}
    for prefix, split in parents.items():
        logger.info(f"growing {prefix}: splitting experts {split}, of the largest validation loss")
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    seed = trainer.cfg.common.seed + args.stage
    growth = (parents, args.grow_router, args.grow_noise, mean_tokens, seed)
    grow_model_state(state["model"], *growth)
    optimizer = state.pop("last_optimizer_state", None)
    if schedule.keeps_optimizer(args):
        schedule.check_optimizer(path, optimizer)
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        state["last_optimizer_state"] = grow_optimizer_state(optimizer, shapes, parents)
    average = (state.get("extra_state") or {}).get("ema")
    if args.schedule == "stage":
        state["optimizer_history"][-1]["num_updates"] = 0
    elif average:
        grow_model_state(average, *growth)
    # Saved without settings: the training that loads this checkpoint has its own.
    return state | {"cfg": None, "growth": parents}


def _over_processes(value: Tensor, trainer) -> Tensor:
    """The sum of `value` over processes, on the CPU. Collective."""
    if trainer.data_parallel_world_size > 1:
        value = value.to(trainer.device)
        torch.distributed.all_reduce(value, group=trainer.data_parallel_process_group)
    return value.cpu()
