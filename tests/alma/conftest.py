"""Image runs for all figures; a folder and the command of `alma matrix`."""

import pytest

from .matrix_data import matrix, matrix_place  # noqa: F401
from .synthetic import image_run


@pytest.fixture(scope="session")
def grid(tmp_path_factory):
    """Runs for all figures: sm (two seeds) and ens, sizes 4 and 8, waits 1, 2, 4; replay;
    gmoe and moe."""
    place = tmp_path_factory.mktemp("grid")
    for size in (4, 8):
        for w in (1, 2, 4):
            for seed in (0, 1):
                image_run(
                    place / f"sm{size}{w}{seed}", [0.5, 0.4, 0.3, 0.2 + seed / 10], w, size, seed
                )
            image_run(
                place / f"ens{size}{w}", [0.4, 0.3, 0.2, 0.1], w, size, learner="ens", members=5
            )
        image_run(place / f"replay{size}", [0.4, 0.2, 0.2, 0.1], 2, size, replay=True)
    for router in ("tree", "flat"):
        image_run(place / router, [0.3, 0.3, 0.3, 0.3], learner="gmoe", router=router, experts=2)
    image_run(place / "moe", [0.35, 0.35, 0.35, 0.35], learner="moe", router="tree", experts=2)
    return place
