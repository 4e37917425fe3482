"""Real text, a small stream of it, and fairseq's commands run in forked children (no second
import)."""

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import HealthCheck, settings

from tests.child import run_and_exit

# Beside other work an example may take long.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# nohup, a background shell and some CI ignore these signals.
# Children inherit that, and tests send them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # a child has the default again, and pytest goes on

# Forked children must not inherit a pool of OpenMP threads, so this process has none. The programs
# that tests start get the number of threads of the command line (`OMP_NUM_THREADS=2 make test`).
with pytest.MonkeyPatch.context() as one_thread:
    one_thread.setenv("OMP_NUM_THREADS", "1")
    import torch  # noqa: F401  reads it here

ROOT = Path(__file__).parent.parent

# Minutes each. They come first: a long file that comes last runs alone while the other processes
# are idle.
_LONGEST = [
    "slurm/test_slurm.py",  # waits more than it computes
    "pages/test_run_text.py",
    "pages/test_run_images.py",
    "pages/test_run_others.py",
    "fairseq_alma/test_interrupt.py",
    "slurm/test_slurm_lm.py",
    "test_learners.py",
    "fairseq_alma/test_train.py",
    "fairseq_alma/test_switch_lm.py",
    "fairseq_alma/test_growth.py",
    "fairseq_alma/test_export.py",
    "test_chain.py",
    "slurm/test_sweep.py",
    "fairseq_alma/test_weight_average.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest files to the front."""
    ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@dataclass
class Finished:
    """How a child ended (minus the signal's number, if one did) and what it printed."""

    code: int
    output: str

    @property
    def error(self) -> str:
        """The only line of the error, without its prefix;
        the child must have ended with exit code 2."""
        assert self.code == 2, self.output
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.output
        assert "Traceback" not in self.output
        return lines[0].removeprefix("error: ")


class Child:
    """`function(*arguments)` in a forked process; its output goes to a file."""

    def __init__(self, log: Path, function, *arguments, environment: dict[str, str] | None = None):
        self.log = log
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environment or {})
            run_and_exit(partial(function, *arguments), log)

    def wait(self) -> Finished:
        """Wait for the end."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Finished(code, self.log.read_text())

    def kill_when(self, condition, seconds: float = 120) -> Finished:
        """SIGKILL it as soon as `condition()` holds; fails if it ends, or nothing happens,
        before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                raise AssertionError(f"ended before it could be killed:\n{self.log.read_text()}")
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


_COMMANDS = {
    name: (f"fairseq_cli.{name.replace('-', '_')}", "cli_main")
    for name in ("train", "eval-lm", "interactive", "generate")
}
_COMMANDS["export"] = ("alma.export", "main")
"""Module and function of commands that are not named after a module of the plug-in."""


def _fairseq(command: str, arguments: Sequence[str], file_bytes: int | None = None) -> None:
    """Run a fairseq command as its script would; no file can be written longer than
    `file_bytes`."""
    import logging

    if file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    logging.basicConfig(level="INFO", stream=sys.stdout, force=True)
    sys.argv = [f"fairseq-{command}", *map(str, arguments)]
    module, name = _COMMANDS.get(command, (f"fairseq_alma.{command}", "main"))
    main = getattr(importlib.import_module(module), name)
    from fairseq.logging import progress_bar

    try:
        main()
    finally:
        progress_bar._close_writers()  # as at exit, which a forked child skips


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by name; an installed package is called `benchmarks` too."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def child() -> type[Child]:
    """`child(log, function, *arguments)` runs a function in a forked process."""
    return Child


@pytest.fixture(scope="session")
def imported():
    """fairseq's commands, imported before forks and frozen:
    a collection in a fork would copy their pages."""
    import fairseq_cli.eval_lm
    import fairseq_cli.generate
    import fairseq_cli.interactive
    import fairseq_cli.train  # noqa: F401
    import torch._dynamo  # noqa: F401  as every optimizer does: seconds

    import fairseq_alma.stage_record  # noqa: F401
    from tests import composed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairseq.dataclass.utils.compose", composed.compose)
        composed.compose_usual()
        gc.collect()
        gc.freeze()
        yield


@pytest.fixture
def start(imported, tmp_path):
    """Start a command of fairseq, or our `evaluate` or `export`; returns the Child."""
    count = 0

    def run(
        command: str,
        *arguments,
        environment: dict[str, str] | None = None,
        file_bytes: int | None = None,
    ) -> Child:
        nonlocal count
        count += 1
        log = tmp_path / f"{command}_{count}.log"
        return Child(log, _fairseq, command, arguments, file_bytes, environment=environment)

    return run


