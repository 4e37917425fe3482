"""Rows of each learner of images as an earlier version had them: a change of numbers is seen."""

import pytest

from vision import MegaBatchStream, run

ROWS = {
    "sm": (
        1482,
        8543232,
        [0.9306, 0.3583, 0.1944, 0.1389, 0.125],
        [1.21772, 0.57183, 0.28304, 0.4102],
    ),
    "ens": (
        7410,
        42716160,
        [0.8889, 0.1861, 0.1028, 0.0806, 0.0611],
        [1.16338, 0.60815, 0.28355, 0.37148],
    ),
    "umix": (
        7410,
        42716160,
        [0.8944, 0.275, 0.1778, 0.0944, 0.0722],
        [1.49748, 0.55313, 0.20942, 0.2647],
    ),
    "gens": (
        5928,
        8543232,
        [0.9306, 0.3583, 0.2944, 0.3472, 0.225],
        [1.21772, 1.03808, 1.16139, 1.15962],
    ),
    "gmoe": (
        5910,
        33730512,
        [0.9306, 0.3583, 0.1861, 0.1222, 0.0944],
        [1.21772, 0.51345, 0.22342, 0.26634],
    ),
    "moe": (
        2958,
        16796160,
        [0.9028, 0.4583, 0.1639, 0.125, 0.1083],
        [1.14217, 0.49894, 0.2244, 0.2859],
    ),
    "ff": (
        2601,
        37099296,
        [0.9306, 0.3583, 0.2444, 0.1444, 0.1611],
        [1.21772, 0.62399, 0.28394, 0.51901],
    ),
}
"""Parameters and training FLOPs of the last row, test errors of all rows,
validation losses of all stages."""


@pytest.mark.parametrize("learner", ROWS)
def test_rows_are_those_of_before(tmp_path, learner):
    """CPUs round in their own ways, so that an image or two of 360 may differ."""
    parameters, flops, errors, losses = ROWS[learner]
    rows = run(
        MegaBatchStream("digits", 4), learner, tmp_path, hidden=16, epochs=4, batch_size=32
    ).rows
    assert (rows[-1]["parameters"], rows[-1]["train_flops"]) == (parameters, flops)
    assert [row["value"] for row in rows] == pytest.approx(errors, abs=0.012)
    assert [row["extra"]["valid"]["loss"] for row in rows[1:]] == pytest.approx(losses, rel=0.01)
