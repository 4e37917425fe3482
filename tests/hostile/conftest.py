"""What hostile files are made from, and the way commands run on them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.broken_input import judge
from tests.fairseq_alma.shared import config_of

DENSE = (
    "--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 1 --tokens-per-sample 32 --max-tokens 256 --cpu --dropout 0"
)
COMMANDS = ["fairseq-train", "fairseq-eval-lm", "evaluate", "export", "train", "status", "report"]
COMMANDS += ["advise", "images", "data"]
COUNTS = ("train_tokens", "valid_tokens", "growth_tokens", "seconds", "peak_memory")


class Place:
    """A folder with sound inputs, a victim that no command may change,
    and a marker that none may make."""

    def __init__(self, folder: Path, stream: Path, checkpoint: Path) -> None:
        self.folder = folder
        self.stream = stream
        self.checkpoint = checkpoint
        self.victim = folder / "precious" / "victim.txt"
        self.victim.parent.mkdir()
        self.victim.write_text("untouched\n")
        self.marker = folder / "EXECUTED"
        self.work = folder / "work"
        self.work.mkdir()

    @property
    def code(self) -> str:
        """A Python expression that makes the marker."""
        return f"__import__('os').system('touch {self.marker}')"

    def own_code(self) -> Path:
        """A folder for --user-dir whose import makes the marker."""
        module = self.folder / "planted"
        module.mkdir(exist_ok=True)
        (module / "__init__.py").write_text(f"open({str(self.marker)!r}, 'w')\n")
        return module

    def tampered(self, name: str, change: Callable[[dict], object]) -> Path:
        """A copy of the checkpoint after `change(state)`."""
        state = torch.load(self.checkpoint, weights_only=True)
        change(state)
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        return path

    def run(self, *words: object) -> judge.Ended:
        """Run a command line in a forked child, in the folder `work`."""
        texts = list(map(str, words))
        return judge.run(lambda: judge.main_of(texts)(), self.work, self.folder / "log")

    def check(self, ended: judge.Ended) -> None:
        """Nothing ran or changed, and no control character reached the terminal."""
        assert not self.marker.exists(), ended
        assert self.victim.read_text() == "untouched\n", ended
        assert [path.name for path in self.victim.parent.iterdir()] == [self.victim.name]
        assert "Traceback" not in ended.out + ended.err, ended
        assert "\x1b" not in ended.out + ended.err, ended

    def refused(self, *words: object) -> str:
        """The one line with which a command ends, after `check`."""
        ended = self.run(*words)
        self.check(ended)
        assert ended.code == 2, ended
        lines = [
            line for line in (ended.out + ended.err).splitlines() if line.startswith("error: ")
        ]
        assert len(lines) == 1, ended
        return lines[0]


@pytest.fixture(scope="session")
def dense(stream, imported, tmp_path_factory) -> Path:
    """A checkpoint of an untrained transformer_lm with all the settings that a training saves."""
    from fairseq import tasks

    judge.preload(COMMANDS)
    cfg = config_of(stream, *DENSE.split())
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    history = {
        "criterion_name": "",
        "optimizer_name": "",
        "lr_scheduler_state": {},
        "num_updates": 1,
    }
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1}, "AlmaLMTask": dict.fromkeys(COUNTS, 1)},
        "last_optimizer_state": {"state": {}},
    }
    path = tmp_path_factory.mktemp("dense") / "checkpoint_best.pt"
    torch.save(state, path)
    return path


@pytest.fixture
def place(tmp_path, stream, dense):
    """A `Place`."""
    own_place = Place(tmp_path, stream, dense)
    yield own_place
    for path in own_place.work.rglob("*"):
        if path.is_fifo():
            os.unlink(path)
    shutil.rmtree(own_place.work)
