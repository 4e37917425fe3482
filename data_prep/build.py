"""The base class of the pipeline's stages, and `Build`, the state that they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alma.stream import Part
from data_prep import near_duplicates, ranges
from data_prep.cut import Splits
from data_prep.documents import Shard
from data_prep.plan import CorpusPlan
from data_prep.settings import StreamSettings
from data_prep.work import Task, Work, Workspace


@dataclass(kw_only=True)
class Build:
    """A stream that is being made: the inputs of all stages, and results for later stages."""

    settings: StreamSettings
    space: Workspace
    shards: Sequence[Shard]
    past_keys: Sequence[Path] = ()  # .keys files of the stream to which --append adds
    past_entries: Sequence[Path] = ()  # its .near files

    # Set by stages.
    splits: Splits = field(init=False)
    """Those of the settings; in a dated stream with the periods that the stage dates has found."""
    without_period: dict[str, int] | None = None
    """Number of documents that a dated stream leaves out, by the reason (`LeftOut`)."""
    plan: CorpusPlan = field(init=False)
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.splits = self.settings.splits

    @property
    def arrivals(self) -> np.ndarray:
        """The number of the mega-batch of each source, (sources,)."""
        return self.splits.first + self.splits.arrivals(self.space.sources)

    @property
    def entries(self) -> list[Path]:
        """The files of entries, with which near duplicates are found."""
        return near_duplicates.entry_files(self.space, len(self.shards), self.past_entries)

    @cached_property
    def near_ranges(self) -> int:
        """Ranges of bands of near duplicates; needs the files of the stage scan."""
        return near_duplicates.count_ranges(self.entries)

    @cached_property
    def ranges(self) -> int:
        """Ranges of content keys; needs the files of the stages scan and keys.

        UserError: an empty corpus.
        """
        return ranges.count_ranges(self.space, len(self.shards), len(self.past_keys))


class PipelineStage:
    """A stage of the pipeline. Its tasks run in parallel and write files to the work directory."""

    name: ClassVar[str]
    """Name in the progress bar, the table of seconds, and its SLURM jobs."""
    needs: ClassVar[tuple[str, ...]]
    """Names of the stages whose files it reads."""
    writes: ClassVar[tuple[str, ...]]
    """Its output files, NAME.SUFFIX for NAME-NNNNN.SUFFIX; the last one marks a finished task."""
    unit: ClassVar[str]
    """Unit of the weights of its tasks, which the progress bar adds up."""

    def is_needed(self, build: Build) -> bool:
        """Whether the stream needs this stage."""
        return True

    def tasks(self, build: Build) -> list[Task]:
        """The tasks, the finished ones included."""
        raise NotImplementedError

    def finish(self, build: Build) -> None:
        """Add the stage's results to `build`; called when all tasks are finished."""

    def run(self, build: Build, work: Work) -> None:
        """Run the stage. Raises the first error of a task."""
        work.run(self.name, self.tasks(build), self.unit)
        self.finish(build)

    def per_shard(
        self, build: Build, function: Callable[..., None], **arguments: Any
    ) -> list[Task]:
        """A task for each shard, which calls `function` with it as `shard`, and with `arguments`.

        Tasks weigh as much as the shard has bytes of input.
        """
        tasks = []
        for number, shard in enumerate(build.shards):
            size = sum(segment.end - segment.start for segment in shard)
            tasks.append(self.task(build, number, size, function, shard=shard, **arguments))
        return tasks

    def per_file(
        self, build: Build, paths: Sequence[Path], function: Callable[..., None]
    ) -> list[Task]:
        """A task for each file, which calls `function` with it as `path`; it weighs its bytes."""
        return [
            self.task(build, number, path.stat().st_size, function, path=path)
            for number, path in enumerate(paths)
        ]

    def per_range(
        self, build: Build, count: int, function: Callable[..., None], **arguments: Any
    ) -> list[Task]:
        """`count` tasks of equal weight, which call `function` with the same `arguments`."""
        return [self.task(build, number, 1, function, **arguments) for number in range(count)]

    def task(
        self,
        build: Build,
        number: int,
        weight: int,
        function: Callable[..., None],
        **arguments: Any,
    ) -> Task:
        """Task `number`: `function(space=..., number=number, **arguments)`."""
        name, suffix = self.writes[-1].split(".")
        return Task(
            done=build.space.file(name, number, suffix),
            weight=weight,
            function=function,
            arguments={"space": build.space, "number": number, **arguments},
        )
