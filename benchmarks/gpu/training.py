"""fairseq-train on random tokens: what the steps `train`, `profile` and `resume` run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from alma.errors import UserError
from alma.flops import ARCHS, Arch, Shape
from benchmarks.gpu import frame
from benchmarks.stage_start import write_stream
from benchmarks.train_speed import dense_flags

OPTIMIZER = "--optimizer adam --adam-betas (0.9,0.98) --lr 2e-4 --clip-norm 1 --num-workers 0"
"""The same for both tasks, whose defaults differ."""
Update = dict[str, float]
TINY = Arch(layers=2, dim=32, heads=2)


class Model(NamedTuple):
    """A Switch model of the paper, or with 0 experts fairseq's transformer_lm of equal active size."""

    size: str
    experts: int
    tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.size}, {self.experts} experts" if self.experts else f"{self.size}, transformer_lm"

    @property
    def arch(self) -> Arch:
        return TINY if self.tiny else ARCHS[f"switch_gmoe_{self.size}"]

    @property
    def flags(self) -> str:
        """Task, architecture and size."""
        if not self.experts:
            return dense_flags(self.arch)
        layers, dim, heads = self.arch
        own = f"--decoder-layers {layers} --decoder-embed-dim {dim} --decoder-attention-heads {heads}"
        return f"--task alma_lm --arch switch_gmoe_{self.size} --moe-expert-count {self.experts} {own}"


class Data(NamedTuple):
    """A stream of random tokens, and the size of a batch on it."""

    folder: Path
    vocabulary: int
    """Of the model, special tokens included."""
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a forward pass."""

    def flops(self, model: Model) -> int:
        """Of training on a token, attention scores left out."""
        layers, dim, _ = model.arch
        return Shape(layers, dim, 4 * dim, self.vocabulary, self.length, model.experts, 2).training_flops(1)

    def words(self, model: Model, flags: str, updates: int, interval: int = 1) -> list[str]:
        """What follows `fairseq-train`, which ends after so many `updates` and logs each `interval`-th."""
        log = f"--log-format json --log-interval {interval} --max-update {updates} --disable-validation"
        batch = f"--tokens-per-sample {self.length} --batch-size {self.batch}"
        words = f"{model.flags} {batch} {OPTIMIZER} {log} --save-dir {self.folder}/none {flags}"
        return [str(self.folder), *words.split()]


@contextmanager
def random_data(tiny: bool) -> Iterator[Data]:
    """The paper's length and vocabulary; 64 sequences, a third of the paper's update."""
    with TemporaryDirectory() as folder:
        data = Data(Path(folder), 104, 32, 2) if tiny else Data(Path(folder), 50_264, 512, 64)
        write_stream(data.folder, 40_000 if tiny else 40_000_000, item=70, vocabulary=data.vocabulary - 4)
        yield data


def train(words: Sequence[str], log: Path, signal: int = 0, after: str = "", code: int = 0) -> list[Update]:
    """Run fairseq-train; returns what it logged of its updates. UserError: its exit code is not `code`.

    `signal`, `after`: see `frame.child`.
    """
    found, text = frame.child(["fairseq_cli.train", *words], log, signal, after)
    lines = text.splitlines()
    if found != code:
        raise UserError(f"exit code {found}: {' '.join(line[-150:] for line in lines[-2:])}")
    records = [json.loads(line.split("train_inner | ")[1]) for line in lines if "train_inner | " in line]
    return [{name: float(value) for name, value in record.items()} for record in records]
