"""The combinations of the values of a command line, or of a section of an experiment file."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from alma.sweeps import combinations
from vision import presets
from vision.learners import all_settings, refusal

DATA: tuple[str, ...] = (
    "dataset",
    "image_size",
    "resize_size",
    "megabatches",
    "stream_seed",
    "preset",
    "scenario",
    "replay_share",
    "replay_from",
)
"""Flags that take lists and are not settings of a learner."""


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the values of a command line."""

    learner: str
    waiting_time: int
    replay: bool
    seed: int
    data: dict[str, Any]  # given values of DATA, by name
    settings: dict[str, Any]  # given settings of the learner, by name

    @property
    def megabatches(self) -> int:
        """Number of mega-batches of the stream."""
        return _megabatches(self.data)

    @property
    def stream_seed(self) -> int:
        """Seed of the partition into mega-batches."""
        return self.data.get("stream_seed", self.seed)

    @property
    def scenario(self) -> str | None:
        """The scenario of a stream that drifts."""
        return self.data.get("scenario")

    @property
    def replay_from(self) -> str:
        """The mega-batches that are replayed: "all" or "recent"."""
        return self.data.get("replay_from", "all")

    @property
    def replay_share(self) -> float:
        """The share of replay, by default that of the preset."""
        default = presets.replay_share(self.data.get("preset"), self.replay)
        return self.data.get("replay_share", default)

    @property
    def values(self) -> dict[str, Any]:
        """All given values by name, in the order of a recorded command."""
        settings = dict(self.settings)
        values: dict[str, Any] = {"learner": self.learner, "waiting_time": self.waiting_time}
        if "hidden" in settings:
            values["hidden"] = settings.pop("hidden")
        return values | self.data | {"replay": self.replay, "seed": self.seed} | settings


def points_of(section: argparse.Namespace) -> Iterator[tuple[SweepPoint, dict[str, str]]]:
    """Yield every combination of a section's values.

    With each comes a dict of the settings that its learner does not take, with the reasons; the
    combination leaves them out.
    """
    data_names = [name for name in DATA if getattr(section, name) is not None]
    settings_names = [name for name in all_settings() if getattr(section, name) is not None]
    # The order of the runs: sizes vary more slowly than data, other settings faster.
    sizes = [name for name in settings_names if name == "hidden"]
    choices = [name for name in settings_names if name != "hidden"]
    names = ["learner", "waiting_time", *sizes, *data_names, *choices, "replay", "seed"]
    for value_of in combinations({name: getattr(section, name) for name in names}):
        data = {name: value_of[name] for name in data_names}
        waiting_time = value_of["waiting_time"]
        if waiting_time == "all":
            waiting_time = _megabatches(data)
        learner = value_of["learner"]
        chosen = {name: value_of[name] for name in (*choices, *sizes)}
        refused = {}
        accepted = {}
        for name, value in chosen.items():
            reason = refusal(learner, name, chosen)
            if reason:
                refused[name] = reason
            else:
                accepted[name] = value
        point = SweepPoint(
            learner, waiting_time, value_of["replay"], value_of["seed"], data, accepted
        )
        yield point, refused


def _megabatches(data: Mapping[str, Any]) -> int:
    """Number of mega-batches of a stream, given values of DATA."""
    default = presets.megabatches(data["dataset"], data.get("preset"), data.get("scenario"))
    return data.get("megabatches", default)
