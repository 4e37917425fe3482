"""Detectors of drift of river, on the losses of the models in service.

river's defaults are for streams of thousands of examples. Within the 35 losses that a rule sees
here at most (11 of the warm-up, 24 after it), KSWIN fills no window of 100, ADWIN tests once, at
the 32nd value, and Page-Hinkley, which waits for 30 values, needs a sum of 50: a test shows that
none of them fires in 24 periods after a jump by 4 deviations. So each has settings for short
streams here, which its docstring names; with river's defaults its row would be that of "never".
Losses are in deviations of the warm-up's losses from their mean, since river's thresholds are for
values of about that size.
"""

from typing import Any

import numpy as np

from benchmarks.retraining.history import History


def _standard(history: History) -> list[float]:
    """The served losses in deviations from the mean of the warm-up's."""
    losses = np.array(history.served())
    usual = losses[: history.start - history.first]
    deviation = max(float(usual.std(ddof=1)), 1e-12)
    return list(map(float, (losses - usual.mean()) / deviation))


def fires(detector: Any, history: History) -> bool:
    """Whether a detector of river sees a change at the newest loss.

    It is fed anew with all losses, and starts anew after each change by itself, as river has it.
    """
    for value in _standard(history):
        detector.update(value)
    return bool(detector.drift_detected)


def adwin(history: History) -> bool:
    """ADWIN (Bifet and Gavalda, 2007), tested at each loss, parts of a window from 3 losses on.

    river's defaults: a test at each 32nd value, parts from 5 values on. It sees falls, too.
    """
    from river.drift import ADWIN  # optional

    return fires(ADWIN(clock=1, grace_period=5, min_window_length=3), history)


def page_hinkley(history: History) -> bool:
    """The test of Page (1954) and Hinkley (1971), upwards, from 5 losses on, threshold 4.

    river's defaults: both directions, from 30 values on, threshold 50.
    """
    from river.drift import PageHinkley  # optional

    return fires(PageHinkley(min_instances=5, threshold=4, mode="up"), history)


def kswin(history: History) -> bool:
    """KSWIN (Raab, Heusinger and Schleif, 2020): 4 losses beside 4 of the 8 before, level .05.

    river's defaults: 30 values beside 30 of the 70 before, level .005, which no p-value reaches
    with windows of 4: the least one is .029. It sees falls, too.
    """
    from river.drift import KSWIN  # optional

    return fires(KSWIN(alpha=0.05, window_size=12, stat_size=4, seed=0), history)
