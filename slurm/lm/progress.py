"""Progress of a local run: one bar over all its stages on a terminal, else a line for each phase."""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tqdm import tqdm

from slurm.engine import terminal
from slurm.engine.terminal import say

_LINE_SECONDS = 60  # between lines about one training
_PHASES = {
    " | fairseq_cli.train | model: ": "loading data",
    " | fairseq.trainer | begin training epoch ": "training",
    ' | fairseq_cli.train | begin validation on "': "validating",
    " | fairseq.trainer | Saving checkpoint to ": "saving",
}
"""Line of fairseq's log at the beginning of each phase."""


class ProgressBar(AbstractContextManager):
    """Shows the progress over all trainings of a run; `read` takes fairseq's log."""

    def __init__(self, updates: Sequence[int | None]) -> None:
        """`updates`: of each training, in order; None: unknown."""
        self.sizes = updates
        self.complete, self.skipped = 0, 0
        self.title, self.resumed, self.earlier = "", False, 0
        self.said: set[str] = set()
        self.began = self.stage_began = self.spoke = time.monotonic()
        total = None if None in updates else self._before(len(updates))
        off = terminal.attached or None  # None: off without a terminal
        # smoothing=0: the average speed, with start-ups and evaluations, predicts the end of the whole run
        self.bar = tqdm(total=total, unit="update", dynamic_ncols=True, smoothing=0, disable=off)

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def start(self, title: str, phase: str = "starting fairseq", *, resumed: bool = False, earlier=0) -> None:
        """Start a training or an evaluation; `earlier` updates of other trainings are in fairseq's count."""
        self.title, self.resumed, self.earlier, self.said = title, resumed, earlier, set()
        self.phase(phase)

    def phase(self, name: str) -> None:
        """Show the current phase; without a terminal only once."""
        if not self.bar.disable:
            self.bar.set_description_str(f"{self.title}: {name}")
        elif name not in self.said:
            self._say(f"{self.title}: {name}")
        self.said.add(name)

    def read(self, line: str) -> None:
        """Take one line of fairseq's log; lines without a phase or an update are ignored."""
        for phase in (phase for mark, phase in _PHASES.items() if mark in line):
            self.phase(phase)
        try:
            stats = json.loads(line.partition(" | train_inner | ")[2])
            updates = int(stats["num_updates"]) - self.earlier
        except (ValueError, KeyError, TypeError):  # another line, or mixed lines of several processes
            return
        self.phase("training")
        shown = ", ".join(f"{name} {stats[name]}" for name in ("loss", "ppl", "wps") if name in stats)
        if self.bar.disable:
            if time.monotonic() - self.spoke > _LINE_SECONDS:
                self._say(f"{self.title}: {updates} of {self.sizes[self.complete] or '?'} updates, {shown}")
            return
        if self.resumed:  # earlier updates took no time in this process
            self.bar.initial += updates
            self.resumed = False
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(self._before(self.complete) + updates - self.bar.n)

    def trained(self, now: bool = True) -> None:
        """Count a complete training; `now`: it was trained in this process."""
        self.complete += 1
        self.skipped += not now
        if not (self.bar.disable or None in self.sizes):
            self.bar.initial += 0 if now else self.sizes[self.complete - 1] or 0
            self.bar.update(self._before(self.complete) - self.bar.n)

    def done(self, message: str) -> None:
        """Report a complete stage, and the time left."""
        now = time.monotonic()
        seconds, self.stage_began = now - self.stage_began, now
        left = ""
        if self.complete < len(self.sizes) and self.bar.disable:
            each = (now - self.began) / max(1, self.complete - self.skipped)
            left = f"; about {tqdm.format_interval(each * (len(self.sizes) - self.complete))} left"
        self._say(f"{self.title}: done in {seconds:.0f} s, {message}{left}")

    def _before(self, trainings: int) -> int:
        """Updates of the first so many trainings."""
        return sum(size or 0 for size in self.sizes[:trainings])

    def _say(self, message: str) -> None:
        self.spoke = time.monotonic()
        say(message)
