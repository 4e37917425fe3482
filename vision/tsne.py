"""Draw the gating tree of a mixture over a t-SNE of test images: `alma tsne`.

Shapes: n examples, E experts. torch is imported inside the functions that use it.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from alma.help_texts import DATA_ROOT
from alma.records import Run
from alma.stages import stages

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from vision.data import Dataset
    from vision.mixture import Mixture

_EXAMPLES = """\
examples:
  alma images --learner gmoe --save-stages --out runs/gmoe
  alma tsne runs/gmoe --out gating_tree.png
"""
EXPERTS = (
    *("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),  # Okabe and Ito, without their red
    *("#88CCEE", "#999933", "#44AA99", "#332288", "#AA4499"),  # Tol, muted
)
"""Colour of each expert; experts are no learners, so these are not the colours of learners."""
TREE = "#E00000"


def tree_of(paths: "Tensor", experts: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The leaves (experts) below each node of a gating tree, and the parent of each node but the root.

    Leaves are nodes 0..E-1. Columns 2k and 2k + 1 of `Gating.paths` (E, 2 (E - 1)) are the branches of inner
    node E + k. Flat gating, without paths, is a star of its experts.
    """
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
    return below, parents


def positions(
    below: Mapping[int, list[int]], points: "np.ndarray", assigned: "np.ndarray"
) -> dict[int, "np.ndarray"]:
    """Positions of the nodes among points (n, 2) of experts `assigned` (n,), by the leaves `below` each.

    A leaf is where its examples are densest, an inner node at the mean of its leaves. Experts without
    examples have no position.
    """
    import numpy as np
    from scipy.spatial import cKDTree

    places, radius = {}, 0.08 * float(np.ptp(points, axis=0).max())
    for leaf in np.unique(assigned).tolist():
        own = points[assigned == leaf]  # the one with the most others within the radius
        places[leaf] = own[cKDTree(own).query_ball_point(own, radius, return_length=True).argmax()]
    for node, leaves in below.items():
        if node not in places and (used := [places[leaf] for leaf in leaves if leaf in places]):
            places[node] = np.mean(used, axis=0)
    return places


