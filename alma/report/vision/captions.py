"""Captions of `vision.figures.FIGURES` by name, with the paper's errata."""

_CER = (
    "CER is eq. 1, so at most B, and includes the untrained errors of a learner that waits. The paper's axes "
    "(to 3,500 at B = 100, to 1,200 at B = 500) have another scale, which the paper does not define."
)

CAPTIONS = {
    "learning_curves": "Figure 1 right: test error over the stream, by waiting time.",
    "trade_offs": (
        "Figures 2 and 7 (top): CER against cost, without replay. Lines join the sizes of a learner at one "
        f"waiting time. {_CER}"
    ),
    "over_time": "Figures 3 and 7 (bottom): error over time of small and of large models.",
    "replay": f"Figure 4: CER and compute, from without to with replay. {_CER}",
    "replay_waits": f"Figure 8: CER and compute, from without to with replay. {_CER}",
    "replay_over_time": (
        "Figure 9: error over time without and with replay. Replay trains on (B / w + 1) / 2 times as many "
        "examples if w divides B: at B = 100, 5.5 times for w = 10 and 50.5 times for w = 1. The paper's "
        "4.5x and 122.5x (appendix E) are wrong."
    ),
    "radar": (
        "First draft, Figures 3, 4, 6 and 7: smaller is better. The centre is 0; on a logarithmic axis the "
        "smallest value is at a tenth of the radius. Test FLOPs are for one example at each t."
    ),
    "ablation": (
        "First draft, Figure 5 left: tree gates and flat gates; if there are such runs, also mixtures "
        "without growth (moe) and an ensemble of mixtures, each trained on the data of one stage (gens)."
    ),
}
