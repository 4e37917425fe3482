"""Draw docs/figures/stream.{svg,png}: a stream of mega-batches, stages, waiting time and replay.

python docs/figures/stream.py
"""

from pathlib import Path
from typing import Any

from alma.report import style
from alma.stages import stages

B = 8
COLOURS = style.wait_colours((1, 4, B))
GREY, INK = "0.55", "0.15"
ERRORS = {1: [0.43, 0.36, 0.33, 0.31, 0.3, 0.29, 0.285, 0.28], 4: [0.26, 0.2], B: [0.16]}
"""Invented error after each stage, by waiting time."""
UNTRAINED = 0.9


def main() -> None:
    """Draw and write the picture."""
    with style.drawing():
        figure, panels = style.subplots(2, 1, (6.8, 4.9), height_ratios=(3.2, 2), sharex=True)
        (lanes,), (error,) = panels
        _draw_stream(lanes)
        for y, (w, replay) in enumerate(((1, False), (4, False), (4, True), (B, False))):
            _draw_lane(lanes, -1.15 * y - 1.5, w, replay)
        lanes.set(ylim=(-5.3, 1.0), xlim=(-2, B + 2))
        lanes.axis("off")
        _draw_error(error)
        style.save(figure, Path(__file__).with_suffix(".png"), formats=("png", "svg"))


def _box(axes: Any, left: float, right: float, y: float, height: float, **look: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch((left, y), right - left, height, boxstyle=rounded, **look))


def _draw_stream(axes: Any) -> None:
    """The mega-batches, each as a box that ends when it arrives."""
    axes.text(-0.15, 0.4, "stream", ha="right", va="center", fontsize=10, color=INK)
    for t in range(1, B + 1):
        _box(axes, t - 0.94, t - 0.06, 0, 0.8, facecolor="0.93", edgecolor="0.6", linewidth=0.8)
        axes.text(t - 0.5, 0.4, f"$D_{t}$", ha="center", va="center", fontsize=11, color=INK)
    note = "bar: data that a stage trains on · circle: stage · dotted: waiting, untrained"
    axes.text(0.06, -0.42, note, fontsize=8.5, color=GREY)


def _draw_lane(axes: Any, y: float, w: int, replay: bool) -> None:
    """What each stage trains on, as bars; the stages, as circles; dotted while the learner waits."""
    colour = COLOURS[w]
    name = f"w = {w}" + (", replay" if replay else "")
    axes.text(-0.15, y + 0.25, name, ha="right", va="center", fontsize=10, color=colour, fontweight="bold")
    axes.plot([0, w], [y, y], ":", color=colour, linewidth=1.4)
    axes.plot([w, B + 0.6], [y, y], color=colour, linewidth=1.4)
    for stage in stages(B, w, replay):
        first, last = min(stage.train_on), max(stage.train_on)
        level = y + 0.26 + 0.24 * stage.index * replay
        look = {"facecolor": colour, "alpha": 0.35, "linewidth": 0}
        _box(axes, first - 0.94, last - 0.2, level, 0.17, **look)
        axes.plot(last, y, "o", color=colour, markersize=13, markeredgecolor="white", zorder=3)
        axes.text(last, y, str(stage.index), color="white", ha="center", va="center_baseline", fontsize=8)
    notes = {
        (1, False): "a stage after each",
        (4, False): "a stage after four",
        (4, True): "… on all data so far",
        (B, False): "one stage, at the end",
    }
    axes.text(B + 0.3, y + 0.36, notes[w, replay], fontsize=8, color=GREY, va="center")


def _draw_error(axes: Any) -> None:
    """Invented errors over time, in steps; the area below one of them is its CER."""
    places = {1: "bottom", 4: "center", B: "top"}
    for w, errors in ERRORS.items():
        times = [0, *(stage.last for stage in stages(B, w, False)), B + 0.6]
        values = [UNTRAINED, *errors, errors[-1]]
        axes.plot(times, values, drawstyle="steps-post", color=COLOURS[w], linewidth=1.6)
        axes.text(times[-1] + 0.1, values[-1], f"w = {w}", color=COLOURS[w], va=places[w])
        if w == 4:
            axes.fill_between(times, values, step="post", color=COLOURS[w], alpha=0.1, linewidth=0)
            axes.text(
                2.5, 0.63, "area: CER,\nthe cumulative error", color=COLOURS[w], fontsize=8.5, ha="center"
            )
    axes.text(0.1, 0.94, "untrained", fontsize=8.5, color=GREY)
    axes.text(B - 0.1, 0.94, "invented numbers", fontsize=8.5, color=GREY, ha="right")
    axes.set(ylim=(0, 1.05), xticks=range(B + 1), yticks=[], ylabel="test error")
    axes.set_xlabel("time t: mega-batches received", fontsize=9)
    axes.spines["left"].set_position(("data", 0))
    axes.spines["bottom"].set_bounds(0, B + 0.6)


if __name__ == "__main__":
    main()
