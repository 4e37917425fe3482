"""Write scikit-learn's digits as 12 weekly folders, DIR/2026-W01/CLASS/*.png and so on.

Class 9 appears in week 5, and from week 8 on the pictures are negatives. `--weeks 1-12` chooses
some of them. `--test-every 3` adds them to DIR/manifest.csv, in which every third picture of a week
is a test picture.
"""

import argparse
import csv
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WEEKS = 12
NEW_CLASS = 5  # first week of class 9
NEGATIVES = 8  # first week of negatives

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, metavar="DIR")
parser.add_argument("--weeks", default=f"1-{WEEKS}", metavar="FIRST-LAST")
parser.add_argument("--test-every", type=int, metavar="N")
options = parser.parse_args()
first, last = map(int, options.weeks.split("-"))

digits = load_digits()
order = np.random.RandomState(0).permutation(len(digits.target))
is_late = digits.target[order] == 9
early = order[~is_late]
late = order[is_late]
for week in range(first, last + 1):
    chosen = early[week - 1 :: WEEKS]
    if week >= NEW_CLASS:
        chosen = np.concatenate([chosen, late[week - NEW_CLASS :: WEEKS - NEW_CLASS + 1]])
    monday = date(2025, 12, 29) + timedelta(weeks=week - 1)
    year, number, _ = monday.isocalendar()
    rows = []
    for place, i in enumerate(chosen):
        pixels = (digits.images[i] * (255 / 16)).round().astype(np.uint8)
        path = options.folder / f"{year}-W{number:02d}" / str(digits.target[i]) / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - pixels if week >= NEGATIVES else pixels).save(path)
        split = "test" if options.test_every and place % options.test_every == 0 else ""
        rows.append([path.relative_to(options.folder), digits.target[i], path.parts[-3], split])
    if options.test_every:
        manifest = options.folder / "manifest.csv"
        is_new = not manifest.exists()
        with manifest.open("a", newline="") as file:
            header = [["path", "label", "date", "split"]]
            csv.writer(file).writerows(header + rows if is_new else rows)
