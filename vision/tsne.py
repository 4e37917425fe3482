"""The gating tree of a mixture over a t-SNE of test images (first draft, Figures 5 right and 8, App. E).

python -m vision.tsne RUN [--data-root DIR] [--out FILE.png] [--layer 1] [--examples 5000] [--stages 1,2,3]

Shapes: n examples, E experts.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from alma.records import Run
from alma.report.style import COLOURS, subplots
from alma.stages import stages
from vision import data, presets
from vision.experiment import read_checkpoint
from vision.learners import LEARNERS
from vision.learners.gmoe import MoE
from vision.mixture import Mixture, Router
from vision.train import EVALUATION_BATCH

# Okabe and Ito without the vermillion that a red tree would hide; then Tol's muted ones.
_OTHERS = ("#88CCEE", "#999933", "#44AA99", "#332288", "#AA4499")
EXPERTS = [*(colour for colour in COLOURS if colour != "#D55E00"), *_OTHERS]
TREE = "#E00000"


class Tree(NamedTuple):
    """Gates as a tree: nodes 0..E-1 are the leaves (experts), those above are inner nodes (gates)."""

    root: int
    edges: list[tuple[int, int]]  # parent, child
    leaves: dict[int, list[int]]  # below each node, itself included


def tree_of(paths: Tensor, experts: int) -> Tree:
    """The tree that `Router.paths` (E, 2 (E - 1)) describes: columns 2k and 2k + 1 are the branches of inner
    node E + k. Empty paths are a flat router's: a star of its experts."""
    below = {leaf: [leaf] for leaf in range(experts)}
    if paths.shape[1]:
        through = paths.view(experts, -1, 2).sum(2) > 0  # (E, E - 1): whether a node is on the way to a leaf
        below |= {experts + k: column.nonzero().flatten().tolist() for k, column in enumerate(through.T)}
    elif experts > 1:
        below[experts] = list(range(experts))
    parents = {}
    for node, leaves in below.items():
        around = [
            other for other, more in below.items() if len(more) > len(leaves) and set(leaves) <= set(more)
        ]
        if around:
            parents[node] = min(around, key=lambda other: len(below[other]))
    (root,) = below.keys() - parents.keys()
    return Tree(root, sorted((parent, child) for child, parent in parents.items()), below)


def positions(tree: Tree, points: np.ndarray, assigned: np.ndarray) -> dict[int, np.ndarray]:
    """Where to draw the nodes, over points (n, 2) of experts `assigned` (n,): a leaf at the mean of its
    examples, an inner node at the mean of the leaves below it. Experts without examples have no place."""
    found = {leaf: points[assigned == leaf].mean(0) for leaf in np.unique(assigned).tolist()}
    for node, leaves in tree.leaves.items():
        placed = [found[leaf] for leaf in leaves if leaf in found]
        if placed and node not in found:
            found[node] = np.mean(placed, axis=0)
    return found


@torch.no_grad()
def assignment(model: Mixture, images: Tensor, layer: int) -> np.ndarray:
    """The expert (n,) of each image in mixture layer 1, 2, ...: the most probable one of soft gates, the
    chosen leaf of hard ones."""
    model.eval()
    parts = [model.routed(part)[1][layer - 1].argmax(0) for part in images.split(EVALUATION_BATCH)]
    return torch.cat(parts).numpy()


