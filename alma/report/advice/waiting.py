"""How long to wait, where all runs wait equally long: they cannot tell; the short run that can."""

from collections.abc import Sequence

from alma.report.advice.candidates import Candidate

WAIT, STAGES = 10, 2
"""Waiting time and stages of the short run; see `python -m benchmarks waiting_rule`."""


def short_run(found: Sequence[Candidate], choice: Candidate) -> list[str]:
    """A line about the run that would tell whether to wait; [] if runs with several waiting times exist, or
    the stream is too short for it."""
    until, end = WAIT * STAGES, choice.result.megabatches
    if any(each.result.waiting_time > 1 for each in found) or until >= end:
        return []
    spent = sum(
        rows[t]["train_flops"] for rows in choice.result.repeats[:1] for t in range(1, choice.now + 1)
    )
    cost = spent / choice.now * until
    return [
        f"Runs at w = 1 cannot tell whether to wait. The cheapest run that would: w = {WAIT} up to {until}"
        f", about {until / end:.0%} of the stream's compute ({cost / 1e12:.2g} TFLOPs)."
    ]
