"""Reading fairseq checkpoints: nothing is unpickled but tensors, and damage is one clear line."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from alma.errors import UserError

PREFIX = "decoder."
"""What the parameters of a decoder-only language model are called by fairseq, all of them."""


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


def glance_at(paths: Sequence[str]) -> list[dict[str, Any]]:
    """A glance at language models; several are to be one ensemble.

    UserError: one is missing, damaged or no language model, or they do not fit each other.
    """
    states = [glance(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        if not (state.get("cfg") and all(name.startswith(PREFIX) for name in state["model"])):
            raise UserError(f"{path} is not the checkpoint of a decoder-only language model of this fairseq")
        rows, expected = (_dictionary(each["model"]) for each in (state, states[0]))
        if rows != expected:
            raise UserError(
                f"{path} has a dictionary of {rows} entries, {paths[0]} of {expected}: "
                "members need one dictionary"
            )
        blocks, expected = (each["cfg"]["task"]["tokens_per_sample"] for each in (state, states[0]))
        if blocks != expected:
            raise UserError(
                f"{path} was trained on blocks of {blocks} tokens, {paths[0]} on {expected}: "
                "members need one --tokens-per-sample"
            )
    return states


def _dictionary(model: dict[str, Any]) -> int | None:
    """Entries of a model's dictionary, of an ensemble's first member; None where they have no embedding."""
    embeddings = (len(value) for name, value in model.items() if name.endswith("embed_tokens.weight"))
    return next(embeddings, None)
