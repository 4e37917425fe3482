"""The paper's figures of image runs: 1 (right), 2, 3, 4, 7, 8, 9; those of the first draft.

`python -m alma.report --figures vision` draws them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alma.records import Run
from alma.report import compare, front, style
from alma.report.results import Result
from alma.report.style import Picture
from alma.report.vision import costs, over_time, select
from alma.report.vision.select import Missing


def write_paper_figures(
    runs: Sequence[Run], out: Path, names: Sequence[str] = ()
) -> tuple[list[Picture], list[str]]:
    """Write every figure that the runs support to `out`, or those of `names`, for each data set and
    B.

    Returns the pictures, and a line for each run that is left out and each figure that cannot be
    drawn.
    """
    done, remarks = select.finished(runs)
    pictures: list[Picture] = []
    with style.drawing():
        for stem, results in select.data_sets(done).items():
            remarks += compare.lacking(results)
            for name in names or FIGURES:
                make, caption = FIGURES[name]
                if name == "front":
                    caption = front.caption(results)
                try:
                    for suffix, figure in make(results).items():
                        pictures.append(Picture(out / f"{stem}_{name}{suffix}.png", caption))
                        style.save(figure, pictures[-1].path)
                except Missing as reason:
                    remarks.append(f"{stem} {name}: {reason}")
    return pictures, remarks


_CER = (
    "CER is eq. 1, so at most B, and includes the untrained errors of a learner that waits. The "
    "paper's axes (to 3,500 at B = 100, to 1,200 at B = 500) have another scale, which the paper "
    "does not define."
)
_DOTTED = (
    "The dotted line is the error of the untrained model: on linear axes, the area below both is "
    "the CER."
)
FIGURES: dict[str, tuple[Callable[[Sequence[Result]], dict[str, Any]], str]] = {
    "front": (costs.front, front.CAPTION),
    "learning_curves": (
        over_time.learning_curves,
        f"Figure 1 right: test error over the stream, by waiting time. {_DOTTED}",
    ),
    "trade_offs": (
        costs.against_costs,
        "Figures 2 and 7 (top): CER against cost, without replay. Lines join the sizes of a "
        f"learner at one waiting time. {_CER}",
    ),
    "over_time": (
        over_time.small_and_large,
        f"Figure 7 (bottom): error over time of small (top) and large models. {_DOTTED}",
    ),
    "two_learners": (
        over_time.two_learners,
        "Figure 3: error over time of small (left) and large models, sm and ens. A bar above, "
        "one for each learner, shows where a longer waiting time than the shortest has the "
        f"lowest error, in the colour of that waiting time. {_DOTTED}",
    ),
    "replay": (
        costs.replay_at_one_wait,
        f"Figure 4: CER and compute, from without to with replay. {_CER}",
    ),
    "replay_waits": (
        costs.replay_at_all_waits,
        f"Figure 8: CER and compute, from without to with replay. {_CER}",
    ),
    "replay_over_time": (
        over_time.replay_over_time,
        f"Figure 9: error over time without and with replay. {_DOTTED} Replay trains on (B / w + "
        "1) / 2 times as many examples if w divides B: at B = 100, 5.5 times for w = 10 and 50.5 "
        "times for w = 1. The paper's 4.5x and 122.5x (appendix E) are wrong.",
    ),
    "update_rates": (
        over_time.update_rates,
        "First draft, Figure 1: intermediate update rates, without growth (blue) and with (red), "
        "against an update at every mega-batch (brown) and a large model trained at the end "
        "(purple). The caption calls the blue curve intermediate, section 1 the brown one.",
    ),
    "radar": (
        costs.radars,
        "First draft, Figures 3, 4, 6 and 7: smaller is better. The centre is 0; on a "
        "logarithmic axis the smallest value is at a tenth of the radius. Test FLOPs are for one "
        "example at each t.",
    ),
    "ablation": (
        over_time.growth_ablation,
        "First draft, Figure 5 left: tree gates and flat gates; if there are such runs, also "
        "mixtures without growth (moe) and an ensemble of mixtures, each trained on the data of "
        "one stage (gens).",
    ),
}
"""The paper's figures by name. Each has a function from results to a dict of figures by file-name
suffix, which raises Missing if they cannot be drawn, and a caption, with the paper's errata."""
