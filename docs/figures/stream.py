"""Draw docs/figures/stream.svg: a stream of mega-batches, the stages of learners, their errors.

python docs/figures/stream.py
"""

from pathlib import Path
from typing import Any

import matplotlib

from alma.report import style
from alma.stages import stages

B = 8
COLOURS = style.wait_colours((1, 4, B))
NAMES = {1: "train at once", 4: "wait for four", B: "wait for all"}
ERRORS = {1: [0.43, 0.37, 0.34, 0.32, 0.31, 0.3, 0.295, 0.29], 4: [0.26, 0.2], B: [0.12]}
"""Invented error after each stage, by waiting time."""
UNTRAINED = 0.9
INK, SOFT = "0.15", "0.4"


def main() -> None:
    """Draw and write the picture."""
    with matplotlib.rc_context(style.SETTINGS | {"font.size": 11.5, "axes.labelsize": 11.5}):
        figure, ((lanes,), (error,)) = style.subplots(
            2, 1, (5, 4.2), height_ratios=(3, 2.4), sharex=True
        )
        lanes.set_title(
            "New data keeps arriving: train now, or wait?", fontsize=12.5, weight="bold", x=0.42
        )
        _draw_stream(lanes)
        for row, w in enumerate(NAMES):
            _draw_lane(lanes, -1.2 * row - 0.9, w)
        lanes.set(ylim=(-3.8, 1), xlim=(-3.2, B + 0.5))
        lanes.axis("off")
        _draw_error(error)
        style.save(figure, Path(__file__).with_suffix(".svg"), formats=("svg",))


def _draw_stream(axes: Any) -> None:
    """The mega-batches, each as a box that ends when it arrives."""
    from matplotlib.patches import Rectangle

    axes.text(-0.15, 0.4, "mega-batch", ha="right", va="center", color=INK)
    for t in range(1, B + 1):
        axes.add_patch(
            Rectangle((t - 0.94, 0), 0.88, 0.8, facecolor="0.92", edgecolor="0.6", linewidth=0.8)
        )
        axes.text(t - 0.5, 0.4, f"{t}", ha="center", va="center_baseline", color=INK)


def _draw_lane(axes: Any, y: float, w: int) -> None:
    """The stages as numbered circles at the time they train; dotted before the first one."""
    colour = COLOURS[w]
    axes.text(-0.15, y, NAMES[w], ha="right", va="center", color=colour, weight="bold")
    axes.plot([0, w], [y, y], ":", color=colour, linewidth=1.6)
    axes.plot([w, B + 0.4], [y, y], color=colour, linewidth=1.6)
    for stage in stages(B, w, replay=False):
        axes.plot(
            stage.last, y, "o", color=colour, markersize=16, markeredgecolor="white", zorder=3
        )
        number = {"color": "white", "ha": "center", "va": "center_baseline", "weight": "bold"}
        axes.text(stage.last, y, str(stage.index), fontsize=11.5, zorder=4, **number)
    if w == B:
        axes.text(B / 2, y + 0.12, "untrained until the end", ha="center", va="bottom", color=SOFT)


def _draw_error(axes: Any) -> None:
    """Invented errors over time, in steps."""
    for w, errors in ERRORS.items():
        times = [0, *(stage.last for stage in stages(B, w, replay=False)), B + 0.4]
        values = [UNTRAINED, *errors, errors[-1]]
        axes.plot(times, values, drawstyle="steps-post", color=COLOURS[w], linewidth=2)
    axes.text(1.1, 0.5, NAMES[1], color=COLOURS[1], weight="bold", va="bottom")
    axes.text(4.1, 0.62, NAMES[4], color=COLOURS[4], weight="bold", va="bottom")
    axes.text(B - 0.1, 0.93, NAMES[B], color=COLOURS[B], weight="bold", va="bottom", ha="right")
    axes.text(-0.25, 0.5, "test error\n(invented)", ha="right", va="center", color=INK)
    axes.grid(visible=False)
    axes.set(ylim=(0, 1.1), xticks=range(B + 1), yticks=[], xlabel="mega-batches received")
    axes.spines["left"].set_position(("data", 0))
    axes.spines["bottom"].set_bounds(0, B + 0.4)


if __name__ == "__main__":
    main()
