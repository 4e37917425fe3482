"""The gating tree of a mixture over a t-SNE of test images (first draft, Figures 5 right and 8, App. E).

python -m vision.tsne RUN [--data-root DIR] [--out FILE.png] [--layer 1] [--examples 5000] [--stages 1,2,3]
"""

from pathlib import Path

from alma.errors import Parser, UserError, command, number_list
from vision.experiment import read_checkpoint


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m vision.tsne", description="Draw a mixture's gating tree over a t-SNE.")
    add = made.add_argument
    add("run", type=Path, metavar="RUN", help="run of gmoe or moe with --save-stages")
    add("--data-root", default="data", help="folder of the run's data set (not used by digits)")
    add("--image-size", type=int, help="that of the run (--dataset folder)")
    add("--out", type=Path, help="output file (default: RUN/tsne.png)")
    add("--layer", type=int, default=1, help="mixture layer, from 1")
    add("--examples", type=int, default=5000, help="size of the random subset of test images (default: 5000)")
    add("--stages", type=number_list, help="such as 1,2,3 (default: those with 2, 3 and 4 experts)")
    return made


@command
def main() -> None:
    """Entry point of `python -m vision.tsne`."""
    options = parser().parse_args()
    if options.examples < 5:
        raise UserError(f"--examples {options.examples}: at least 5")
    from vision import gating_tree  # loads torch

    config, files = gating_tree.load_run(options.run)
    missing = sorted(set(options.stages or []) - files.keys())
    if missing:
        raise UserError(f"--stages {missing[0]}: {options.run} has stages {min(files)} to {max(files)}")
    dataset = gating_tree.load_data(config, options.data_root, options.image_size)
    experts = {stage: read_checkpoint(path)["structure"]["experts"] for stage, path in files.items()}
    chosen = options.stages or gating_tree.choose(experts)
    out = options.out or options.run / "tsne.png"
    gating_tree.draw(options.run, dataset, chosen, out, options.layer, options.examples)
    print(out)


if __name__ == "__main__":
    main()
