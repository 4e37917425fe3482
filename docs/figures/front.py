"""Draw docs/figures/front.svg: error against compute on MNIST in 500 mega-batches, three seeds.

python docs/figures/front.py
"""

from pathlib import Path

import matplotlib

from alma.report import style

B = 500
# (TFLOPs, CER); docs/results/average.md, "MNIST: averages of weights", raw weights, and the column
# Comp of docs/results/wait.md: all learners that no other of these beats in both error and compute
PAPER = [
    (0.07, 69.4),  # gens, 4 units, w = 10
    (0.14, 56.6),  # gens, 8 units, w = 10
    (0.35, 46.0),  # umix, 4 units, w = 10
    (0.59, 37.8),  # sm, 32 units, w = 10
    (1.24, 32.6),  # sm, 64 units, w = 10
    (2.93, 29.4),  # ens, 32 units, w = 1
    (6.19, 25.9),  # ens, 64 units, w = 1
]
# (TFLOPs, CER) by hidden units; docs/anytime.md, "Images"; 128: docs/results/average.md, "Epochs
# and width"
PRESET = {
    4: (0.007, 97.1),
    8: (0.014, 46.5),
    32: (0.059, 23.5),
    64: (0.12, 19.0),
    128: (0.27, 16.5),
    256: (0.65, 15.0),
    512: (1.73, 14.1),
}
COLOURS = ("#B03A2E", "#2E6DA4")


def main() -> None:
    """Draw and write the picture."""
    with matplotlib.rc_context(style.SETTINGS | {"font.size": 11.5, "axes.labelsize": 11.5}):
        figure, ((axes,),) = style.subplots(1, 1, (5, 3.5))
        for points, colour in zip((PAPER, list(PRESET.values())), COLOURS, strict=True):
            errors = [100 * cer / B for _, cer in points]
            axes.plot(
                [flops for flops, _ in points],
                errors,
                "o-",
                color=colour,
                linewidth=2,
                markersize=6,
            )
        axes.text(0.09, 15, "the paper's learners", color=COLOURS[0], weight="bold")
        axes.text(0.0058, 2.1, "averages and replay", color=COLOURS[1], weight="bold")
        for units, (flops, cer) in PRESET.items():
            below = units != 4
            label = f"{units}" if below else "4 hidden units"
            place = {"xytext": (-5, -6) if below else (8, 0), "ha": "right" if below else "left"}
            axes.annotate(
                label,
                (flops, 100 * cer / B),
                textcoords="offset points",
                va="top" if below else "center",
                color=COLOURS[1],
                **place,
            )
        axes.set(xscale="log", yscale="log", ylim=(1.9, 22), xlim=(0.005, 10))
        axes.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
        axes.set_yticks([2, 5, 10, 20], ["2%", "5%", "10%", "20%"])
        axes.minorticks_off()
        axes.set(xlabel="training compute (TFLOPs)", ylabel="mean test error")
        figure.suptitle(
            "Averages and replay: less error, less compute", fontsize=12.5, weight="bold"
        )
        style.save(figure, Path(__file__).with_suffix(".svg"), formats=("svg",))


if __name__ == "__main__":
    main()