def embed(images: Tensor) -> np.ndarray:
    """t-SNE (n, 2) of raw pixels; the same at every call."""
    from sklearn.manifold import TSNE

    pixels = images.flatten(1).float().numpy() / 255
    perplexity = min(30.0, (len(pixels) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(pixels)


def choose(experts: Mapping[int, int]) -> list[int]:
    """Up to three stages, from the experts after each: the last ones with 2, 3 and 4 experts (Figure 8), or
    else the first, middle and last."""
    last = {number: stage for stage, number in sorted(experts.items())}
    growth = [last[number] for number in (2, 3, 4) if number in last]
    known = sorted(experts)
    ends = [known[0], known[len(known) // 2], known[-1]]
    return growth if len(growth) > 1 else list(dict.fromkeys(ends))


def load_run(directory: Path) -> tuple[dict[str, Any], dict[int, Path]]:
    """Config of a mixture's run, and the file of each stage; UserError where it is another or has none."""
    config = Run.read(directory).config
    learner = config["learner"]
    if not issubclass(LEARNERS.get(learner, object), MoE):
        raise UserError(f"{directory} is a run of {learner}, which has no gates: give a run of gmoe or moe")
    found = {
        int(path.stem[6:]): path
        for path in directory.glob("stage_*.pt")
        if re.fullmatch(r"stage_\d+", path.stem)
    }
    if not found:
        raise UserError(f"{directory} has no stage_000.pt ...: run it with --save-stages into a new folder")
    return config, dict(sorted(found.items()))


def load_data(config: Mapping[str, Any], root: str, image_size: int | None = None) -> data.Dataset:
    """The data set of a run; UserError when what is in `root` is another one."""
    dataset = data.load(config["dataset"], root, image_size=image_size)
    if dataset.fingerprint != config["data"]:
        raise UserError(
            f"{config['dataset']} in {root} is not what the run saw (fingerprint {dataset.fingerprint}, "
            f"the run's is {config['data']}): give the run's data with --data-root"
        )
    return dataset


def load_model(config: Mapping[str, Any], dataset: data.Dataset, state: dict[str, Any]) -> Mixture:
    """The mixture of a stage, rebuilt from the run's settings and the state that the stage left."""
    learner = config["learner"]
    names = {setting.name for setting in fields(presets.Settings)}
    chosen = {name: value for name, value in config.items() if name in names}
    settings = presets.resolve(config["dataset"], learner, chosen=chosen)
    subject = LEARNERS[learner](dataset.shape, dataset.classes, settings, config["seed"], torch.device("cpu"))
    try:
        subject.load(state)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:80]
        raise UserError(
            f"the run's stages are of another version of this code ({reason}): run it again"
        ) from None
    return subject.model


def draw(
    run: Path, dataset: data.Dataset, chosen: Sequence[int], out: Path, layer: int = 1, examples: int = 5000
) -> None:
    """Write a PNG with a panel per stage: marker = class, colour = expert, the gating tree in red."""
    config, files = load_run(run)
    models = [load_model(config, dataset, read_checkpoint(files[stage])) for stage in chosen]
    depth = len(models[0].layers)
    if not 1 <= layer <= depth:
        raise UserError(f"--layer {layer}: the run's mixture has layers 1 to {depth}")
    total = len(dataset.test.labels)
    picked = torch.from_numpy(np.random.RandomState(0).permutation(total)[:examples])
    part = data.Images(dataset.test.images[picked], dataset.test.labels[picked])
    images, points = dataset.examples(part).images, embed(part.images)
    plan = stages(config["megabatches"], config["waiting_time"], config["replay"])
    figure, panels = subplots(1, len(chosen), (3.4 * len(chosen), 3.7), sharex=True, sharey=True)
    for stage, model, axes in zip(chosen, models, panels[0], strict=True):
        assigned = assignment(model, images, layer)
        _draw_points(axes, points, part.labels.numpy(), assigned)
        router: Router = model.layers[layer - 1].router
        tree = tree_of(router.paths, model.experts)
        _draw_tree(axes, tree, positions(tree, points, assigned))
        unused = model.experts - len(np.unique(assigned))
        number = f"{model.experts} expert{'s' if model.experts > 1 else ''}"
        number += f", {unused} of them unused" if unused else ""
        axes.set_title(f"stage {stage} (t = {plan[stage].last}): {number}", fontsize=9.5)
    key = f"numbers: class; colour: expert of layer {layer}; red: its gates, with a star at the root"
    figure.supxlabel(key, fontsize=9)
    make_directory(out.parent)
    figure.savefig(out, dpi=200, format="png")


def _draw_points(axes: Any, points: np.ndarray, labels: np.ndarray, assigned: np.ndarray) -> None:
    """Each example as the number of its class, in the colour of its expert."""
    for label in np.unique(labels):
        mine = labels == label
        colours = [EXPERTS[expert % len(EXPERTS)] for expert in assigned[mine]]
        size = (14 if len(points) > 1000 else 22) * len(str(label)) ** 2
        axes.scatter(*points[mine].T, c=colours, marker=f"${label}$", s=size, linewidths=0)
    axes.set(xticks=[], yticks=[])


def _draw_tree(axes: Any, tree: Tree, places: Mapping[int, np.ndarray]) -> None:
    """Red edges and gates; leaves as circles in the colour of their expert, with its number."""
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
            colour = EXPERTS[node % len(EXPERTS)]
            axes.plot(
                x, y, "o", color=colour, markersize=12, markeredgecolor=TREE, markeredgewidth=2, zorder=6
            )
            style = {"color": "white", "fontsize": 8, "fontweight": "bold", "zorder": 7}
            axes.text(x, y, str(node), ha="center", va="center_baseline", **style)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: stage numbers with commas between, such as 1,2,3"
        ) from None


@command
def main() -> None:
    """Entry point of `python -m vision.tsne`."""
    parser = Parser(prog="python -m vision.tsne", description="Draw a mixture's gating tree over a t-SNE.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run of gmoe or moe made with --save-stages")
    parser.add_argument(
        "--data-root", default="data", help="folder of the run's data set (digits needs none)"
    )
    parser.add_argument("--image-size", type=int, help="as the run had it (--dataset folder)")
    parser.add_argument("--out", type=Path, help="the picture (default: RUN/tsne.png)")
    parser.add_argument("--layer", type=int, default=1, help="mixture layer, from 1")
    parser.add_argument("--examples", type=int, default=5000, help="test images at most, a random subset")
    parser.add_argument("--stages", type=_numbers, help="such as 1,2,3 (default: those with 2, 3, 4 experts)")
    options = parser.parse_args()
    if options.examples < 5:
        raise UserError(f"--examples {options.examples}: at least 5")
    config, files = load_run(options.run)
    missing = sorted(set(options.stages or []) - files.keys())
    if missing:
        there = f"{min(files)} to {max(files)}"
        raise UserError(f"--stages {missing[0]}: {options.run} has no such stage; it has {there}")
    dataset = load_data(config, options.data_root, options.image_size)
    chosen = options.stages or choose(
        {stage: read_checkpoint(path)["structure"]["experts"] for stage, path in files.items()}
    )
    out = options.out or options.run / "tsne.png"
    draw(options.run, dataset, chosen, out, options.layer, options.examples)
    print(out)


if __name__ == "__main__":
    main()
