"""Reading fairseq checkpoints: nothing is unpickled but tensors, and damage is one clear line."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from alma.errors import UserError


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what reading a missing, truncated or foreign checkpoint raises into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path}: truncated or not a fairseq checkpoint ({type(error).__name__}); delete it and run "
            "again: training goes on from an earlier one, if one is left as checkpoint_last.pt"
        ) from error


def glance(path: str) -> dict[str, Any]:
    """The checkpoint with its tensors left on disk (memory-mapped): cheap, whatever its size."""
    with reading(path):
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if "model" not in state:
            raise KeyError("model")
        return state
