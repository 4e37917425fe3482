"""The test of a model on all periods: a task for a program, whose results become cells.

The program gets a stage.json with the periods that are missing (`alma.trainer`). One that saves
the result of each period at once loses no period when it is killed.
"""

import contextlib
import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alma.errors import UserError
from alma.files import locked, make_directory, read_file, sha256_file
from alma.schema import parse_json
from alma.trainer import PARTS, STAGE, TRAINED, PartResult, StageTask
from slurm.engine.children import Environment
from slurm.lm.trainer import answer
from slurm.matrix.cells import CellStore, MeasuredCell, ModelRow
from slurm.matrix.models import TestedModel
from slurm.matrix.periods import PeriodData, SplitData

_LOG = "evaluation.log"


@dataclass(frozen=True)
class Program:
    """What measures the models."""

    words: tuple[str, ...]  # of its command; the path of the task follows
    key: str  # differs when its words or its script do
    metric: str  # of StageTask
    in_bits: bool  # whether its results are nats a token, shown as bits a byte
    is_own: bool  # whether it is the user's, by --command


def key_of(words: Sequence[str]) -> str:
    """Differs when the words of a program do, or a file that they name, such as its script.

    A program on the PATH is left out: it has other paths in other environments.
    """
    program, *arguments = words
    lines = list(arguments)
    if "/" in program and _is_script(program):
        lines.append(sha256_file(program))
    for word in arguments:
        for name in (word, word.partition("=")[2]):
            if Path(name).is_file():
                lines.append(sha256_file(name))
    return shlex.join(lines)


def _is_script(program: str) -> bool:
    """Whether a program is a text that names its interpreter, not a binary such as Python."""
    with open(program, "rb") as file:
        return file.read(2) == b"#!"


@dataclass(frozen=True)
class ModelTest:
    """A model, the program that measures it, and the data."""

    folder: Path  # of all cells
    model: TestedModel
    program: Program
    data: SplitData

    @property
    def store(self) -> CellStore:
        """The cells of the model; another model, program or metric has others."""
        about = [self.model.sha256, self.program.key, self.program.metric]
        digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "_", self.model.name)[-60:]
        return CellStore(self.folder / f"{name}-{digest}")

    @property
    def missing(self) -> list[PeriodData]:
        """The periods on which the model is not tested."""
        return self.store.missing(self.data.periods)

    @property
    def row(self) -> ModelRow:
        """All cells, when none is missing."""
        cells: list[MeasuredCell] = []
        for period in self.data.periods:
            cell = self.store.read(period)
            assert cell
            cells.append(cell)
        return ModelRow(self.model, self.data.periods, cells, self.program.in_bits)

    def run(
        self, measured: Callable[[], None] = lambda: None, environment: Environment = None
    ) -> None:
        """Measure the cells that are missing; `measured` is called after some of them are.

        UserError: the program has no answer or has changed, or another process is at work.
        StageFailed: the program failed.
        """
        self._check_program()
        store = self.store
        make_directory(store.folder)
        with locked(store.folder):
            collector = _Collector(self)
            collector.collect_answer()
            collector.collect_parts()
            missing = self.missing
            if missing:
                task = self._task(missing)
                command = [*self.program.words, str(store.folder / STAGE)]

                def watch(line: str) -> None:
                    if collector.collect_parts():
                        measured()

                log = store.folder / _LOG
                answer(task, command, log, self.model.name, watch, environment)
                try:
                    self._check_program()
                except UserError:  # its cells may be of both programs
                    store.remove(self.data.periods)
                    collector.remove_answer()
                    raise
                collector.collect_answer()
            collector.remove_answer()
        measured()

    def check_unchanged(self) -> None:
        """UserError: the files of the model are not those of the launch."""
        if self.model.with_checksum(self.program.is_own) != self.model:
            problem = "its files have changed since the launch"
            raise UserError(f"{self.model.name}: {problem}: rerun the command of the launch")

    def _check_program(self) -> None:
        """UserError: the program is not that of the launch."""
        if key_of(self.program.words) != self.program.key:
            words = shlex.join(self.program.words)
            raise UserError(f"{words}: has changed since the launch: type the command again")

    def _task(self, periods: Sequence[PeriodData]) -> StageTask:
        """The evaluation of the model on these periods."""
        parts = tuple(self.data.part(period) for period in periods)
        return StageTask(
            action="evaluate",
            out=str(self.store.folder),
            stream="",
            dictionary=0,
            learner=self.model.group,
            stage=None,
            t=0,
            megabatches=len(self.data.periods),
            waiting_time=1,
            valid=(),
            evaluate=parts,
            members=self.model.members,
            seeds=(),
            metric=self.program.metric,
        )


class _Collector:
    """Turns the results of a program into cells."""

    def __init__(self, test: ModelTest) -> None:
        self._store = test.store
        self._periods = {test.data.part(period).files: period for period in test.data.periods}
        self._since = time.monotonic()

    def collect_parts(self) -> bool:
        """Write the cells of the periods that the program has saved; whether there were any."""
        files = sorted((self._store.folder / PARTS).glob("*.json"))
        results = []
        for file in files:
            with contextlib.suppress(ValueError):  # written by another version: measured again
                results.append(msgspec.convert(parse_json(read_file(file)), PartResult))
        self._write(results)
        for file in files:
            file.unlink()
        return bool(results)

    def collect_answer(self) -> None:
        """Write the cells of a whole answer, also of one before a kill."""
        folder = self._store.folder
        if not (folder / STAGE).exists() or not (folder / TRAINED).exists():
            return
        with contextlib.suppress(ValueError, UserError):  # no whole answer: measured again
            task = msgspec.convert(parse_json(read_file(folder / STAGE)), StageTask)
            losses = task.checked(parse_json(read_file(folder / TRAINED))).losses
            self._write([PartResult(part.files, *losses[part.name]) for part in task.evaluate])

    def remove_answer(self) -> None:
        """Remove the task and its answer, whose cells are written."""
        for name in (TRAINED, STAGE):
            (self._store.folder / name).unlink(missing_ok=True)

    def _write(self, results: Sequence[PartResult]) -> None:
        """Write the cells that are new, with their shares of the time since the last ones."""
        new = []
        for result in results:
            period = self._periods.get(result.files)
            if period and not self._store.file(period).exists():
                new.append((period, result))
        now = time.monotonic()
        for period, result in new:
            self._store.write(period, result.value, result.count, (now - self._since) / len(new))
        if new:
            self._since = now
