"""Read fairseq checkpoints safely (weights_only=True), with a one-line diagnosis of damaged
files."""

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
# Exceptions of torch, fairseq and the plug-in on reading a file that is not a fairseq checkpoint:
_FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn the errors of reading a missing, unreadable, damaged or foreign checkpoint into a
    UserError.

    The message advises deletion only if the damage is certain.
    """
    try:
        with warnings.catch_warnings():
            # torch also warns about such a file; the exception that follows says more.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except IsADirectoryError as error:
        remedy = "give a checkpoint in it, such as checkpoint_best.pt"
        raise UserError(f"{path}: is a directory; {remedy}") from error
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        problem = f"cannot be read: {error.strerror or error} ({name})"
        raise UserError(f"{path}: {problem}; the checkpoint may be intact: try again") from error
    except torch.OutOfMemoryError:
        raise
    except _FOREIGN as error:
        raise UserError(f"{path}: {_foreign_content(error)}") from error


def _foreign_content(error: Exception) -> str:
    """Guess from `error` what kind of file was read instead of a fairseq checkpoint."""
    python_object = re.search(r"GLOBAL (\S+)", str(error))
    if python_object:
        return (
            f"contains Python objects ({python_object[1]}), as in old fairseq versions: loading "
            "them could run any code; if you trust the file, load it with weights_only=False and "
            "save it without them"
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"not a fairseq checkpoint ({reason[:200]})"


def checked(load: Callable, path: str, *args, **kwargs) -> dict[str, Any]:
    """Load a checkpoint by `load(path, ...)`.

    Returns the checkpoint. Raises UserError as `reading` does, and for wrong check sums, missing
    parts, or settings that `saved_config.check` refuses.
    """
    with reading(path):
        is_empty = os.path.isfile(path) and not os.path.getsize(path)
        problem = "empty" if is_empty else damage(path)
        if problem:
            advice = "delete it, copy an earlier checkpoint (if any) to checkpoint_last.pt"
            raise UserError(f"{path}: {problem}; {advice}, and run again")
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
    """As `checked`, where `load` is fairseq's load_checkpoint_to_cpu.

    That function converts settings of older versions while it loads, which may already evaluate
    them. So the file's settings are checked before the conversion, and the converted ones after it.
    """
    if saved_config.applies() and os.path.exists(path):
        mapped = zipfile.is_zipfile(path)  # else of torch < 1.6
        checked(torch.load, path, map_location="cpu", mmap=mapped, weights_only=True)
    return checked(load, path, *args, **kwargs)


def memory_map_last(path: str) -> dict[str, Any]:
    """Memory-map checkpoint_last.pt in the folder of `path`, or `path` if there is none.

    `path` may be checkpoint_best.pt; the last checkpoint has the counts of the whole training.
    """
    last = Path(path).with_name("checkpoint_last.pt")
    return memory_map(str(last) if last.exists() else path)


def updates_so_far(path: str) -> int:
    """Number of updates behind the checkpoint `path`, over its stage and all earlier stages."""
    state = memory_map_last(path)
    counts = (state.get("extra_state") or {}).get("AlmaLMTask", {})
    history = state.get("optimizer_history") or [{"num_updates": 0}]
    return counts.get("earlier_updates", 0) + history[-1]["num_updates"]


def with_weights(path: str, state: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return `state`, read from `path`, with its "model" replaced as `--weights` asks.

    `weights`: "trained" (no change), "average" (the moving average of --store-ema), or "last:K",
    the mean of the last K checkpoints in the folder of `path` (LAWA, Kaddour 2022). There may be
    fewer than K, because fairseq writes no checkpoint at an interval that ends with an epoch.
    Raises UserError if there is no average, only one checkpoint, or if the models differ.
    """
    if weights == "trained":
        return state
    count = averages.last_of(weights)
    if count:
        return state | {"model": _mean_of_models(_last_checkpoints(Path(path).parent, count))}
    average = (state.get("extra_state") or {}).get("ema")
    if average is None:
        remedy = "train with --store-ema, or leave --weights out"
        raise UserError(f"{path} has no weight average: {remedy}")
    return state | {"model": average}


def _last_checkpoints(folder: Path, count: int) -> list[Path]:
    """The last `count` periodic checkpoints in a folder, or all if fewer, the oldest first.

    Raises UserError if there is only one.
    """
    pattern = re.compile(r"checkpoint_\d+_(\d+)\.pt")  # of --save-interval-updates: epoch, update
    by_updates = {}
    for file in folder.glob("checkpoint_*_*.pt"):
        match = pattern.fullmatch(file.name)
        if match:
            by_updates[int(match[1])] = file
    last = folder / "checkpoint_last.pt"
    if last.exists():
        by_updates.setdefault(memory_map(str(last))["optimizer_history"][-1]["num_updates"], last)
    newest = sorted(by_updates)[-count:]
    if len(newest) < min(2, count):
        flags = f"--save-interval-updates N --keep-interval-updates {count}"
        raise UserError(f"{folder} has {len(newest)} checkpoints to average: train with {flags}")
    return [by_updates[updates] for updates in newest]


def _mean_of_models(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean of the weights of checkpoints, in fp32; buffers are those of the last one."""
    mean: dict[str, torch.Tensor] = {}
    for k, file in enumerate(files, start=1):
        model = memory_map(str(file))["model"]
        if k > 1 and _shapes(model) != _shapes(mean):
            problem = f"{file} and {files[0]} are of different models"
            raise UserError(f"{problem}: leave out --weights")
        for name, value in model.items():
            if value.is_floating_point():
                value = value.float() if k == 1 else torch.lerp(mean[name], value.float(), 1 / k)
            mean[name] = value
    return mean


def _shapes(model: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.items()}


def memory_map_members(paths: Sequence[str], weights: str = "trained") -> list[dict[str, Any]]:
    """Memory-map language models and check that they can form an ensemble.

    `weights`: as `with_weights`. UserError: one is missing, damaged, without a weight average or
    not a language model, or they differ in dictionary or block length.
    """
    states = [with_weights(path, memory_map(path), weights) for path in paths]
    first_sizes = None
    for path, state in zip(paths, states, strict=True):
        if not (state.get("cfg") and all(name.startswith(PREFIX) for name in state["model"])):
            problem = "is not a checkpoint of a decoder-only language model of this fairseq"
            raise UserError(f"{path} {problem}")
        sizes = _sizes_of(state)
        if first_sizes is None:
            first_sizes = sizes
        if sizes != first_sizes:
            first_entries, first_tokens = first_sizes
            entries, tokens = sizes
            raise UserError(
                f"{path} has a dictionary of {entries} entries and blocks of {tokens} tokens, "
                f"{paths[0]} of {first_entries} and {first_tokens}: members need the same "
                "dictionary and --tokens-per-sample"
            )
    return states


def _sizes_of(state: dict[str, Any]) -> tuple[int | None, int]:
    """Two sizes that all members of an ensemble must share.

    Returns the number of rows of the token embedding (None if the model has none) and the tokens
    per block.
    """
    tokens = state["cfg"]["task"]["tokens_per_sample"]
    for name, value in state["model"].items():
        if name.endswith("embed_tokens.weight"):
            return len(value), tokens
    return None, tokens
