"""Draw the gating tree of a mixture over a t-SNE of test images: `alma tsne`.

Shapes: n examples, E experts. torch is imported inside the functions that use it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import Parser, UserError, command
from alma.files import make_directory
from alma.help_texts import DATA_ROOT
from alma.records import Run
from alma.stages import stages

if TYPE_CHECKING:
    from torch import Tensor

    from vision.data import Dataset
    from vision.mixture import Mixture

_EXAMPLES = """\
examples:
  alma images --learner gmoe --save-stages --out runs/gmoe
  alma tsne runs/gmoe --out gating_tree.png
"""
TREE = "#E00000"


def tree_of(paths: "Tensor") -> dict[frozenset[int], frozenset[int]]:
    """The parent of each node of a gating tree but the root; a node is the set of the experts below it.

    Columns 2k and 2k + 1 of `Gating.paths` (E, 2 (E - 1)) are the branches of an inner node. Flat gating has
    none: {}.
    """
    through = paths[:, ::2] + paths[:, 1::2] > 0  # (E, E - 1): the node is on the path to the expert
    nodes = {frozenset(column.nonzero().flatten().tolist()) for column in through.T}
    nodes |= {frozenset([expert]) for expert in range(len(paths))}
    above = {node: [other for other in nodes if node < other] for node in nodes}
    return {node: min(larger, key=len) for node, larger in above.items() if larger}


def choose(experts: Mapping[int, int]) -> list[int]:
    """The stages to draw, given the number of experts after each: the last with 2, 3 and 4 experts
    (Figure 8), or else the last stage."""
    last = {experts[stage]: stage for stage in sorted(experts)}
    return [last[number] for number in (2, 3, 4) if number in last] or [max(experts)]


def load(directory: Path, root: str) -> "tuple[dict[str, Any], Dataset, dict[int, Mixture]]":
    """Config and data set of a run, and its mixtures after the stages that `choose` picks. UserError: it is
    not a run of mixtures, has no stages, one is damaged, or `root` has other data."""
    from vision import data
    from vision.checkpoints import read_checkpoint, reading
    from vision.deployed import learner_of

    run = Run.read(directory)
    config = run.config
    if config["learner"] not in ("gmoe", "moe") or config.get("scenario") in ("rotated", "permuted"):
        raise UserError(f"{directory}: give a run of gmoe or moe, on images as they are in the data set")
    known = {int(path.stem[6:]): path for path in directory.glob("stage_[0-9][0-9][0-9]*.pt")}
    if not known:
        raise UserError(f"{directory} has no stage_000.pt ...: run it with --save-stages into a new folder")
    dataset = data.load(config["dataset"], root)
    if dataset.fingerprint != config["data"]:
        what = f"{config['dataset']} in {root} is not the run's data"
        raise UserError(f"{what}: give that with --data-root; a run with --image-size cannot be drawn")
    with reading(directory):
        experts = {stage: read_checkpoint(path)["structure"]["experts"] for stage, path in known.items()}
        models = {stage: learner_of(run, dataset, known[stage]).model for stage in choose(experts)}
    return config, dataset, models


def draw(
    config: Mapping[str, Any], dataset: "Dataset", models: "Mapping[int, Mixture]", out: Path, examples: int
) -> None:
    """Write a figure with one panel per stage: number = class, colour = expert of the first layer, gating
    tree in red: its nodes are at the mean of their examples. The images lie as in a deterministic t-SNE of
    their raw pixels."""
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
            for label in np.unique(labels):
                own = labels == label
                look = {"marker": f"${label}$", "s": 18 * len(str(label)) ** 2, "linewidths": 0}
                colours = [f"C{expert % 10}" for expert in assigned[own]]
                axes.scatter(*points[own].T, c=colours, alpha=0.75, rasterized=True, **look)
            parents = tree_of(model.layers[0].router.paths)
            used = set(assigned.tolist())
            nodes = {frozenset([expert]) for expert in used}.union(parents.values())
            at = {node: points[np.isin(assigned, [*node])].mean(0) for node in nodes if node & used}
            for node in at.keys() & parents.keys():
                axes.plot(*zip(at[parents[node]], at[node], strict=True), color=TREE, linewidth=2, marker="o")
            for expert in used:
                circle = {"boxstyle": "circle", "facecolor": f"C{expert % 10}", "edgecolor": TREE}
                look = {"color": "white", "fontsize": 8, "ha": "center", "va": "center", "bbox": circle}
                axes.text(*at[frozenset([expert])], str(expert), **look)
            axes.axis("off")
            unused = f", {model.experts - len(used)} unused" * (len(used) < model.experts)
            title = f"stage {stage} (t = {schedule[stage].last}): {model.experts} experts{unused}"
            axes.set_title(title, fontsize=9.5)
        figure.supxlabel("number: class; colour: expert of layer 1; red: gating tree", fontsize=9)
        style.save(figure, out)


def parser() -> Parser:
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
