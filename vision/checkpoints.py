"""Reading files that `torch.save` wrote."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from alma.errors import UserError
from alma.files import damage

_ANEW = "delete it, and the run starts again"


@contextmanager
def reading(path: str | Path, advice: str = _ANEW) -> Iterator[None]:
    """Turn the errors of a damaged or foreign checkpoint, or one of another model, into a
    UserError."""
    try:
        with warnings.catch_warnings():
            # The error that follows says more.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise UserError(f"{path} needs more memory than there is, or is damaged") from None
    except Exception as error:  # of torch and learners, for a file with other content than theirs
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UserError(f"{path} is damaged ({reason}): {advice}") from None


def read_checkpoint(
    path: str | Path, device: torch.device | str = "cpu", advice: str = _ANEW
) -> dict[str, Any]:
    """Tensors and plain values that `torch.save` wrote. UserError, with `advice`, for a damaged or
    foreign file."""
    with reading(path, advice):
        damaged = damage(path)
        if damaged:
            raise ValueError(damaged)
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError("it is no dictionary")
        return state
