"""The commands, with the inputs that each reads and the files among them to break."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alma.records import MACHINE_FIELDS
from benchmarks.broken_input.judge import Ended
from benchmarks.broken_input.sound import DIGITS, GPT2, LAUNCH, SIZES, TINY

Result = Callable[[Path, Ended], object]
"""What a command has made, from its folder and its end; the machine's measurements left out."""


@dataclass(frozen=True)
class Scenario:
    """A command line on sound inputs."""

    words: str
    needs: tuple[str, ...]
    """Inputs of `sound.MAKERS`, which are copied to the same names."""
    broken: str
    """Pattern of the files to break."""
    result: Result
    checked: tuple[str, ...] = ()
    """Patterns of files with a check sum: the command must refuse damage, or give the sound result."""
    writes: tuple[str, ...] = ()
    """Patterns of existing files that the command may change."""
    codes: tuple[int, ...] = ()
    """Exit codes besides 0 and 2 that are no failure."""
    several: bool = False
    """Whether an error may follow lines on stdout."""
    content: bool = False
    """Whether an error may be about the whole, such as a corpus with too few words, without naming a file."""
    stdin: str = ""

    @property
    def command(self) -> str:
        """The first word."""
        return self.words.split()[0]


def printed(folder: Path, ended: Ended) -> object:
    """Standard output."""
    return ended.out


def nothing(folder: Path, ended: Ended) -> object:
    """No result to compare."""
    return None


def files(*names: str) -> Result:
    """Hashes of files."""
    return lambda folder, ended: [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def stream(name: str) -> Result:
    """The files of a stream, by their check sums."""

    def found(folder: Path, ended: Ended) -> object:
        record = json.loads((folder / name / "stream.json").read_bytes())
        parts = [*record["megabatches"], record["valid"], record["test"], record]
        return [part["files"] for part in parts]

    return found


def rows(name: str) -> Result:
    """Rows without the machine's fields."""

    def found(folder: Path, ended: Ended) -> object:
        lines = map(json.loads, (folder / name / "results.jsonl").read_bytes().splitlines())
        return [{k: v for k, v in row.items() if k not in (*MACHINE_FIELDS, "extra")} for row in lines]

    return found


def model(name: str) -> Result:
    """The weights of a checkpoint."""

    def found(folder: Path, ended: Ended) -> object:
        import torch

        state = torch.load(folder / name, weights_only=True)["model"]
        return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}

    return found


def measured(folder: Path, ended: Ended) -> object:
    """Perplexity and tokens of an evaluation."""
    record = json.loads((folder / "record.json").read_bytes())
    return record["nll"], record["tokens"]


_MODELS = "models/?/checkpoint_last.pt"
_ONE = "models/a/checkpoint_last.pt"
_PARTS = ("*.bin", "*.idx", "dict.txt")
_TRAIN = f"fairseq-train stream --task alma_lm {TINY} --save-dir"
_EVALUATE = "evaluate {} --gen-subset test --task alma_lm --out record.json --path"
_MNIST = "images --dataset mnist --megabatches 2 --epochs 1 --hidden 4 --out new --data-root"
_CORPUS = "data help=corpus/help.txt notes=corpus/notes.md.gz books=corpus/books.txt.zst web=corpus/web.jsonl"
_DATA = f"--out new --mega-batches 2 --words 1000 {SIZES}"
_GIVEN = "--valid-words 300 --mega-batches 2 --words 1000 --out new --workers 1"
_RUNS = ("runs/sweep", "runs/lm")
_RECORDS = "runs/*/**/*.json*"

