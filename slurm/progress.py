"""What a stage shows while it runs: a bar on a terminal, else a line at its start and one at its end."""

import json
import re
import sys
import time

from tqdm import tqdm

from slurm.child import terminal_is_lent

tqdm.monitor_interval = 0  # no helper thread: a process with threads should not run code after a fork

_TRAINING = re.compile(r".* \| train_inner \| (\{.*\})$")


def say(message: str) -> None:
    """A line on the terminal."""
    print(message, file=sys.stderr, flush=True)


class Progress:
    """Progress of one stage. Use as a context manager; `read` takes the lines of fairseq's log."""

    def __init__(self, title: str, max_update: int | None) -> None:
        self.title = title
        self.started = time.monotonic()
        off = terminal_is_lent() or None  # None: where there is no terminal
        self.bar = tqdm(total=max_update, desc=title, unit="update", dynamic_ncols=True, disable=off)
        self.seen = False
        if self.bar.disable:
            say(f"{title}: training")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def read(self, line: str) -> None:
        """Take one line of the log; those that tell of no update are passed over."""
        found = _TRAINING.match(line)
        if not found or self.bar.disable:
            return
        try:
            stats = json.loads(found[1])
            updates = int(stats["num_updates"])
        except (ValueError, KeyError):  # lines of several processes run together
            return
        if not self.seen:  # the ETA counts neither the start-up nor the updates before a resume
            self.bar.reset()
            self.bar.initial = self.bar.n = self.bar.last_print_n = updates
            self.seen = True
        shown = ", ".join(f"{name} {stats[name]}" for name in ("loss", "ppl", "wps") if name in stats)
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(updates - self.bar.n)

    def note(self, message: str) -> None:
        """Show a word beside the bar."""
        self.bar.set_postfix_str(message)

    def done(self, message: str) -> None:
        """The stage is complete."""
        self.note(message)
        if self.bar.disable:
            say(f"{self.title}: done in {time.monotonic() - self.started:.0f} s, {message}")
