"""What a run shows while it runs: one bar over all its stages on a terminal, else a line for each phase."""

import json
import re
import sys
import time

from tqdm import tqdm

from slurm.engine.children import terminal_is_lent

tqdm.monitor_interval = 0  # no helper thread: a process with threads should not run code after a fork

_LINE_SECONDS = 60  # between lines about one training
_TRAINING = re.compile(r".* \| train_inner \| (\{.*\})$")
_PHASES = {
    " | fairseq_cli.train | model: ": "loading data",
    " | fairseq.trainer | begin training epoch ": "training",
    ' | fairseq_cli.train | begin validation on "': "validating",
    " | fairseq.trainer | Saving checkpoint to ": "saving",
}
"""What fairseq's log says when a phase begins."""


def say(message: str) -> None:
    """A line on the terminal."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Progress of a run over all its trainings. Use as a context manager; `read` takes fairseq's log."""

    def __init__(self, trainings: int, updates: int | None) -> None:
        """`updates`: of each training; None: not known."""
        self.updates = updates
        self.trainings, self.complete, self.skipped = trainings, 0, 0
        self.title, self.resumed = "", False
        self.said: set[str] = set()
        self.began = self.stage_began = self.spoke = time.monotonic()
        total = updates and updates * trainings
        off = terminal_is_lent() or None  # None: where there is no terminal
        # smoothing=0: the average over all, start-ups and evaluations included, tells when all will be done
        self.bar = tqdm(total=total, unit="update", dynamic_ncols=True, smoothing=0, disable=off)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def start(self, title: str, phase: str = "starting fairseq", resumed: bool = False) -> None:
        """A training, or what else has that title, begins."""
        self.title, self.resumed = title, resumed
        self.said = set()
        self.phase(phase)

    def phase(self, name: str) -> None:
        """What is being done now; without a terminal each phase is told once."""
        if not self.bar.disable:
            self.bar.set_description_str(f"{self.title}: {name}")
        elif name not in self.said:
            self._say(f"{self.title}: {name}")
        self.said.add(name)

    def read(self, line: str) -> None:
        """Take one line of fairseq's log; those that tell of no phase and no update are passed over."""
        if phase := next((phase for mark, phase in _PHASES.items() if mark in line), None):
            self.phase(phase)
        found = _TRAINING.match(line)
        try:
            stats = json.loads(found[1]) if found else {}
            updates = int(stats["num_updates"])
        except (ValueError, KeyError):  # no such line, or lines of several processes run together
            return
        self.phase("training")
        shown = ", ".join(f"{name} {stats[name]}" for name in ("loss", "ppl", "wps") if name in stats)
        if self.bar.disable:
            if time.monotonic() - self.spoke > _LINE_SECONDS:
                self._say(f"{self.title}: {updates} of {self.updates or '?'} updates, {shown}")
            return
        before = self.complete * (self.updates or 0)
        if self.resumed:  # those up to here took no time now
            self.bar.initial += updates
            self.resumed = False
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(before + updates - self.bar.n)

    def trained(self, now: bool = True) -> None:
        """One more training is complete; it was before, if not `now`."""
        self.complete += 1
        self.skipped += not now
        if self.bar.disable or not self.updates:
            return
        if not now:
            self.bar.initial += self.updates
        self.bar.update(self.complete * self.updates - self.bar.n)

    def done(self, message: str) -> None:
        """A stage is complete, whose trainings have been counted."""
        now = time.monotonic()
        seconds, self.stage_began = now - self.stage_began, now
        left = ""
        if self.complete < self.trainings and self.bar.disable:
            each = (now - self.began) / max(1, self.complete - self.skipped)
            left = f"; about {tqdm.format_interval(each * (self.trainings - self.complete))} left"
        self._say(f"{self.title}: done in {seconds:.0f} s, {message}{left}")

    def _say(self, message: str) -> None:
        self.spoke = time.monotonic()
        say(message)
