"""Options of a run: the launcher's own, and names of flags of fairseq-train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.batches import tokens_of
from alma.options import NEVER, option
from alma.protocol import TextOptions

Flags = Mapping[str, Sequence[str]]
"""Flags of fairseq-train: for each name the words of the command line, the name first."""
FlagValues = Mapping[str, Any]  # the value of every flag of fairseq-train by its first name
CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")
ENCODER = "--gpt2-encoder-json"  # its default is a URL, which nothing here reads
EVALUATION_FLAGS = (
    "--user-dir",
    "--cpu",
    "--fp16",
    "--bf16",
    "--num-workers",
    "--max-tokens",
    "--batch-size",
    "--required-batch-size-multiple",
    "--tokens-per-sample",
    "--sample-break-mode",
    *CUT_FLAGS,
)
"""Flags of fairseq-train that evaluations take too."""


def tokens_of_batch(settings: FlagValues) -> int | None:
    """Tokens of one forward pass in one process, in full sequences; None: batches have no limit."""
    limits = (
        "--batch-size",
        "--max-tokens",
        "--tokens-per-sample",
        "--required-batch-size-multiple",
    )
    return tokens_of(1, *(settings[name] for name in limits))


@dataclass(frozen=True)
class Placement:
    """Processes and GPUs of each training of a run."""

    processes: int
    gpus: int  # of all processes; 0: a CPU
    tokens: int | None  # of an update, in full batches; None: unknown
    by_machine: bool  # whether the number of GPUs, and no flag, determines `tokens`


@dataclass(frozen=True, kw_only=True)
class RunOptions(TextOptions):
    """The launcher's options of a run, from a command line or an experiment."""

    stream: str = option(
        None, "stream that the experiments train on", metavar="STREAM", record=NEVER
    )
    out: Path = option(
        None,
        "run directory (default of an experiment: runs/FOLDER/NAME)",
        metavar="RUN",
        record=NEVER,
    )
    stages: int | None = option(
        None,
        "train N stages, then stop; a larger N goes on (default: all)",
        at_least=1,
        record=NEVER,
    )
    test_past: int | None = option(
        None,
        "test the models of the newest N earlier stages on mega-batches that came later; 0: none "
        "(default: all, and the untrained model)",
        metavar="N",
        record=NEVER,
    )
    evaluate: str | None = option(
        None,
        "also score each stage with your own program: its last arguments are the paths of the "
        "deployed checkpoints, its last line of output is a JSON object of numbers "
        "(docs/concepts.md); 'timeout 1h ...' ends one that hangs",
        metavar="COMMAND",
        record=NEVER,
    )
