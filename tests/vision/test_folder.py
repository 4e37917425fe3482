"""A folder of images, listed as torchvision lists it."""

import numpy as np
from PIL import Image

from vision import folder


def test_files_are_those_of_torchvision_in_its_order(tmp_path):
    from torchvision.datasets import ImageFolder

    for name in ("dog/1.png", "cat/2.png", "cat/b/10.PNG", "cat/b/9.png", "cat/a/z.png", "cat/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((6, 4, 3), np.uint8)).save(tmp_path / name, format="PNG")
    (tmp_path / "cat/note.txt").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "dog")
    expected = ImageFolder(str(tmp_path))
    listed = folder._listed(tmp_path)
    pairs = [(path, label) for label, paths in enumerate(listed.values()) for path in paths]
    assert (pairs, list(listed)) == (expected.samples, expected.classes)
