"""docs/time.md: its commands, from a git repository to advice, on a small made-up history."""

import os
import random
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALLER = {
    "--words 300k": "--words 2k",
    "--eval-words 8k": "--eval-words 300",
    "--valid-words 4k": "--valid-words 200",
    "--vocab-size 1000": "--vocab-size 300",
    "--seeds 0-2": "--seeds 0",
    "replay-share=0,.5": "replay-share=0,.5 max-update=4 warmup-updates=1",
}
"""What makes the page's commands run in seconds."""


def _words(rng: random.Random, number: int) -> list[str]:
    return ["".join(rng.choices("abcdefghiklmnoprstu", k=5)) for _ in range(number)]


def make_history(folder: Path) -> None:
    """A repository of 6 years, 60 commits a year; each year has words of its own."""
    rng = random.Random(1)
    common = _words(rng, 200)
    lines = []
    for year in range(2004, 2010):
        words = common + _words(rng, 50)
        for number in range(60):
            message = " ".join(rng.choices(words, k=40))
            seconds = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) + number * 86_400 * 6
            who = f"A <a@b> {seconds} +0000"
            lines.append(f"commit refs/heads/main\nauthor {who}\ncommitter {who}\n")
            lines.append(f"data {len(message)}\n{message}\n")
    git = ["git", "-C", str(folder)]
    folder.mkdir()
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input="".join(lines).encode(), check=True)


@pytest.mark.thorough
def test_from_commits_to_advice(tmp_path):
    page = (ROOT / "docs/time.md").read_text("utf-8").split("\n## ")[1]
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for words, fewer in SMALLER.items():
        assert words in commands
        commands = commands.replace(words, fewer)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    output = {}
    for line in commands.replace("\\\n", " ").splitlines():
        if line.startswith("git clone"):
            make_history(tmp_path / "git")
            continue
        words = [word.replace("~", str(tmp_path)) for word in shlex.split(line)]
        words = [str(ROOT / word) if word.startswith("experiments/") else word for word in words]
        start = [sys.executable, "-m", *words]
        done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        output[words[1]] = done.stdout
    assert "megabatch_02  2008-2009" in output["data"]
    assert "Loss against age" in output["report"]
    assert (tmp_path / "report/perplexity_B3_staleness.png").exists()
    assert "How often to retrain?" in output["advise"]
    assert "replay?" in output["advise"]
