"""A detector's own trainer on a stream of images by date, which grows."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from alma.records import Run

ROOT = Path(__file__).parents[2]


def shapes(folder, weeks):
    """Pictures of 64 x 64 pixels with one shape each, and a manifest with its box."""
    random = np.random.RandomState(0)
    lines = []
    for week in range(1, weeks + 1):
        for i in range(10):
            x, y, size = (
                int(random.randint(low, high)) for low, high in ((2, 30), (2, 30), (12, 30))
            )
            image = Image.new("RGB", (64, 64))
            box = [x, y, x + size, y + size]
            label = ("circle", "square")[i % 2]
            draw = ImageDraw.Draw(image)
            (draw.ellipse if i % 2 == 0 else draw.rectangle)(
                box, fill=tuple(random.randint(80, 255, 3).tolist())
            )
            image.save(folder / f"{week}_{i}.png")
            lines.append(
                {
                    "path": f"{week}_{i}.png",
                    "label": label,
                    "date": f"2026-W{week:02}",
                    "boxes": [box],
                }
            )
    (folder / "images.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def alma(*words, folder):
    done = subprocess.run(
        [sys.executable, "-m", "alma", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.mark.slow
def test_a_detector_trains_on_a_stream_of_images_and_goes_on_when_it_has_grown(tmp_path):
    trainer = f"{sys.executable} {ROOT / 'examples/trainers/detection.py'}"
    train = [
        "train",
        "stream",
        "--learner",
        "sm",
        "--budget",
        "updates=40",
        "--out",
        "run",
        "--trainer",
        trainer,
    ]
    shapes(tmp_path, 2)
    write = ["images", "--manifest", "images.jsonl", "--by", "week", "--write", "stream"]
    alma(*write, folder=tmp_path)
    alma(*train, folder=tmp_path)
    before = (tmp_path / "run/results.jsonl").read_bytes()
    shapes(tmp_path, 3)
    alma(*write, "--append", folder=tmp_path)
    alma(*train, folder=tmp_path)
    assert (tmp_path / "run/results.jsonl").read_bytes().startswith(before)
    rows = Run.read(tmp_path / "run").rows
    assert rows[-1]["extra"]["matrix_periods"] == ["2026-W01", "2026-W02", "2026-W03"]
    assert Run.read(tmp_path / "run").info["test_periods"] == 2
    assert "on 2026-W03, the newest held-out part" in alma("report", "run", folder=tmp_path)
    assert math.log(rows[-1]["value"]) < 0.8 * math.log(rows[0]["value"])
    assert "in-distribution" in alma("report", "run", folder=tmp_path)
