"""The run directory: `run.json` (config, versions, machine) and `results.jsonl` (a row per t).

Rows are appended, never rewritten. The evaluation matrix of a row has the held-out parts that the
stream had then; `evaluations.jsonl` (`alma.evaluations`) has those that were measured later, and
`Run.rows` merges both. Readers ignore an incomplete last line, which `Run.open` removes.
"""

import functools
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from alma import provenance
from alma.configs import changes
from alma.errors import UserError
from alma.evaluations import (
    EVALUATIONS,
    LateEvaluation,
    as_line,
    merged,
    read_evaluations,
)
from alma.files import make_directory, read_file, write_json_atomic
from alma.json_lines import append_line, complete_lines, drop_partial_line, version
from alma.options import kinds_of
from alma.protocol import TextOptions
from alma.schema import (
    AMOUNT,
    COUNT,
    LARGEST,
    NATURAL,
    NUMBER,
    TEXT,
    is_plain,
    parse_json,
    require,
    whole,
)
from alma.stages import stage_folder
from alma.trainer import STAGE

RESULTS = "results.jsonl"
CONFIG_KEYS = ("learner", "megabatches", "waiting_time", "replay", "seed")
TRAINED_MEGABATCHES = "trained_megabatches"
"""The fact of run.json, of images by date, that is B when the run was last trained."""
MACHINE_FIELDS = frozenset({"seconds", "peak_memory_bytes"})
"""Fields that depend on the machine; leave them out to compare the results of two runs."""


class _Evaluation(TypedDict, total=False):
    valid: dict[str, NUMBER] | None
    matrix: list[NUMBER]


class _Raw(_Evaluation, total=False):
    perplexity: AMOUNT
    error: AMOUNT


class _Extra(_Evaluation, total=False):
    """Further results in a row. These are the fields that reports read; a row may have others."""

    flops: dict[str, NUMBER]
    members: NATURAL | None
    experts: NATURAL | None
    words: AMOUNT | None
    tokens: AMOUNT | None
    bytes: AMOUNT | None
    perplexity_per_word: AMOUNT | None
    bits_per_byte: AMOUNT | None
    scores: dict[str, NUMBER]
    expert_layers: dict[str, dict[str, list[NUMBER]]]
    matrix_experts: list[dict[str, list[NUMBER]]]
    matrix_periods: list[TEXT]
    matrix_seen: NATURAL
    raw: _Raw | None


class Row(TypedDict):
    """Measurements after mega-batch t, and after training on it if it completes a stage."""

    t: NATURAL  # 0 (before any data) .. B
    stage: NATURAL | None  # index of the last completed stage; None while the learner is untrained
    trained_on: list[COUNT]  # mega-batches t of that stage
    metric: Literal["perplexity", "error"]
    value: AMOUNT  # of the metric on the test set; an error is a fraction
    parameters: NATURAL  # free parameters
    train_flops: AMOUNT  # of training at this t; 0 while waiting
    eval_flops_per_example: AMOUNT
    seconds: AMOUNT  # wall clock at this t
    peak_memory_bytes: NATURAL
    extra: _Extra


_INFO = {
    "config": dict,
    "stages": COUNT | None,
    "commit": str | None,
    "created": str,
    "command": str,
    "test_periods": COUNT,
}
_CONFIG = kinds_of(TextOptions) | dict.fromkeys(("dataset", "data", "arch", "stream"), str)
_CONFIG |= dict.fromkeys(("hidden", "experts", "grow_every"), COUNT) | {
    "megabatches": whole(1, 1_000_000)
}
_CONFIG |= {"moe_expert_count": COUNT | None, "fairseq_flags": list[str], "test_periods": COUNT}
"""Types of the settings that other code reads; further settings may be any JSON value."""


