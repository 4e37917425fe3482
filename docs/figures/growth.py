"""Draw docs/figures/growth.svg: a growth step with a tree of gates, as in the paper's Figure 6.

python docs/figures/growth.py
"""

from pathlib import Path
from typing import Any

from alma.report import style

GATE, EXPERT, NEW = "#B03A2E", "#2E6DA4", "#E08A00"
Place = tuple[float, float]
BEFORE: dict[str, Place] = {"g1": (1.5, 3), "1": (0.5, 1.9), "2": (2.5, 1.9)}
AFTER: dict[str, Place] = {
    "g1": (1.5, 3),
    "1": (0.5, 1.9),
    "g2": (2.5, 1.9),
    "2": (1.8, 0.8),
    "3": (3.2, 0.8),
}
"""Places of gates (g1, g2) and experts (1, 2, 3)."""


def main() -> None:
    """Draw and write the picture."""
    with style.drawing():
        figure, ((before, after),) = style.subplots(1, 2, (6.8, 2.9))
        _draw_tree(
            before,
            BEFORE,
            [("g1", "1"), ("g1", "2")],
            "before: two experts; expert 2 has the larger loss",
        )
        edges = [("g1", "1"), ("g1", "g2"), ("g2", "2"), ("g2", "3")]
        _draw_tree(
            after, AFTER, edges, "after: expert 3 is a copy of expert 2, their gate is random"
        )
        style.save(figure, Path(__file__).with_suffix(".svg"), formats=("svg",))


def _draw_tree(
    axes: Any, places: dict[str, Place], edges: list[tuple[str, str]], title: str
) -> None:
    for parent, child in edges:
        new = parent == "g2"
        ends = zip(places[parent], places[child], strict=True)
        axes.plot(*ends, color=NEW if new else "0.5", linewidth=1.4, zorder=1)
    for name, (x, y) in places.items():
        gate = name.startswith("g")
        colour = NEW if name in ("g2", "3") else GATE if gate else EXPERT
        axes.plot(x, y, "o" if gate else "s", color=colour, markersize=17 if gate else 24, zorder=2)
        text = {"ha": "center", "va": "center_baseline", "color": "white", "fontsize": 9}
        axes.text(
            x,
            y,
            "gate" if gate else f"$h_{name}$",
            zorder=3,
            **(text | {"fontsize": 6.5} if gate else text),
        )
    axes.set_title(title)
    axes.set(xlim=(-0.2, 3.8), ylim=(0.3, 3.5))
    axes.axis("off")


if __name__ == "__main__":
    main()
