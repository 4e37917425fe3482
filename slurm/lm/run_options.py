"""Options of a run: the launcher's own, and names of flags of fairseq-train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.batches import tokens_of
from alma.options import NEVER, option
from alma.protocol import TextOptions

Flags = Mapping[str, Sequence[str]]
"""Flags of fairseq-train as given: by name, the words of the command line, the name included."""
FlagValues = Mapping[str, Any]  # parsed values of all flags of fairseq-train, by first name
CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")
ENCODER = "--gpt2-encoder-json"  # fairseq's default is a URL, which ALMA never downloads
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
"""Flags of fairseq-train that are passed to evaluations too."""


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
    gpus: int  # GPUs of all processes together; 0: on a CPU
    tokens: int | None  # tokens of an update, if batches are full; None: unknown
    by_machine: bool  # whether `tokens` depends on the number of GPUs, since no flag sets it


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