@pytest.fixture
def forked(monkeypatch, start):
    """`forked.launch(*words)` is `alma train` in this process with forked children:
    one import of fairseq.

    `forked.kill = (folder, update)` kills the training in a folder when it has saved that update,
    and raises `forked.Killed` in place of the launcher's own death.
    """
    from fairseq_alma.check import resolve
    from slurm.engine import children
    from slurm.lm import request
    from slurm.lm.checks import megabatch_sizes
    from slurm.lm.local import launch_here
    from slurm.lm.plan import make_plan

    class Forked:
        class Killed(Exception):
            pass

        kill: tuple[str, int] | None = None

        def launch(self, *words) -> None:
            (request_of_run,) = request.resolved(request.read_requests(list(map(str, words))))
            sizes = megabatch_sizes(request_of_run)
            launch_here([make_plan(replace(request_of_run, sizes=sizes), len(sizes))], jobs=1)

        def run(self, command, log, what, watch=None, environment=None):
            child = start(
                "train" if command[2] == "fairseq_cli.train" else "evaluate", *command[3:]
            )
            if self.kill and str(log.parent).endswith(self.kill[0]) and log.name == "train.log":
                pattern = f"checkpoint_*_{self.kill[1]}.pt"
                self.kill = None
                child.kill_when(lambda: any(log.parent.glob(pattern)))
                raise self.Killed
            finished = child.wait()
            assert finished.code == 0, finished.output

    forks = Forked()
    monkeypatch.setattr(children, "run", forks.run)
    monkeypatch.setattr(
        request, "resolve", lambda lines: [resolve(list(line))["settings"] for line in lines]
    )
    return forks


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Real English text in two files: the help topics that come with Python,
    as blank-line documents."""
    directory = tmp_path_factory.mktemp("text")
    documents = []
    for _, topic in sorted(topics.items()):
        blocks = [" ".join(block.split()) for block in topic.split("\n\n") if block.strip()]
        documents.append("\n".join(blocks))
    for name, part in (("help", documents[::2]), ("reference", documents[1::2])):
        (directory / f"{name}.txt").write_text("\n\n".join(part) + "\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def gpt2_files(text, tmp_path_factory) -> tuple[Path, Path]:
    """encoder.json and vocab.bpe of 1,000 units, in GPT-2's form, trained on the text."""
    tokenizers = pytest.importorskip("tokenizers")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = bytes_
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=bytes_.alphabet(), show_progress=False
    )
    engine.train_from_iterator(
        (file.read_text("utf-8") for file in sorted(text.iterdir())), trainer
    )
    model = json.loads(engine.to_str())["model"]
    folder = tmp_path_factory.mktemp("gpt2")
    files = folder / "encoder.json", folder / "vocab.bpe"
    files[0].write_text(json.dumps(model["vocab"]), "utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    files[1].write_text(f"#version: 0.2\n{merges}", "utf-8")
    return files


@pytest.fixture(scope="session")
def stream(text, tmp_path_factory) -> Path:
    """A stream of three mega-batches of 8,000 words, 1,000 units."""
    return _make_stream(text, tmp_path_factory.mktemp("stream") / "stream", "--vocab-size", "1000")


@pytest.fixture(scope="session")
def gpt2_stream(text, gpt2_files, tmp_path_factory) -> Path:
    """The same text in 1,000 units of GPT-2's kind."""
    flags = (
        "--bpe",
        "gpt2",
        "--gpt2-encoder-json",
        gpt2_files[0],
        "--gpt2-vocab-bpe",
        gpt2_files[1],
    )
    return _make_stream(text, tmp_path_factory.mktemp("gpt2_stream") / "stream", *flags)


@pytest.fixture(scope="session")
def monthly_stream(text, tmp_path_factory) -> Path:
    """An ordered stream of six mega-batches with periods."""
    import dataclasses

    from alma.stream import Stream
    from data_prep.__main__ import main as data_prep

    out = tmp_path_factory.mktemp("whole") / "stream"
    lines = (text / "help.txt").read_text().split("\n\n")
    sources = []
    for number in range(6):
        source = out.with_name(f"s{number}.txt")
        source.write_text("\n\n".join(lines[number::6]) + "\n")
        sources.append(f"s{number}={source}")
    sizes = "--words 900 --eval-words 300 --valid-words 200 --vocab-size 300"
    words = [*sources, "--ordered", "--out", str(out), *sizes.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["data", *words, "--max-document-words", "40"])
        data_prep()
    stream = Stream.load(out)
    dated = {}
    for name in ("megabatches", "held_out", "held_out_valid"):
        parts = enumerate(getattr(stream, name), start=1)
        dated[name] = tuple(dataclasses.replace(part, period=f"2024-{t:02d}") for t, part in parts)
    dataclasses.replace(stream, **dated).write()
    return out


def _make_stream(text: Path, out: Path, *tokenizer: str | Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "data_prep",
        f"help={text}/help.txt",
        f"reference={text}/reference.txt",
    ]
    settings = (
        "--mega-batches 3 --words 8000 --eval-words 4000 --valid-words 2000 --seed 1 --workers 1"
    )
    subprocess.run([*command, "--out", out, *settings.split(), *tokenizer], check=True, cwd=ROOT)
    return out
