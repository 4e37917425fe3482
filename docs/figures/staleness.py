"""Draw docs/figures/staleness.svg: loss on older and newer text than a model's last.

The model is trained with and without replay.

python docs/figures/staleness.py

staleness.csv has the means of three seeds over the 8 periods of git's commits (docs/time.md), in
nats a token: the loss of a model on the period `age` after its last one, less that of the model
without replay and of the same seed that has just trained on that period; `lowest` and `highest` are
of seeds.
"""

import csv
from pathlib import Path

import matplotlib

from alma.report import style

LOOKS = {
    "0": ("without replay", "#B03A2E", (1.7, 0.05)),
    "0.5": ("half replay", "#2E6DA4", (-4.9, -0.17)),
}
"""Label, colour and the label's place, by share of replay."""


def main() -> None:
    """Draw and write the picture."""
    with open(Path(__file__).with_suffix(".csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with matplotlib.rc_context(style.SETTINGS | {"font.size": 11.5, "axes.labelsize": 11.5}):
        figure, ((axes,),) = style.subplots(1, 1, (5, 3.5))
        for share, (label, colour, place) in LOOKS.items():
            curve = [row for row in rows if row["replay_share"] == share]
            ages = [int(row["age"]) for row in curve]
            low, mean, high = (
                [float(row[key]) for row in curve] for key in ("lowest", "extra_loss", "highest")
            )
            axes.fill_between(ages, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(ages, mean, "o-", color=colour, linewidth=2, markersize=5)
            axes.text(*place, label, color=colour, weight="bold", va="center")
        axes.axvline(0, color="0.4", linestyle=":")
        axes.text(-0.2, 0.42, "older text", ha="right", color="0.3")
        axes.text(0.2, 0.42, "newer text", ha="left", color="0.3")
        axes.set(
            xticks=range(-4, 5, 2),
            ylim=(-0.2, 0.48),
            xlabel="periods from the last training to the text",
        )
        axes.set(ylabel="extra loss (nats a token)")
        title = "Models age; replay helps on older text"
        figure.suptitle(title, fontsize=12.5, weight="bold")
        style.save(figure, Path(__file__).with_suffix(".svg"), formats=("svg",))


if __name__ == "__main__":
    main()