@dataclass
class Run:
    """A run directory, from `Run.open` (to append rows) or `Run.read` (read-only)."""

    directory: Path
    info: dict[str, Any]  # run.json: config, seeds, versions, commit, machine, created
    writable: bool = False
    _times: set[int] = field(default_factory=set, compare=False, repr=False)
    """The t of all rows in the `_version` of results.jsonl that was last read. Reading all rows at
    each append would be quadratic in B."""
    _version: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        config: dict,
        seeds: dict | None = None,
        growing: Collection[str] = (),
        untrained: Collection[str] = (),
    ) -> "Run":
        """Start a run in `directory`, or resume the one there.

        `config` holds CONFIG_KEYS, optionally `name`, and every other setting that changes results
        (JSON values, no output paths): runs whose configs differ only in `seed` count as repeats.
        `seeds` are the seeds derived from `config`, recorded for information. Settings in `growing`
        may increase when a run resumes, see `configs.changes`. A run with another config that has
        trained nothing is replaced: its rows and the files named in `untrained`, which describe its
        untrained model, are removed. Raises UserError if the run has trained with another config,
        ValueError if `config` lacks one of CONFIG_KEYS.
        """
        path = Path(directory)
        resumes = cls.check(path, config, growing)
        config = _as_read_back(config)
        make_directory(path)
        if resumes:
            run = cls(path, cls.read(path).info, writable=True)
            run.note(config=config)
            drop_partial_line(run.results)
            drop_partial_line(run.evaluations)
            return run
        # Removed before run.json is replaced, which describes these files.
        for name in (RESULTS, EVALUATIONS, *untrained):
            (path / name).unlink(missing_ok=True)
        run = cls(path, {"config": config, "seeds": seeds or {}}, writable=True)
        run.note(
            versions=provenance.versions(),
            commit=provenance.commit(),
            machine=provenance.machine(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return run

    @classmethod
    def check(
        cls, directory: str | os.PathLike[str], config: dict, growing: Collection[str] = ()
    ) -> bool:
        """Whether `open` would resume the run in `directory`; writes nothing, raises as it does."""
        missing = [key for key in CONFIG_KEYS if key not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        path = Path(directory)
        if not (path / "run.json").exists():
            if (path / RESULTS).exists():
                raise UserError(
                    f"{path} has results.jsonl but not its run.json: choose another --out"
                )
            return False
        run = cls.read(path)
        changed = changes(run.config, _as_read_back(config), growing)
        if changed and run.trained:
            other = f"{path} holds a run with other settings ({'; '.join(changed)})"
            raise UserError(
                f"{other}: choose another --out, or give that run's settings to resume it"
            )
        return not changed

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> "Run":
        """The run in `directory`, which may still be running. UserError: no run directory."""
        path = Path(directory)
        try:
            info = parse_json(read_file(path / "run.json"))
            require(info, _INFO, ["config"])
            require(info["config"], _CONFIG, CONFIG_KEYS)
            require(info["config"], {"waiting_time": whole(1, info["config"]["megabatches"])})
            if not is_plain(info):
                raise ValueError("control characters, huge numbers or deep nesting")
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} is not a run directory: it has no run.json") from None
        except ValueError as error:
            raise UserError(f"{path / 'run.json'}: {error}: restore it") from None
        return cls(path, info)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved settings of the run."""
        return self.info["config"]

    @property
    def trained(self) -> bool:
        """Whether anything was trained: a row has a stage, or there may be a checkpoint."""
        stages = (row["stage"] is not None for row in self.rows)
        by_trainer = (
            path for path in self.directory.glob("stage_*/**/model/*") if path.name != STAGE
        )
        return any(stages) or any(self.directory.rglob("*.pt")) or any(by_trainer)

    def note(self, **facts: Any) -> None:
        """Record facts in run.json that may change whenever the run is started."""
        if any(self.info.get(name) != fact for name, fact in facts.items()):
            self.info.update(facts)
            write_json_atomic(self.directory / "run.json", self.info)

    @property
    def results(self) -> Path:
        """Path of results.jsonl, which the first row creates."""
        return self.directory / RESULTS

    @property
    def evaluations(self) -> Path:
        """Path of evaluations.jsonl, which the first late evaluation creates."""
        return self.directory / EVALUATIONS

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The complete rows on disk with their late evaluations, sorted by t; not to be changed.

        The evaluation matrix of a row is as long as the stream was when it was last tested, with
        NaN where its model was not.

        UserError: a line is not a row, or repeats a t, or one is not a late evaluation.
        """
        return list(
            _merged_rows(
                self.directory,
                self.config["megabatches"],
                version(self.results),
                version(self.evaluations),
            )
        )

    @property
    def rows_as_written(self) -> list[dict[str, Any]]:
        """The rows of results.jsonl alone, as `rows`."""
        return list(_read_rows(self.results, self.config["megabatches"], version(self.results)))

    @property
    def late_evaluations(self) -> list[LateEvaluation]:
        """The evaluations of `evaluations.jsonl`, as written. UserError: a line is none."""
        return read_evaluations(self.evaluations, self.config["megabatches"])

    @property
    def is_tested_ahead(self) -> bool:
        """Whether models were tested on data that came later, and no training of them has begun.

        `alma test` does so when mega-batches have arrived that no stage was trained on.
        """
        rows = self.rows_as_written
        if not rows:
            return False
        last = rows[-1]
        next_stage = 0 if last["stage"] is None else last["stage"] + 1
        has_begun = stage_folder(self.directory, next_stage).exists()
        has_begun |= self.info.get(TRAINED_MEGABATCHES, 0) > last["t"]
        return not has_begun and any(
            late["megabatch"] > last["t"] for late in self.late_evaluations
        )

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one `Row`, written and fsynced on return.

        ValueError: a field is missing, unknown or of another kind, or there is a row for this t.
        UserError: the metric is not finite or above 1e100 (training diverged). OSError: the disk is
        full; no part of the row remains.
        """
        if not self.writable:
            raise ValueError(f"{self.directory} was opened with Run.read")
        value = row.get("value")
        if isinstance(value, float) and not abs(value) <= LARGEST:
            value_at_t = f"{row.get('metric')} is {value} at t={row.get('t')}"
            raise UserError(f"{value_at_t}: training diverged; use a lower learning rate")
        text = json.dumps(dict(row), allow_nan=False)
        check_row(parse_json(text), self.config["megabatches"])
        before = version(self.results)
        if before != self._version:  # not read yet, or another process has written
            self._times = {on_disk["t"] for on_disk in self.rows_as_written}
        if row["t"] in self._times:
            raise ValueError(f"{self.results} already has t={row['t']}")
        append_line(self.results, text)
        self._times.add(row["t"])
        self._version = version(self.results)

    def append_evaluations(self, evaluations: Iterable[LateEvaluation]) -> None:
        """Append those late evaluations that are in no row and no line yet.

        ValueError: a field is missing or of another kind. OSError: as of `append`.
        """
        if not self.writable:
            raise ValueError(f"{self.directory} was opened with Run.read")
        measured = {(late["stage"], late["megabatch"]) for late in self.late_evaluations}
        for row in self.rows_as_written:
            for t in range(1, len(row["extra"].get("matrix", ())) + 1):
                measured.add((row["stage"], t))
        for late in evaluations:
            cell = (late["stage"], late["megabatch"])
            if cell not in measured:
                measured.add(cell)
                append_line(self.evaluations, as_line(late, self.config["megabatches"]))


def check_row(row: Mapping[str, Any], megabatches: int) -> None:
    """Raise ValueError unless `row` has the fields and types of `Row`, with t <= B."""
    msgspec.convert(row, Row)
    unknown = sorted(row.keys() - Row.__annotations__.keys())
    if unknown:
        raise ValueError(f"unknown fields {unknown} (others belong in `extra`)")
    stage = row["stage"]
    trained_on = row["trained_on"]
    extra = row["extra"]
    if (stage is None) != (not trained_on):
        raise ValueError(f"stage is {stage} but trained_on is {trained_on}")
    stages = 0 if stage is None else stage + 1
    if max(row["t"], stages, *trained_on) > megabatches:
        raise ValueError(f"t, stage or trained_on is beyond mega-batch {megabatches}")
    if len({tuple(sorted(part)) for part in extra.get("matrix_experts", ())}) > 1:
        raise ValueError("the parts of matrix_experts have different layers")
    raw = extra.get("raw")
    if raw is not None and row["metric"] not in raw:
        raise ValueError(f"raw lacks {row['metric']}")
    newest = max(trained_on, default=0)  # while a learner waits, its model was tested before
    for matrix in (extra.get("matrix"), (raw or {}).get("matrix")):
        if matrix and not newest <= len(matrix) <= megabatches:  # the stream may have grown since
            raise ValueError(f"matrix has {len(matrix)} numbers, not {newest} to {megabatches}")


@functools.lru_cache(maxsize=4096)
def _merged_rows(
    directory: Path, megabatches: int, of_rows: tuple[int, ...], of_evaluations: tuple[int, ...]
) -> tuple[dict[str, Any], ...]:
    """The rows of a run with its late evaluations, once for each version of the two files."""
    rows = _read_rows(directory / RESULTS, megabatches, of_rows)
    if not of_evaluations:
        return rows
    return merged(rows, read_evaluations(directory / EVALUATIONS, megabatches))


@functools.lru_cache(maxsize=4096)
def _read_rows(
    path: Path, megabatches: int, of_rows: tuple[int, ...]
) -> tuple[dict[str, Any], ...]:
    """The rows of a file, read once for each of its versions: a report needs them often."""
    rows: dict[int, dict[str, Any]] = {}
    for number, line in complete_lines(path) if of_rows else ():
        try:
            row = parse_json(line)
            check_row(row, megabatches)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a row ({error}): restore the file") from None
        if row["t"] in rows:
            raise UserError(f"{path}:{number}: second row for t={row['t']}: keep one of them")
        rows[row["t"]] = row
        metric = next(iter(rows.values()))["metric"]
        if row["metric"] != metric:
            raise UserError(
                f"{path}:{number}: {row['metric']} after {metric}: a run has one metric: "
                "restore the file"
            )
    return tuple(rows[t] for t in sorted(rows))


def _as_read_back(config: dict) -> dict[str, Any]:
    """The config as JSON restores it: tuples become lists."""
    return json.loads(json.dumps(config, allow_nan=False))
