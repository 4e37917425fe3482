"""The gating tree of a mixture over a t-SNE of test images, which `python -m vision.tsne` draws.

Shapes: n examples, E experts.
"""

import re
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
from alma.schema import require, whole
from alma.stages import stages
from vision import data
from vision.checkpoints import read_checkpoint, reading
from vision.examples import AnyExamples
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

    radius, found = 0.08 * float(np.ptp(points, axis=0).max()), {}
    for leaf in np.unique(assigned).tolist():
        mine = points[assigned == leaf]  # the one with the most others within the radius
        found[leaf] = mine[cKDTree(mine).query_ball_point(mine, radius, return_length=True).argmax()]
    for node, leaves in tree.leaves.items():
        placed = [found[leaf] for leaf in leaves if leaf in found]
        if placed and node not in found:
            found[node] = np.mean(placed, axis=0)
    return found


def apart(places: Mapping[int, np.ndarray], distance: float) -> dict[int, np.ndarray]:
    """The places (2,) of nodes, moved until no two are closer than `distance` (at most 500 small steps)."""
    points, angle = np.stack(list(places.values())), np.arange(len(places))
    points = points + 1e-6 * distance * np.stack([np.cos(angle), np.sin(angle)], axis=1)  # none at one place
    for _ in range(500):
        between = points[:, None] - points[None]  # (nodes, nodes, 2)
        length = np.linalg.norm(between, axis=2) + np.eye(len(points))
        push = np.clip(distance - length, 0, None) * (1 - np.eye(len(points)))
        if push.max() < 1e-3 * distance:
            break
        points = points + (between * (push / length / 2)[..., None]).sum(1)
    return dict(zip(places, points, strict=True))


def assignment(model: Mixture, examples: AnyExamples, layer: int) -> np.ndarray:
    """The expert (n,) of each image in mixture layer 1, 2, ...: the largest gate value."""
    return evaluate(model, examples, lambda images: model.routed(images)[1][layer - 1].argmax(0)).numpy()


