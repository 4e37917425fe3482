"""Read fairseq checkpoints safely (weights_only=True), with a one-line diagnosis of damaged files."""

import errno
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from alma import averages
from alma.errors import UserError
from alma.files import damage
from alma.schema import require, whole
from fairseq_alma import saved_config

PREFIX = "decoder."  # prefix of every parameter name of a decoder-only language model
# What torch, fairseq and the plug-in raise for a file with other content than theirs:
_FOREIGN: tuple[type[Exception], ...] = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
_FOREIGN += (AssertionError, ArithmeticError, EOFError, MemoryError, struct.error, pickle.UnpicklingError)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn the errors of reading a missing, unreadable, damaged or foreign checkpoint into a UserError.

    The message advises deletion only if the damage is certain.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error that follows says more
            yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        what = f"cannot be read: {error.strerror or error} ({name}); the checkpoint may be intact: try again"
        if isinstance(error, FileNotFoundError):
            what = "no such checkpoint"
        elif isinstance(error, IsADirectoryError):
            what = "is a directory; give a checkpoint in it, such as checkpoint_best.pt"
        raise UserError(f"{path}: {what}") from error
    except _FOREIGN as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        what = f"not a fairseq checkpoint ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})"
        if object_ := re.search(r"GLOBAL (\S+)", str(error)):
            what = (
                f"contains Python objects ({object_[1]}), as in old fairseq versions: loading them could run "
            )
            what += (
                "any code; if you trust the file, load it with weights_only=False and save it without them"
            )
        raise UserError(f"{path}: {what}") from error


def checked(load: Callable, path: str, *args, **kwargs) -> dict[str, Any]:
    """Load a checkpoint by `load(path, ...)`. UserError: as `reading`; wrong check sums, content or
    settings."""
    with reading(path):
        empty = os.path.isfile(path) and not os.path.getsize(path)
        if wrong := "empty" if empty else damage(path):
            advice = "delete it, copy an earlier checkpoint (if any) to checkpoint_last.pt, and run again"
            raise UserError(f"{path}: {wrong}; {advice}")
        state = load(path, *args, **kwargs)
        if not isinstance(state, dict):
            raise TypeError(f"it holds {type(state).__name__}")
        extra = state.get("extra_state") or {}
        require(extra, {})
        for name, value in (*state["model"].items(), *(extra.get("ema") or {}).items()):
            if not torch.is_tensor(value):
                raise TypeError(f"{name!r} of its model is no tensor")
        for past in state.get("optimizer_history") or []:
            require(past, {"num_updates": whole(0)}, ["num_updates"])
        saved_config.check(path, state)
        return state


def memory_map(path: str) -> dict[str, Any]:
    """Memory-map a checkpoint and check its content."""
    return checked(torch.load, path, map_location="cpu", mmap=True, weights_only=True)


def loaded(load: Callable, path: str, *args, **kwargs) -> dict[str, Any]:
    """As `checked`, for fairseq's load_checkpoint_to_cpu, which converts old settings: they are checked
    before that, too."""
    if saved_config.applies() and os.path.exists(path):
        mapped = zipfile.is_zipfile(path)  # else of torch < 1.6
        checked(torch.load, path, map_location="cpu", mmap=mapped, weights_only=True)
    return checked(load, path, *args, **kwargs)


def memory_map_last(path: str) -> dict[str, Any]:
    """Memory-map the last checkpoint of the training that wrote `path`; `path` itself if there is none."""
    last = Path(path).with_name("checkpoint_last.pt")
    return memory_map(str(last) if last.exists() else path)


def updates_so_far(path: str) -> int:
    """Updates of the training that wrote the checkpoint `path`, and of the stages before it."""
    state = memory_map_last(path)
    counts = (state.get("extra_state") or {}).get("AlmaLMTask", {})
    history = state.get("optimizer_history") or [{"num_updates": 0}]
    return counts.get("earlier_updates", 0) + history[-1]["num_updates"]


def with_weights(path: str, state: dict[str, Any], weights: str) -> dict[str, Any]:
    """`state`, read from `path`, with the weights that `--weights` names as its model.

    last:K is the mean of the last K checkpoints in the folder of `path` (LAWA, Kaddour 2022), or of fewer:
    fairseq writes none at an interval that ends with an epoch. UserError: no average; a single checkpoint.
    """
    if weights == "trained":
        return state
    count = averages.last_of(weights)
    if not count:
        average = (state.get("extra_state") or {}).get("ema")
        if average is None:
            raise UserError(f"{path} has no weight average: train with --store-ema, or leave --weights out")
        return state | {"model": average}
    folder = Path(path).parent
    pattern = re.compile(r"checkpoint_\d+_(\d+)\.pt")  # of --save-interval-updates: epoch and update
    named = ((pattern.fullmatch(file.name), file) for file in folder.glob("checkpoint_*_*.pt"))
    by_updates = {int(match[1]): file for match, file in named if match}
    last = folder / "checkpoint_last.pt"
    if last.exists():
        by_updates.setdefault(memory_map(str(last))["optimizer_history"][-1]["num_updates"], last)
    newest = sorted(by_updates)[-count:]
    if len(newest) < min(2, count):
        flags = f"--save-interval-updates N --keep-interval-updates {count}"
        raise UserError(f"{folder} has {len(newest)} checkpoints to average: train with {flags}")
    mean: dict[str, Any] = {}
    for k, updates in enumerate(newest, start=1):
        model = memory_map(str(by_updates[updates]))["model"]
        shapes, expected = ({name: value.shape for name, value in each.items()} for each in (model, mean))
        if k > 1 and shapes != expected:
            first = by_updates[newest[0]]
            raise UserError(f"{by_updates[updates]} and {first} are of different models: leave out --weights")
        for name, value in model.items():
            if value.is_floating_point():
                value = value.float() if k == 1 else torch.lerp(mean[name], value.float(), 1 / k)
            mean[name] = value
    return state | {"model": mean}


def memory_map_members(paths: Sequence[str], weights: str = "trained") -> list[dict[str, Any]]:
    """Memory-map language models and check that they can form an ensemble; `weights`: as `with_weights`.

    UserError: one is missing, damaged, without a weight average or not a language model, or they differ in
    dictionary or block length.
    """
    states = [with_weights(path, memory_map(path), weights) for path in paths]
    sizes = []  # of the first embedding, None without one, and of a block
    for path, state in zip(paths, states, strict=True):
        if not (state.get("cfg") and all(name.startswith(PREFIX) for name in state["model"])):
            raise UserError(f"{path} is not a checkpoint of a decoder-only language model of this fairseq")
        rows = (len(value) for name, value in state["model"].items() if name.endswith("embed_tokens.weight"))
        sizes.append((next(rows, None), state["cfg"]["task"]["tokens_per_sample"]))
        if sizes[-1] != sizes[0]:
            what = "{} has a dictionary of {} entries and blocks of {} tokens, {} of {} and {}"
            remedy = "members need the same dictionary and --tokens-per-sample"
            raise UserError(f"{what.format(path, *sizes[-1], paths[0], *sizes[0])}: {remedy}")
    return states