SCENARIOS = [
    Scenario(
        f"data text=corpus {_DATA}",
        ("corpus",),
        "corpus/**/*",
        stream("new"),
        ("*.gz", "*.bz2", "*.zst"),
        content=True,
    ),
    Scenario(
        f"data text=corpus --on-bad-input skip {_DATA}", ("corpus",), "corpus/**/*", nothing, content=True
    ),
    Scenario(
        f"{_CORPUS} --order order.yaml --eval-words 100 --out new {SIZES}",
        ("corpus", "order.yaml"),
        "order.yaml",
        nothing,
        content=True,
    ),
    Scenario(
        f"data text=corpus --tokenizer tokenizer.model {_GIVEN}",
        ("corpus", "tokenizer.model"),
        "tokenizer.model",
        nothing,
    ),
    Scenario(
        f"data text=corpus {GPT2} {_GIVEN}",
        ("corpus", "gpt2"),
        "gpt2/*",
        nothing,
    ),
    Scenario(
        "data more=corpus/web.jsonl --out ordered --append --workers 1",
        ("corpus", "ordered"),
        "ordered/**/*",
        stream("ordered"),
        ("*.keys", "dict.txt", "*.bpe", "encoder.json"),
        ("ordered/stream.json", "ordered/.lock"),
        content=True,
    ),
    Scenario("inspect stream --workers 1 --samples 1", ("stream",), "stream/**/*", printed),
    Scenario("inspect ordered --workers 1 --samples 1", ("ordered",), "ordered/**/*", printed),
    Scenario(
        "inspect stream --workers 1 --verify",
        ("stream",),
        "stream/**/*",
        nothing,
        ("*.bin", "*.idx", "*.keys", "dict.txt", "*.model"),
        several=True,
    ),
    Scenario(
        "inspect ordered --workers 1 --verify",
        ("ordered",),
        "ordered/**/*",
        nothing,
        ("*.bin", "*.idx", "*.keys", "dict.txt", "*.json", "*.bpe"),
        several=True,
    ),
    Scenario(
        f"train stream --learner sm --out new --dry-run -- {TINY}", ("stream",), "stream/*.[jt]*", printed
    ),
    Scenario(
        "train experiments/text.yaml --stream stream --out new --dry-run",
        ("stream", "experiments"),
        "experiments/**/*l",
        printed,
        content=True,
    ),
    Scenario(LAUNCH.replace(" --out", " --dry-run --out"), ("stream", "runs/lm"), "runs/lm/*.json*", printed),
    Scenario(
        LAUNCH.replace("runs", "half/runs"),
        ("stream", "half"),
        "half/runs/lm/**/*",
        rows("half/runs/lm"),
        ("*.pt",),
        ("half/runs/lm/**",),
    ),
    Scenario(f"{_MNIST} mnist", ("mnist",), "mnist/MNIST/raw/*", nothing),
    Scenario(f"{_MNIST} mnist_gz", ("mnist_gz",), "mnist_gz/MNIST/raw/*", rows("new"), ("*.gz",)),
    Scenario(
        "images --dataset cifar10 --data-root cifar --out new",
        ("cifar",),
        "cifar/**/*",
        nothing,
        content=True,
    ),
    Scenario(
        "images --dataset folder --data-root pictures --megabatches 2 --image-size 8 --epochs 1 --hidden 4 "
        "--out new",
        ("pictures",),
        "pictures/**/*",
        nothing,
    ),
    Scenario(
        f"{DIGITS} --out runs/digits",
        ("runs/digits",),
        "runs/digits/*",
        rows("runs/digits"),
        ("*.pt",),
        ("runs/digits/*",),
    ),
    Scenario(
        "images experiments/one.yaml --out new",
        ("experiments",),
        "experiments/one.yaml",
        nothing,
        content=True,
    ),
    Scenario(
        "images experiments/images.yaml --list",
        ("experiments",),
        "experiments/images.yaml",
        printed,
        content=True,
    ),
    Scenario(
        "sweep --cluster slurm --dry-run -- experiments/images.yaml",
        ("experiments", "bin"),
        "experiments/images.yaml",
        printed,
        content=True,
    ),
    Scenario(
        "reproduce table2 --size paper --stream stream --dry-run", ("stream",), "stream/stream.json", printed
    ),
    Scenario(
        "status runs", ("runs/sweep", "runs/lm", "runs/jobs", "bin"), "runs/*/**/*[nlg]", printed, codes=(1,)
    ),
    Scenario("cancel runs --dry-run", ("runs/jobs", "bin"), "runs/jobs/jobs.json", printed),
    Scenario("report runs", _RUNS, _RECORDS, printed),
    Scenario("report runs --html new.html", _RUNS, _RECORDS, printed),
    Scenario("report runs/sweep --figures vision --out new", ("runs/sweep",), _RECORDS, printed),
    Scenario("report runs/lm --table lm --figures lm --out new", ("runs/lm",), _RECORDS, printed),
    Scenario("report runs --select valid", _RUNS, _RECORDS, printed),
    Scenario("advise runs/sweep --out new", ("runs/sweep",), _RECORDS, printed, content=True),
    Scenario("advise runs/sweep --backtest", ("runs/sweep",), _RECORDS, printed, content=True),
    Scenario(
        "tsne runs/sweep/gmoe_0 --out new.png --examples 20",
        ("runs/sweep",),
        "runs/sweep/gmoe_0/*",
        nothing,
        ("*.pt",),
    ),
    Scenario(
        "combine models/a/checkpoint_last.pt models/b/checkpoint_last.pt --out new.pt",
        ("models",),
        _MODELS,
        model("new.pt"),
        ("*.pt",),
    ),
    Scenario(
        f"combine {_ONE} --weights last:3 --out new.pt",
        ("models",),
        "models/a/*.pt",
        model("new.pt"),
        ("*.pt",),
    ),
    Scenario(
        f"export {_ONE} --out new --tokenizer stream",
        ("models", "stream"),
        _ONE,
        files("new/model.safetensors", "new/config.json"),
        ("*.pt",),
    ),
    Scenario(
        f"export {_ONE} --out new --tokenizer stream",
        ("models", "stream"),
        "stream/*.[jtm]*",
        files("new/tokenizer.json"),
        ("dict.txt", "*.model"),
    ),
    Scenario(
        f"{_EVALUATE.format('stream')} {_ONE}", ("models", "stream"), "models/a/*last.pt", measured, ("*.pt",)
    ),
    Scenario(
        f"{_EVALUATE.format('stream')} {_ONE}", ("models", "stream"), "stream/*.[bijt]*", measured, _PARTS
    ),
    Scenario(
        "reshard preprocessed --megabatch-tokens 1000", ("preprocessed",), "preprocessed/*[tnx]", printed
    ),
    Scenario(
        "check",
        ("experiments",),
        "experiments/lines.json",
        nothing,
        stdin="experiments/lines.json",
        content=True,
    ),
    Scenario(f"{_TRAIN} new", ("stream",), "stream/**/*", nothing, _PARTS),
    Scenario(
        f"{_TRAIN} new --finetune-from-model {_ONE} --stage 1", ("stream", "models"), _ONE, nothing, ("*.pt",)
    ),
    Scenario(
        f"{_TRAIN} models/a --max-update 5", ("stream", "models"), _ONE, nothing, ("*.pt",), ("models/a/*",)
    ),
    Scenario(
        "fairseq-eval-lm stream --task alma_lm --gen-subset test --path models/a/checkpoint_last.pt",
        ("stream", "models"),
        _ONE,
        nothing,
        ("*.pt",),
    ),
]
"""All commands that read a file."""
