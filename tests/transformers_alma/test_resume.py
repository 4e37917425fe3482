"""A training that is killed again and again ends with the weights of one that is not."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from alma.errors import command
from alma.files import sha256_file
from alma.stream import dtype_code, write_index
from alma.trainer import StageTask, TextPart
from tests.conftest import Child

END = 0
UPDATES = 9
FLAGS = (
    "--block_size 16 --per_device_train_batch_size 4 --learning_rate 1e-2 --use_cpu "
    "--save_steps 3 --average poly:8 --dataloader_num_workers 2"
).split()
LARGEST_FILE = 60_000  # below the state of the optimizer, above the other files
OF_FILES = 40_000
"""More than the bytes of a checkpoint that are no weight."""
SETTINGS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "attention_dropout": 0.2,
    "eos_token_id": END,
}


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        # Forks would share the lock of the bars, which a killed one may hold.
        transformers.utils.logging.disable_progress_bar()
        yield transformers
        transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def model(transformers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = transformers.Qwen2Config(**SETTINGS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> list[TextPart]:
    """Two mega-batches of random ids, of one document each."""
    folder = tmp_path_factory.mktemp("stream")
    rng = np.random.default_rng(1)
    parts = []
    for name in ("megabatch_00", "megabatch_01"):
        files = (str(folder / f"{name}.bin"), str(folder / f"{name}.idx"))
        ids = rng.integers(4, SETTINGS["vocab_size"], 400).astype(np.uint16)
        ids.tofile(files[0])
        write_index(files[1], np.array([len(ids)]), dtype_code(SETTINGS["vocab_size"]))
        part = TextPart(
            name=name, period="", words=0, bytes=0, tokens=len(ids), files=files, end_token=END
        )
        parts.append(part)
    return parts


@pytest.fixture(scope="module")
def start(model, parts, tmp_path_factory):
    """`start(folder, hook)`: the exit code and output of a start of the training, in a fork.

    hook: called first in the fork; it may replace functions.
    """
    from transformers_alma import preloaded, training  # noqa: F401 - imported before the forks
    from transformers_alma.arguments import parse

    arguments = parse([*FLAGS, "--init", str(model)])
    logs = tmp_path_factory.mktemp("logs")

    def run(folder: Path, hook: Callable[[], object] | None = None) -> tuple[int, str]:
        task = StageTask(
            action="train",
            out=str(folder),
            stream="",
            dictionary=SETTINGS["vocab_size"],
            learner="sm",
            stage=1,
            t=2,
            megabatches=2,
            waiting_time=1,
            train=(parts[1],),
            earlier=(parts[0],),
            replay_share=0.5,
            valid=(parts[0],),
            seeds=(1,),
            budget={"updates": UPDATES},
        )

        @command
        def train() -> None:
            if hook:
                hook()
            training.train(task, arguments)

        folder.mkdir(exist_ok=True)
        done = Child(logs / str(len(list(logs.iterdir()))), train).wait()
        return done.code, done.output

    return run


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole")
    code, output = start(folder)
    assert code == 0, output
    return weights(folder)


def weights(folder: Path) -> dict[str, str]:
    """The checksums of the deployed weights, the average, and of those before it."""
    files = folder.rglob("*.safetensors")
    return {str(file.relative_to(folder)): sha256_file(file) for file in files}


def kill_before(owner: object, name: str, call: int, number: int = signal.SIGKILL) -> None:
    """Let a function send this process a signal in its call 1, 2, ... before it does its work."""
    function = getattr(owner, name)
    calls: list[None] = []

    def replaced(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(owner, name, replaced)


def kill_while_removing() -> None:
    """Kill this process when half of an older checkpoint is removed."""

    def remove_half(folder: Path, **_: object) -> None:
        (folder / "optimizer.pt").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = remove_half


def kills() -> Sequence[tuple[Callable[[], None], int]]:
    """What happens to one start after another, and its exit code."""
    from transformers_alma import training

    trainer = training.ResumedTrainer
    killed = -signal.SIGKILL
    return [
        (partial(kill_before, trainer, "training_step", 3), killed),
        (partial(kill_before, trainer, "_save_optimizer_and_scheduler", 1), killed),
        (partial(kill_before, training, "write_json_atomic", 1), killed),
        (partial(kill_before, trainer, "training_step", 5), killed),
        (partial(kill_before, trainer, "training_step", 2, signal.SIGUSR1), 75),
        (kill_while_removing, killed),
        (partial(kill_before, trainer, "_save_rng_state", 1), killed),
        (partial(kill_before, trainer, "training_step", 1, signal.SIGTERM), 75),
        (partial(kill_before, trainer, "save_model", 2), killed),
        (partial(kill_before, trainer, "save_model", 2), killed),
        (partial(kill_before, Path, "rename", 1), killed),
        (partial(kill_before, StageTask, "finish", 1), killed),
    ]


def test_twelve_kills_change_no_weight(start, undisturbed, tmp_path):
    folder = tmp_path / "killed"
    for number, (hook, expected) in enumerate(kills()):
        code, output = start(folder, hook)
        assert code == expected, (number, output)
    code, output = start(folder)
    assert code == 0, output
    assert weights(folder) == undisturbed
    assert len(undisturbed) == 2
    from transformers_alma.training import MODEL

    assert {path.name for path in folder.iterdir()} == {MODEL, "trained.json"}


def no_large_files() -> None:
    """As on a full disk, the state of the optimizer cannot be written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def test_a_full_disk_is_one_line_and_loses_nothing(start, undisturbed, model, tmp_path):
    from transformers_alma import disk, models, training
    from transformers_alma.arguments import parse

    folder = tmp_path / "full"
    code, output = start(folder, partial(kill_before, training.ResumedTrainer, "training_step", 5))
    assert code == -signal.SIGKILL, output
    code, output = start(folder, no_large_files)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert "Traceback" not in output
    assert len(errors) == 1
    assert f"{folder}/checkpoint-6: cannot be written" in errors[0]
    assert [path.name for path in folder.iterdir()] == ["checkpoint-3"]

    arguments = parse([*FLAGS, "--init", str(model)])
    config = models.config_of(str(model))
    counts = models.parameters_of(config, arguments.engine)
    planned = disk.disk_use(arguments, config, *counts)
    assert planned["checkpoints"] == 2
    assert 0 < bytes_in(folder / "checkpoint-3") - planned["checkpoint_bytes"] < OF_FILES

    code, output = start(folder)
    assert code == 0, output
    assert weights(folder) == undisturbed
    assert 0 < bytes_in(folder / training.MODEL) - planned["model_bytes"] < OF_FILES


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget_average() -> None:
    from transformers_alma.weight_average import MovingAverage

    begin = MovingAverage.__init__
    MovingAverage.__init__ = lambda self, model, average, _: begin(self, model, average, None)


def forget_rng() -> None:
    from transformers_alma.training import ResumedTrainer

    ResumedTrainer._load_rng_state = lambda *_: None


def repeat_blocks() -> None:
    import transformers.trainer

    transformers.trainer.skip_first_batches = lambda loader, _: loader


def use_any_checkpoint() -> None:
    """A half-written checkpoint counts as whole, too."""
    from transformers_alma import training

    training._WHOLE = "config.json"
    training.parse_json = lambda _: {"seconds": 1}
    training.require = lambda *_: None


@pytest.mark.parametrize("bug", [forget_average, forget_rng, repeat_blocks, use_any_checkpoint])
def test_bugs_would_change_weights(bug, start, undisturbed, tmp_path):
    """What the test above is worth."""
    from transformers_alma.training import ResumedTrainer

    moment = "training_step"
    call = 5
    if bug is use_any_checkpoint:
        moment = "_save_optimizer_and_scheduler"
        call = 2
    code, output = start(tmp_path / "killed", partial(kill_before, ResumedTrainer, moment, call))
    assert code == -signal.SIGKILL, output
    code, output = start(tmp_path / "killed", bug)
    assert code or weights(tmp_path / "killed") != undisturbed, output
