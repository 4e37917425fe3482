"""Draw docs/figures/retraining.svg: what rules of when to retrain cost on real streams.

python docs/figures/retraining.py

retraining.csv is table_by_stream.csv of `python -m benchmarks retraining`.
"""

import csv
from pathlib import Path

import matplotlib
import numpy as np

from alma.report import style

FOLDER = Path(__file__).parent
OURS = "ALMA plan"
OURS_COLOUR = "#B03A2E"
OTHER_COLOUR = "#2E6DA4"
WIDEST = 40.0
"""Percent at which the axis ends; dots beyond it are arrows."""


def percent_by_rule() -> dict[str, list[float]]:
    """What each rule costs above the best cadence on each real stream, cheapest rule first."""
    percent: dict[str, list[float]] = {}
    with (FOLDER / "retraining.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["drift"] == "real":
                percent.setdefault(row["rule"], []).append(100 * (float(row["over_best"]) - 1))
    return dict(sorted(percent.items(), key=lambda item: float(np.mean(item[1]))))


def main() -> None:
    """Draw and write the picture."""
    percent = percent_by_rule()
    streams = len(percent[OURS])
    with matplotlib.rc_context(style.SETTINGS | {"font.size": 10.5, "axes.labelsize": 10.5}):
        figure, ((axes,),) = style.subplots(1, 1, (6.6, 4.6))
        for row, (rule, values) in enumerate(percent.items()):
            colour = OURS_COLOUR if rule == OURS else OTHER_COLOUR
            weight = "bold" if rule == OURS else "normal"
            mean = float(np.mean(values))
            inside = [value for value in values if value <= WIDEST]
            dots = {"color": colour, "markeredgecolor": "white", "markersize": 5.5}
            axes.plot(inside, np.full(len(inside), row), "o", **dots)
            if len(inside) < len(values):
                axes.plot(WIDEST, row, ">", color=colour, markersize=6, clip_on=False)
            axes.barh(row, min(mean, WIDEST), 0.62, color=colour, alpha=0.45, zorder=0)
            axes.text(-0.6, row, rule, ha="right", va="center", color=colour, weight=weight)
            axes.text(WIDEST + 1.2, row, f"+{mean:.1f}%", va="center", color=colour, weight=weight)
        axes.set_xlim(0, WIDEST)
        axes.set_ylim(len(percent) - 0.4, -0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xticks([0, 10, 20, 30, 40], ["0", "10%", "20%", "30%", "40%"])
        axes.set_xlabel("above the best fixed cadence, which is known only afterwards")
        title = f"Extra cost of each rule: bars are means, dots {streams} real streams"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(FOLDER / "retraining.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
