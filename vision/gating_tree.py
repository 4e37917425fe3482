"""The gating tree of a mixture over a t-SNE of test images, which `python -m vision.tsne` draws.

Shapes: n examples, E experts.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from alma.files import make_directory
from alma.records import Run
from alma.report import style
from alma.stages import stages
from vision import data
from vision.checkpoints import read_checkpoint, reading
from vision.learners import LEARNERS
from vision.learners.gmoe import MoE
from vision.mixture import Mixture
from vision.train import evaluate

EXPERTS = (
    *("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),  # Okabe and Ito, without their red
    *("#88CCEE", "#999933", "#44AA99", "#332288", "#AA4499"),  # Tol, muted
)
"""Colour of each expert; experts are no learners, so these are not the colours of learners."""
TREE = "#E00000"


class Tree(NamedTuple):
    """A gating tree: nodes 0..E-1 are leaves (experts), higher numbers inner nodes (gates)."""

    root: int
    edges: list[tuple[int, int]]  # (parent, child)
    leaves: dict[int, list[int]]  # leaves below each node; of a leaf, itself


def tree_of(paths: Tensor, experts: int) -> Tree:
    """The tree of `Gating.paths` (E, 2 (E - 1)): columns 2k and 2k + 1 are the branches of inner node E + k.
    Flat gating, without paths, is a star of its experts."""
    below = {leaf: [leaf] for leaf in range(experts)}
    if paths.shape[1]:
        through = paths.view(experts, -1, 2).sum(2) > 0  # (E, E - 1): node is on the path to the leaf
        below |= {experts + k: column.nonzero().flatten().tolist() for k, column in enumerate(through.T)}
    elif experts > 1:
        below[experts] = list(range(experts))
    parents = {}
    for node, leaves in below.items():
        if around := [other for other, more in below.items() if set(leaves) < set(more)]:
            parents[node] = min(around, key=lambda other: len(below[other]))
    (root,) = below.keys() - parents.keys()
    return Tree(root, sorted((parent, child) for child, parent in parents.items()), below)


def positions(tree: Tree, points: np.ndarray, assigned: np.ndarray) -> dict[int, np.ndarray]:
    """Positions of the nodes among points (n, 2) of experts `assigned` (n,).

    A leaf is where its examples are densest, an inner node at the mean of its leaves. Experts without
    examples have no position.
    """
    from scipy.spatial import cKDTree

    places, radius = {}, 0.08 * float(np.ptp(points, axis=0).max())
    for leaf in np.unique(assigned).tolist():
        own = points[assigned == leaf]  # the one with the most others within the radius
        places[leaf] = own[cKDTree(own).query_ball_point(own, radius, return_length=True).argmax()]
    inner = [node for node in tree.leaves if node not in places and len(tree.leaves[node]) > 1]
    for node in inner:
        if used := [places[leaf] for leaf in tree.leaves[node] if leaf in places]:
            places[node] = np.mean(used, axis=0)
    return places


def choose(experts: Mapping[int, int]) -> list[int]:
    """Up to three stages to draw, given the number of experts after each: the last with 2, 3 and 4 experts
    (Figure 8), or else the first, middle and last stage."""
    known = sorted(experts)
    last = {experts[stage]: stage for stage in known}
    growth = [last[number] for number in (2, 3, 4) if number in last]
    return growth if len(growth) > 1 else sorted({known[0], known[len(known) // 2], known[-1]})


def load_run(directory: Path, root: str, image_size: int | None) -> tuple[dict[str, Any], data.Dataset]:
    """Config and data set of a run. UserError: it is not of a mixture, or `root` has other data."""
    config = Run.read(directory).config
    learner = config["learner"]
    if not issubclass(LEARNERS.get(learner, object), MoE):
        raise UserError(f"{directory} is a run of {learner}, which has no gates: give a run of gmoe or moe")
    if config.get("scenario") in ("rotated", "permuted"):
        raise UserError(
            f"{directory}: --scenario {config['scenario']} changed the images, which are not kept"
        )
    dataset = data.load(config["dataset"], root, image_size=image_size)
    if dataset.fingerprint != config["data"]:
        raise UserError(f"{config['dataset']} in {root} is not the run's data: give that with --data-root")
    return config, dataset


def load_models(
    directory: Path, config: Mapping[str, Any], dataset: data.Dataset, wanted: list[int] | None
) -> dict[int, Mixture]:
    """The mixtures of the `wanted` stages, or of those that `choose` picks. UserError: a stage is missing or
    damaged."""
    known = {int(path.stem[6:]): path for path in directory.glob("stage_*.pt") if path.stem[6:].isdigit()}
    if not known:
        raise UserError(f"{directory} has no stage_000.pt ...: run it with --save-stages into a new folder")
    if missing := sorted(set(wanted or []) - known.keys()):
        raise UserError(f"--stages {missing[0]}: {directory} has stages {min(known)} to {max(known)}")
    kind = LEARNERS[config["learner"]]
    names = config.keys() & set(kind.settings_class.names())
    settings, models = kind.settings_class(**{name: config[name] for name in names}), {}
    with reading(directory):
        experts = {stage: read_checkpoint(path)["structure"]["experts"] for stage, path in known.items()}
        for stage in wanted or choose(experts):
            learner = kind(dataset.shape, dataset.classes, settings, config["seed"], torch.device("cpu"))
            learner.load(read_checkpoint(known[stage]))
            models[stage] = learner.model
    return models


def draw(
    config: Mapping[str, Any],
    models: Mapping[int, Mixture],
    dataset: data.Dataset,
    out: Path,
    layer: int,
    examples: int,
) -> None:
    """Write a figure with one panel per stage: number = class, colour = expert, gating tree in red. The
    images lie as in a deterministic t-SNE of their raw pixels."""
    from sklearn.manifold import TSNE

    depth = len(next(iter(models.values())).layers)
    if not 1 <= layer <= depth:
        raise UserError(f"--layer {layer}: the run's mixture has layers 1 to {depth}")
    picked = torch.from_numpy(np.random.RandomState(0).permutation(len(dataset.test.labels))[:examples])
    labels, images = dataset.test.labels[picked].numpy(), dataset.select(dataset.test, picked)
    pixels = dataset.test.images[picked].flatten(1).float().numpy() / 255
    perplexity = min(30.0, (len(pixels) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(pixels)
    schedule = stages(config["megabatches"], config["waiting_time"], config["replay"])
    make_directory(out.parent)
    with style.drawing():
        figure, panels = style.subplots(1, len(models), (3.6 * len(models), 3.9), sharex=True, sharey=True)
        for (stage, model), axes in zip(models.items(), panels[0], strict=True):
            gates = evaluate(model, images, lambda x, model=model: model.routed(x)[1][layer - 1])
            assigned = gates.argmax(0).numpy()
            tree = tree_of(model.layers[layer - 1].router.paths, model.experts)
            _draw_panel(axes, points, labels, assigned, tree)
            unused = model.experts - len(np.unique(assigned))
            title = f"{model.experts} expert{'s' if model.experts > 1 else ''}"
            title += f", {unused} of them unused" if unused else ""
            axes.set_title(f"stage {stage} (t = {schedule[stage].last}): {title}", fontsize=9.5)
        key = f"number: class; colour: expert of layer {layer}; red: gates, with a star at the root"
        figure.supxlabel(textwrap.fill(key, 50 * len(models)), fontsize=9)
        style.save(figure, out)


def _draw_panel(axes: Any, points: np.ndarray, labels: np.ndarray, assigned: np.ndarray, tree: Tree) -> None:
    """Draw each example as the number of its class, in the colour of its expert, edges and gates in red, and
    leaves as circles with the number of their expert."""
    look: dict[str, Any] = {"linewidths": 0, "alpha": 0.75, "rasterized": True}  # thousands of shapes
    colours = np.array([EXPERTS[expert % len(EXPERTS)] for expert in assigned])
    for label in np.unique(labels):
        own = labels == label
        size = (14 if len(points) > 1000 else 22) * len(str(label)) ** 2
        axes.scatter(*points[own].T, c=colours[own], marker=f"${label}$", s=size, **look)
    axes.axis("off")
    places = positions(tree, points, assigned)
    for parent, child in tree.edges:
        if child in places:
            line = np.stack([places[parent], places[child]])
            axes.plot(*line.T, color="white", linewidth=4, zorder=3)
            axes.plot(*line.T, color=TREE, linewidth=2, zorder=4)
    experts = len(tree.leaves[tree.root])
    for node, (x, y) in places.items():
        if node < experts:
            ring = {"markersize": 12, "markeredgecolor": TREE, "markeredgewidth": 2, "zorder": 6}
            axes.plot(x, y, "o", color=EXPERTS[node % len(EXPERTS)], **ring)
            look = {"color": "white", "fontsize": 8, "fontweight": "bold", "zorder": 7}
            axes.text(x, y, str(node), ha="center", va="center_baseline", **look)
        else:
            look = (
                {"marker": "*", "markersize": 14} if node == tree.root else {"marker": "s", "markersize": 7}
            )
            axes.plot(x, y, color=TREE, markeredgecolor="white", zorder=5, **look)