def embed(images: Tensor) -> np.ndarray:
    """Deterministic t-SNE (n, 2) of raw pixels."""
    from sklearn.manifold import TSNE

    pixels = images.flatten(1).float().numpy() / 255
    perplexity = min(30.0, (len(pixels) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(pixels)


def experts_of(path: Path) -> int:
    """Experts of the model of a stage. UserError: its file is damaged."""
    state = read_checkpoint(path)
    with reading(path):
        require(state["structure"], {"experts": whole(1)}, ["experts"])
    return state["structure"]["experts"]


def choose(experts: Mapping[int, int]) -> list[int]:
    """Up to three stages to draw, given the number of experts after each: the last with 2, 3 and 4 experts
    (Figure 8), or else the first, middle and last stage."""
    known = sorted(experts)
    last = {experts[stage]: stage for stage in known}
    growth = [last[number] for number in (2, 3, 4) if number in last]
    ends = [known[0], known[len(known) // 2], known[-1]]
    return growth if len(growth) > 1 else list(dict.fromkeys(ends))


def load_run(directory: Path) -> tuple[dict[str, Any], dict[int, Path]]:
    """Config of a run and the file of each stage. UserError if it is not of a mixture or lacks stages."""
    config = Run.read(directory).config
    learner = config["learner"]
    if not issubclass(LEARNERS.get(learner, object), MoE):
        raise UserError(f"{directory} is a run of {learner}, which has no gates: give a run of gmoe or moe")
    if config.get("scenario") in ("rotated", "permuted"):
        raise UserError(
            f"{directory}: --scenario {config['scenario']} changed the images, which are not kept"
        )
    names = {path: re.fullmatch(r"stage_(\d+)", path.stem) for path in directory.glob("stage_*.pt")}
    found = {int(match[1]): path for path, match in names.items() if match}
    if not found:
        raise UserError(f"{directory} has no stage_000.pt ...: run it with --save-stages into a new folder")
    return config, dict(sorted(found.items()))


def load_data(config: Mapping[str, Any], root: str, image_size: int | None = None) -> data.Dataset:
    """The data set of a run. UserError if `root` has other data."""
    dataset = data.load(config["dataset"], root, image_size=image_size)
    if dataset.fingerprint != config["data"]:
        raise UserError(
            f"{config['dataset']} in {root} is not the run's data (fingerprint {dataset.fingerprint}, not "
            f"{config['data']}): give the run's data with --data-root"
        )
    return dataset


def load_model(config: Mapping[str, Any], dataset: data.Dataset, path: Path) -> Mixture:
    """The mixture of a stage, from the config of its run and its file. UserError: they do not fit."""
    kind = LEARNERS[config["learner"]]
    chosen = {name: value for name, value in config.items() if name in kind.settings_class.names()}
    settings = kind.settings_class(**chosen)
    learner = kind(dataset.shape, dataset.classes, settings, config["seed"], torch.device("cpu"))
    state = read_checkpoint(path)
    with reading(path):
        try:
            learner.load(state)
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:80]
            raise UserError(
                f"stages written by another version of this code ({reason}): rerun the run"
            ) from None
    return learner.model


def draw(
    config: Mapping[str, Any],
    models: Mapping[int, Mixture],
    dataset: data.Dataset,
    out: Path,
    layer: int,
    examples: int,
) -> None:
    """Write a figure with one panel per stage: marker = class, colour = expert, gating tree in red."""
    depth = len(next(iter(models.values())).layers)
    if not 1 <= layer <= depth:
        raise UserError(f"--layer {layer}: the run's mixture has layers 1 to {depth}")
    total = len(dataset.test.labels)
    picked = torch.from_numpy(np.random.RandomState(0).permutation(total)[:examples])
    labels = dataset.test.labels[picked].numpy()
    images, points = dataset.select(dataset.test, picked), embed(dataset.test.images[picked])
    schedule = stages(config["megabatches"], config["waiting_time"], config["replay"])
    make_directory(out.parent)
    with style.drawing():
        figure, panels = style.subplots(1, len(models), (3.6 * len(models), 3.9), sharex=True, sharey=True)
        for (stage, model), axes in zip(models.items(), panels[0], strict=True):
            assigned = assignment(model, images, layer)
            _draw_points(axes, points, labels, assigned)
            tree = tree_of(model.layers[layer - 1].router.paths, model.experts)
            places = positions(tree, points, assigned)
            _draw_tree(axes, tree, apart(places, 0.11 * float(np.ptp(points, axis=0).max())))
            unused = model.experts - len(np.unique(assigned))
            title = f"{model.experts} expert{'s' if model.experts > 1 else ''}"
            title += f", {unused} of them unused" if unused else ""
            axes.set_title(f"stage {stage} (t = {schedule[stage].last}): {title}", fontsize=9.5)
        key = f"number: class; colour: expert of layer {layer}; red: gates, with a star at the root"
        figure.supxlabel(textwrap.fill(key, 50 * len(models)), fontsize=9)
        style.save(figure, out)


def _draw_points(axes: Any, points: np.ndarray, labels: np.ndarray, assigned: np.ndarray) -> None:
    """Draw each example as the number of its class, in the colour of its expert."""
    look = {"linewidths": 0, "alpha": 0.75, "rasterized": True}  # thousands of shapes in a vector format
    for label in np.unique(labels):
        mine = labels == label
        colours = [EXPERTS[expert % len(EXPERTS)] for expert in assigned[mine]]
        size = (14 if len(points) > 1000 else 22) * len(str(label)) ** 2
        axes.scatter(*points[mine].T, c=colours, marker=f"${label}$", s=size, **look)
    axes.axis("off")


def _draw_tree(axes: Any, tree: Tree, places: Mapping[int, np.ndarray]) -> None:
    """Draw edges and gates in red, leaves as circles in the colour of their expert, with its number."""
    for parent, child in tree.edges:
        if child in places:
            line = np.stack([places[parent], places[child]])
            axes.plot(*line.T, color="white", linewidth=4, zorder=3)
            axes.plot(*line.T, color=TREE, linewidth=2, zorder=4)
    experts = len(tree.leaves[tree.root])
    for node, (x, y) in places.items():
        if node >= experts:
            root = node == tree.root
            look = {"marker": "*" if root else "s", "markersize": 14 if root else 7, "zorder": 5 + root / 2}
            axes.plot(x, y, color=TREE, markeredgecolor="white", **look)
        else:
            ring = {"markersize": 12, "markeredgecolor": TREE, "markeredgewidth": 2, "zorder": 6}
            axes.plot(x, y, "o", color=EXPERTS[node % len(EXPERTS)], **ring)
            look = {"color": "white", "fontsize": 8, "fontweight": "bold", "zorder": 7}
            axes.text(x, y, str(node), ha="center", va="center_baseline", **look)
