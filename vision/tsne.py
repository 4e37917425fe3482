"""Draw the gating tree of a mixture over a t-SNE of test images: `alma tsne`.

Shapes: n examples, E experts. torch is imported inside the functions that use it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import Parser, UserError, command, require_extra
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
    """The parent of each node of a gating tree but the root; a node is the set of the experts below
    it.

    Columns 2k and 2k + 1 of `Gating.paths` (E, 2 (E - 1)) are the branches of an inner node. Flat
    gating has none: {}.
    """
    through = (
        paths[:, ::2] + paths[:, 1::2] > 0
    )  # (E, E - 1): whether inner node k is on the path to expert e
    nodes = {frozenset(column.nonzero().flatten().tolist()) for column in through.T}
    nodes |= {frozenset([expert]) for expert in range(len(paths))}
    parents = {}
    for node in nodes:
        larger = [other for other in nodes if node < other]
        if larger:
            parents[node] = min(larger, key=len)
    return parents


def choose(experts: Mapping[int, int]) -> list[int]:
    """The stages to draw, given the number of experts after each: the last with 2, 3 and 4 experts
    (Figure 8), or else the last stage."""
    last = {experts[stage]: stage for stage in sorted(experts)}
    return [last[number] for number in (2, 3, 4) if number in last] or [max(experts)]


def load(directory: Path, root: str) -> "tuple[dict[str, Any], Dataset, dict[int, Mixture]]":
    """Config and data set of a run, and its mixtures after the stages that `choose` picks.

    UserError: it is no run of mixtures, has no stages, one is damaged, or `root` has other data.
    """
    from vision import data
    from vision.checkpoints import read_checkpoint, reading
    from vision.deployed import learner_of

    run = Run.read(directory)
    config = run.config
    if config["learner"] not in ("gmoe", "moe") or config.get("scenario") in (
        "rotated",
        "permuted",
    ):
        raise UserError(
            f"{directory}: give a run of gmoe or moe, on images as they are in the data set"
        )
    files = {}  # stage number -> file of its model
    for path in directory.glob("stage_[0-9][0-9][0-9]*.pt"):
        files[int(path.stem.removeprefix("stage_"))] = path
    if not files:
        remedy = "run it with --save-stages into a new folder"
        raise UserError(f"{directory} has no stage_000.pt ...: {remedy}")
    dataset = data.load(config["dataset"], root)
    if dataset.fingerprint != config["data"]:
        fault = f"{config['dataset']} in {root} is not the run's data"
        remedy = "give that with --data-root; a run with --image-size cannot be drawn"
        raise UserError(f"{fault}: {remedy}")
    with reading(directory):
        experts = {}
        for stage, path in files.items():
            experts[stage] = read_checkpoint(path)["structure"]["experts"]
        models = {}
        for stage in choose(experts):
            models[stage] = learner_of(run, dataset, files[stage]).model
    return config, dataset, models


def draw(
    config: Mapping[str, Any],
    dataset: "Dataset",
    models: "Mapping[int, Mixture]",
    out: Path,
    examples: int,
) -> None:
    """Write a figure of `examples` test images with one panel per stage.

    Number: class; colour: expert of the first layer; red: gating tree, with each node at the mean
    of its examples. Images are placed by a deterministic t-SNE of their raw pixels.
    """
    import numpy as np
    import torch
    from sklearn.manifold import TSNE

    from alma.report import style

    order = np.random.RandomState(0).permutation(len(dataset.test.labels))
    picked = torch.from_numpy(order[:examples])
    labels = dataset.test.labels[picked].numpy()
    images = dataset.select(dataset.test, picked)
    pixels = dataset.test.images[picked].flatten(1).float().numpy() / 255
    perplexity = min(30.0, (len(pixels) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(pixels)
    schedule = stages(config["megabatches"], config["waiting_time"], config["replay"])
    make_directory(out.parent)
    with style.drawing():
        size = (3.6 * len(models), 3.9)
        figure, panels = style.subplots(1, len(models), size, sharex=True, sharey=True)
        for (stage, model), axes in zip(models.items(), panels[0], strict=True):
            experts = _experts_of(model, images)
            _draw_images(axes, points, labels, experts)
            _draw_tree(axes, points, experts, tree_of(model.layers[0].router.paths))
            axes.axis("off")
            title = f"stage {stage} (t = {schedule[stage].last}): {model.experts} experts"
            unused = model.experts - len(set(experts.tolist()))
            if unused:
                title += f", {unused} unused"
            axes.set_title(title, fontsize=9.5)
        text = "number: class; colour: expert of layer 1; red: gating tree"
        figure.supxlabel(text, fontsize=9)
        style.save(figure, out)


def _experts_of(model: "Mixture", images: Any) -> Any:
    """The expert (n,) of the first layer with the largest gate value for each image."""
    from vision.train import evaluate

    def gates_of_first_layer(x: "Tensor") -> "Tensor":
        _, gates = model.routed(x)
        return gates[0]

    return evaluate(model, images, gates_of_first_layer).argmax(0).numpy()


def _draw_images(axes: Any, points: Any, labels: Any, experts: Any) -> None:
    """Draw the number of the class of each image at its point (n, 2), in the colour of its
    expert."""
    import numpy as np

    for label in np.unique(labels):
        of_class = labels == label
        axes.scatter(
            *points[of_class].T,
            c=[f"C{expert % 10}" for expert in experts[of_class]],
            alpha=0.75,
            rasterized=True,
            marker=f"${label}$",
            s=18 * len(str(label)) ** 2,
            linewidths=0,
        )


def _draw_tree(
    axes: Any, points: Any, experts: Any, parents: Mapping[frozenset[int], frozenset[int]]
) -> None:
    """Draw the gating tree; nodes without images are left out."""
    import numpy as np

    used = set(experts.tolist())
    nodes = {frozenset([expert]) for expert in used}.union(parents.values())
    places = {}
    for node in nodes:
        if node & used:
            places[node] = points[np.isin(experts, [*node])].mean(0)
    for node in places.keys() & parents.keys():
        line = zip(places[parents[node]], places[node], strict=True)
        axes.plot(*line, color=TREE, linewidth=2, marker="o")
    for expert in used:
        circle = {"boxstyle": "circle", "facecolor": f"C{expert % 10}", "edgecolor": TREE}
        place = places[frozenset([expert])]
        style = {"color": "white", "fontsize": 8, "ha": "center", "va": "center", "bbox": circle}
        axes.text(*place, str(expert), **style)


def parser() -> Parser:
    """The command line of `alma tsne`."""
    command_line = Parser(
        prog="python -m vision.tsne",
        usage="%(prog)s RUN [options]",
        description="Draw the gating tree of an image mixture over a t-SNE of test images, stage "
        "by stage (Figures 5 right and 8 of the paper's first draft).",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="run directory of gmoe or moe, made with --save-stages",
    )
    add("--data-root", default="data", metavar="DIR", help=DATA_ROOT)
    add("--out", type=Path, metavar="FILE", help="PNG file to write (default: RUN/tsne.png)")
    text = "random test images to draw (default: 5000)"
    add("--examples", type=int, default=5000, metavar="N", help=text)
    return command_line


@command
def main() -> None:
    """Entry point of `python -m vision.tsne`."""
    options = parser().parse_args()
    require_extra("images", "alma tsne")
    if options.examples < 5:
        raise UserError(f"--examples {options.examples}: at least 5")
    out = options.out or options.run / "tsne.png"
    draw(*load(options.run, options.data_root), out, options.examples)
    print(out)


if __name__ == "__main__":
    main()
