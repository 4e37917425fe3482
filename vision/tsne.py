"""Draw the gating tree of a mixture over a t-SNE of test images: `alma tsne`."""

from pathlib import Path

from alma.errors import Parser, UserError, command, number_list
from alma.help_texts import DATA_ROOT

_EXAMPLES = """\
examples:
  alma images --learner gmoe --save-stages --out runs/gmoe
  alma tsne runs/gmoe --out gating_tree.png
"""


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
    size = "side of the images in pixels, as --image-size of the run"
    add("--image-size", type=int, metavar="S", help=size)
    add("--out", type=Path, metavar="FILE", help="PNG file to write (default: RUN/tsne.png)")
    layer = "mixture layer whose gates are drawn, counted from 1 (default: 1)"
    add("--layer", type=int, default=1, metavar="N", help=layer)
    examples = "random test images to draw (default: 5000)"
    add("--examples", type=int, default=5000, metavar="N", help=examples)
    stages = "stages to draw, such as 1,2,3 (default: the last ones with 2, 3 and 4 experts)"
    add("--stages", type=number_list, metavar="LIST", help=stages)
    return made


@command
def main() -> None:
    """Entry point of `python -m vision.tsne`."""
    options = parser().parse_args()
    if options.examples < 5:
        raise UserError(f"--examples {options.examples}: at least 5")
    from vision import gating_tree  # loads torch

    config, dataset = gating_tree.load_run(options.run, options.data_root, options.image_size)
    models = gating_tree.load_models(options.run, config, dataset, options.stages)
    out = options.out or options.run / "tsne.png"
    gating_tree.draw(config, models, dataset, out, options.layer, options.examples)
    print(out)


if __name__ == "__main__":
    main()