def choose(experts: Mapping[int, int]) -> list[int]:
    """Up to three stages to draw, given the number of experts after each: the last with 2, 3 and 4 experts
    (Figure 8), or else the first, middle and last stage."""
    known = sorted(experts)
    last = {experts[stage]: stage for stage in known}
    growth = [last[number] for number in (2, 3, 4) if number in last]
    return growth if len(growth) > 1 else sorted({known[0], known[len(known) // 2], known[-1]})


def load(directory: Path, root: str) -> "tuple[dict[str, Any], Dataset, dict[int, Mixture]]":
    """Config and data set of a run, and its mixtures after the stages that `choose` picks. UserError: it is
    not a run of mixtures, has no stages, one is damaged, or `root` has other data."""
    import torch

    from vision import data
    from vision.checkpoints import read_checkpoint, reading
    from vision.learners import LEARNERS

    config = Run.read(directory).config
    if config["learner"] not in ("gmoe", "moe"):
        raise UserError(f"{directory} is a run of {config['learner']}: give a run of gmoe or moe")
    if config.get("scenario") in ("rotated", "permuted"):
        raise UserError(f"{directory}: --scenario {config['scenario']} changed its images")
    known = {int(path.stem[6:]): path for path in sorted(directory.glob("stage_[0-9][0-9][0-9]*.pt"))}
    if not known:
        raise UserError(f"{directory} has no stage_000.pt ...: run it with --save-stages into a new folder")
    dataset = data.load(config["dataset"], root)
    if dataset.fingerprint != config["data"]:
        what = f"{config['dataset']} in {root} is not the run's data"
        raise UserError(f"{what}: give that with --data-root; a run with --image-size cannot be drawn")
    kind, models = LEARNERS[config["learner"]], {}
    names = config.keys() & set(kind.settings_class.names())
    settings = kind.settings_class(**{name: config[name] for name in names})
    with reading(directory):
        experts = {stage: read_checkpoint(path)["structure"]["experts"] for stage, path in known.items()}
        for stage in choose(experts):
            learner = kind(dataset.shape, dataset.classes, settings, config["seed"], torch.device("cpu"))
            learner.load(read_checkpoint(known[stage]))
            models[stage] = learner.model
    return config, dataset, models


def draw(
    config: Mapping[str, Any],
    dataset: "Dataset",
    models: "Mapping[int, Mixture]",
    out: Path,
    examples: int,
) -> None:
    """Write a figure with one panel per stage: number = class, colour = expert of the first layer, gating
    tree in red. The images lie as in a deterministic t-SNE of their raw pixels."""
    import numpy as np
    import torch
    from sklearn.manifold import TSNE

    from alma.report import style
    from vision.train import evaluate

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
            gates = evaluate(model, images, lambda x: model.routed(x)[1][0])  # noqa: B023
            assigned = gates.argmax(0).numpy()
            _draw_panel(axes, points, labels, assigned, model)
            unused = model.experts - len(np.unique(assigned))
            title = f"{model.experts} expert{'s' if model.experts > 1 else ''}"
            title += f", {unused} of them unused" if unused else ""
            axes.set_title(f"stage {stage} (t = {schedule[stage].last}): {title}", fontsize=9.5)
        key = "number: class; colour: expert of layer 1; red: gates, with a star at the root"
        figure.supxlabel(textwrap.fill(key, 50 * len(models)), fontsize=9)
        style.save(figure, out)


def _draw_panel(
    axes: Any, points: "np.ndarray", labels: "np.ndarray", assigned: "np.ndarray", model: "Mixture"
) -> None:
    """Draw each example as the number of its class, in the colour of its expert, edges and gates in red, and
    leaves as circles with the number of their expert."""
    colours = [EXPERTS[expert % len(EXPERTS)] for expert in assigned]
    for label in sorted(set(labels)):
        own = [i for i, other in enumerate(labels) if other == label]
        look = {"marker": f"${label}$", "s": (14 if len(points) > 1000 else 22) * len(str(label)) ** 2}
        look |= {"c": [colours[i] for i in own], "rasterized": True}  # thousands of shapes
        axes.scatter(*points[own].T, linewidths=0, alpha=0.75, **look)
    axes.axis("off")
    below, parents = tree_of(model.layers[0].router.paths, model.experts)
    places = positions(below, points, assigned)
    for child, parent in parents.items():
        if child in places:
            x, y = zip(places[parent], places[child], strict=True)
            axes.plot(x, y, color="white", linewidth=4, zorder=3)
            axes.plot(x, y, color=TREE, linewidth=2, zorder=4)
    for node, (x, y) in places.items():
        if below[node] == [node]:
            ring = {"markersize": 12, "markeredgecolor": TREE, "markeredgewidth": 2, "zorder": 6}
            axes.plot(x, y, "o", color=EXPERTS[node % len(EXPERTS)], **ring)
            look = {"color": "white", "fontsize": 8, "fontweight": "bold", "zorder": 7}
            axes.text(x, y, str(node), ha="center", va="center_baseline", **look)
        else:
            marker, size = ("s", 7) if node in parents else ("*", 14)
            axes.plot(x, y, marker, color=TREE, markersize=size, markeredgecolor="white", zorder=5)


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m vision.tsne",
        usage="%(prog)s RUN [options]",
        description="Draw the gating tree of an image mixture over a t-SNE of test images, stage by stage "
        "(Figures 5 right and 8 of the paper's first draft).",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add("run", type=Path, metavar="RUN", help="run directory of gmoe or moe, made with --save-stages")
    add("--data-root", default="data", metavar="DIR", help=DATA_ROOT)
    add("--out", type=Path, metavar="FILE", help="PNG file to write (default: RUN/tsne.png)")
    add("--examples", type=int, default=5000, metavar="N", help="random test images to draw (default: 5000)")
    return made


@command
def main() -> None:
    """Entry point of `python -m vision.tsne`."""
    options = parser().parse_args()
    if options.examples < 5:
        raise UserError(f"--examples {options.examples}: at least 5")
    out = options.out or options.run / "tsne.png"
    draw(*load(options.run, options.data_root), out, options.examples)
    print(out)


if __name__ == "__main__":
    main()
