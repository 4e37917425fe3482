"""`slurm.launch --cluster debug` on a pseudo-terminal, over fake children."""

import contextlib
import fcntl
import os
import pty
import select
import termios
import time

from launcher import SMALL, ended, wait_for


class Terminal:
    """A pseudo-terminal with a launcher in its foreground."""

    def __init__(self, launcher, *words: str):
        self.mine, its = pty.openpty()
        flags = ("--", *SMALL, "--max-update", "2")
        self.process = launcher.start_words(
            *("stream", "--learner", "gmoe", "--out", "run", *words, *flags),
            **dict.fromkeys(("stdin", "stdout", "stderr"), its),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(its)
        self.seen = ""

    def read_to(self, text: str) -> None:
        """Read until `text` appears, or to the end."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert select.select([self.mine], [], [], deadline - time.monotonic())[0], self.seen
            self.seen += os.read(self.mine, 4096).decode()

    def type(self, keys: str) -> None:
        os.write(self.mine, keys.encode())

    def end(self) -> int:
        """Read to the end; return the exit code."""
        with contextlib.suppress(OSError):  # Linux's error after the other side is closed
            self.read_to("no such text")
        os.close(self.mine)
        return self.process.wait(timeout=60)


def test_debug_attaches_the_debugger_and_gives_the_rows_of_local(launcher, expected):
    launcher.environment["FAKE_CRASH"] = "1:1:breakpoint"
    terminal = Terminal(launcher, "--cluster", "debug")
    terminal.read_to("(Pdb) ")
    terminal.type("p 'updates:', state['updates'] + 41\n")
    terminal.read_to("('updates:', 42)")
    terminal.type("c\n")
    assert terminal.end() == 0, terminal.seen
    assert launcher.rows == expected
    assert "('updates:', 42)" in (launcher.out / "stage_01/train.log").read_text()
    assert terminal.seen.count("train_inner") == 4 * 2


def test_ctrl_c_ends_debug_at_once_and_local_resumes(launcher, expected):
    launcher.environment["FAKE_SLEEP"] = "120"
    terminal = Terminal(launcher, "--cluster", "debug")
    wait_for(lambda: launcher.pids.exists() and launcher.pids.read_text())
    began = time.monotonic()
    terminal.type("\x03")
    assert terminal.end() == 130
    assert time.monotonic() - began < 30
    assert "interrupted; rerun the same command to resume" in terminal.seen
    wait_for(lambda: ended(int(launcher.pids.read_text())))
    launcher.environment.clear()
    launcher.learner = "gmoe"
    launcher.run()
    assert launcher.rows == expected
