"""Read files written by `torch.save` safely (weights_only=True), with one-line errors."""

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
    """Turn any error while `path` is read or loaded into a model into a UserError with `advice`.

    The file is then damaged, was not written by us, or belongs to another model.
    """
    try:
        with warnings.catch_warnings():
            # torch also warns about such a file; the exception that follows says more.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise UserError(f"{path} needs more memory than there is, or is damaged") from None
    except Exception as error:  # torch and learners raise many types for foreign content
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UserError(f"{path} is damaged ({reason}): {advice}") from None


def read_checkpoint(
    path: str | Path, device: torch.device | str = "cpu", advice: str = _ANEW
) -> dict[str, Any]:
    """The dict of tensors and plain values in the file `path`, with tensors on `device`.

    Raises a UserError that ends with `advice` if the file is damaged or holds anything else.
    """
    with reading(path, advice):
        damaged = damage(path)
        if damaged:
            raise ValueError(damaged)
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError("it is no dictionary")
        return state
