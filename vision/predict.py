"""Predict the classes of images with the model of a run: `alma predict`."""

import csv
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from alma.errors import Parser, UserError, command, require_extra
from alma.escape import csv_cell
from alma.files import atomic_write, make_directory
from vision.experiment import device_of

if TYPE_CHECKING:
    from vision.data import Dataset
    from vision.learners import Learner

_BATCH = 256  # images that are read at a time
_EXAMPLES = """\
examples:
  alma predict runs/mine photos --out labels.csv
  alma predict runs/mine photos/a.jpg --t 3 --out week3.csv
"""


def parser() -> Parser:
    """The command line of `alma predict`."""
    command_line = Parser(
        prog="python -m vision.predict",
        usage="%(prog)s RUN IMAGES... --out FILE.csv [options]",
        description="Predict the classes of images with the model of a run of `alma images`. "
        "Images are prepared as those of the run. The file has a row for each: path, label, "
        "probability.",
        epilog=_EXAMPLES,
    )
    add = command_line.add_argument
    add("run", type=Path, metavar="RUN", help="directory of a run")
    add(
        "images",
        type=Path,
        nargs="+",
        metavar="IMAGES",
        help="files, or folders with files below them",
    )
    text = "use the model after mega-batch N, of a run with --save-stages (default: the last one)"
    add("--t", type=int, metavar="N", help=text)
    add("--out", type=Path, required=True, metavar="FILE", help="CSV file to write")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    return command_line


def predictions(
    learner: "Learner", data: "Dataset", paths: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Path, label and probability of each image, read in batches.

    An unreadable image is named on stderr; its label and probability are empty.
    """
    import numpy as np
    import torch

    from vision import decoding
    from vision.data import Images

    channels, height, width = data.shape
    size = decoding.Size(height, width, data.resize_size)
    mode = "L" if channels == 1 else "RGB"
    blank = np.zeros((height, width, channels), np.uint8)

    def read(path: str) -> "np.ndarray | None":
        try:
            return decoding.read_image(path, size, mode, data.background).reshape(
                height, width, channels
            )
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            return None

    decoding.set_warnings()
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(paths), _BATCH):
            batch = paths[start : start + _BATCH]
            pictures = list(pool.map(read, batch))
            pixels = np.stack([blank if picture is None else picture for picture in pictures])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
            indices = torch.arange(len(batch))  # also passed as labels, which are never read
            examples = data.select(Images(images, indices), indices, learner.device)
            judged = learner.judged(learner.deployed, examples)
            chosen = judged[-1].long()
            likely = judged.gather(0, chosen[None])[0].exp()
            answers = zip(batch, pictures, chosen.tolist(), likely.tolist(), strict=True)
            for path, picture, number, probability in answers:
                if picture is None:
                    yield path, "", ""
                else:
                    yield path, data.names[number], f"{probability:.6f}"


@command
def main() -> None:
    """Entry point of `python -m vision.predict`."""
    options = parser().parse_args()
    require_extra("images", "alma predict")
    from vision import alpha, folder
    from vision.deployed import load

    paths: dict[str, None] = {}  # each image once, in order
    left_out: Counter[str] = Counter()
    for place in options.images:
        if place.is_file():
            paths[str(place)] = None
            continue
        for _, path in folder.below(place, 0, left_out, "give files or folders"):
            paths[path] = None
    if not paths:
        places = ", ".join(map(str, options.images))
        raise UserError(f"no images in {places}: give {', '.join(folder.KINDS)}")
    if options.out.is_dir() or options.out.suffix.lower() in folder.KINDS:
        raise UserError(f"--out {options.out} is a folder or an image: give a .csv file")
    learner, data = load(options.run, options.t, device_of(options.device))
    if data.shape[0] not in (1, 3):
        raise UserError(
            f"{options.run} has images of {data.shape[0]} channels: predict from Python"
        )
    make_directory(options.out.absolute().parent)
    unreadable = 0
    with atomic_write(options.out) as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(["path", "label", "probability"])
        for path, *answer in predictions(learner, data, [*paths]):
            name = os.fsencode(path).decode(errors="backslashreplace")
            write(map(csv_cell, [name, *answer]))
            unreadable += answer == ["", ""]
        if unreadable == len(paths):
            raise UserError(f"none of {len(paths):,} images is readable")
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
    counts = f"images: {len(paths):,}; unreadable: {unreadable:,}"
    print(f"{options.out}: {counts}; files left out: {reasons or 'none'}")
    alpha_line = alpha.line([*paths], data.background)
    if alpha_line:
        print(f"{options.out}: {alpha_line}")


if __name__ == "__main__":
    main()
