"""The run directory: `run.json` (what was run, where) and `results.jsonl` (one row per mega-batch).

Rows are appended, never rewritten. A crash can leave half of a last line: readers pass over it and
`Run.open` drops it.
"""

import errno
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from alma import provenance
from alma.errors import UserError
from alma.files import fsync_directory, make_directory, write_json_atomic

CONFIG_KEYS = ("learner", "megabatches", "waiting_time", "replay", "seed")
METRICS = ("perplexity", "error")
MACHINE_FIELDS = frozenset({"seconds", "peak_memory_bytes"})
"""Fields that measure the machine: leave them out when asking whether two runs gave the same results."""


class Row(TypedDict):
    """What is measured after mega-batch t has arrived (and been trained on, if it completes a stage)."""

    t: int  # 0 (before any data) .. B
    stage: int | None  # index of the last completed stage; None while the learner is untrained
    trained_on: list[int]  # mega-batch numbers which that stage trained on
    metric: str  # one of METRICS
    value: float  # of the metric on the test set; an error is a fraction
    parameters: int  # free parameters
    train_flops: float  # spent on training at this t; 0 while waiting
    eval_flops_per_example: float
    seconds: float  # wall clock spent at this t
    peak_memory_bytes: int
    extra: dict[str, Any]  # further results, such as experts, nll_per_token, bits_per_byte


_TYPES: dict[str, tuple[type, ...]] = {
    "t": (int,),
    "stage": (int, type(None)),
    "trained_on": (list,),
    "metric": (str,),
    "value": (int, float),
    "parameters": (int,),
    "train_flops": (int, float),
    "eval_flops_per_example": (int, float),
    "seconds": (int, float),
    "peak_memory_bytes": (int,),
    "extra": (dict,),
}


@dataclass(frozen=True)
class Run:
    """One run directory. Make it with `Run.open` (to add rows) or `Run.read` (only to look)."""

    directory: Path
    info: dict[str, Any]  # run.json: config, seeds, versions, commit, machine, created
    writable: bool = False
    _known: dict[int, set[int]] = field(default_factory=dict, compare=False, repr=False)
    """The t of all rows, by the size in bytes of the file they were read from or written to."""

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        config: dict,
        seeds: dict | None = None,
        growing: Collection[str] = (),
    ) -> "Run":
        """Start a run in `directory`, or go on with the one that is there.

        `config` holds CONFIG_KEYS, optionally `name`, and every other setting that changes results
        (JSON values, no output paths): runs whose configs differ only in `seed` count as repeats.
        `seeds` are those derived from it, for the record. The settings of `growing` may be more than
        they were when the run was started (a larger number, a list with more at its end), and are then
        recorded anew. UserError if the directory holds a run with another config; ValueError if
        `config` lacks one of CONFIG_KEYS.
        """
        missing = [key for key in CONFIG_KEYS if key not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        config = json.loads(json.dumps(config, allow_nan=False))  # as it is read back: tuples become lists
        path = Path(directory)
        make_directory(path)
        if (path / "run.json").exists():
            run = cls(path, cls.read(path).info, writable=True)
            _require_same_config(run, config, growing)
            if run.config != config:
                run.info["config"] = config
                write_json_atomic(path / "run.json", run.info)
        else:
            if (path / "results.jsonl").exists():
                raise UserError(f"{path} has results.jsonl but not its run.json: choose another --out")
            run = cls(path, _describe(config, seeds or {}), writable=True)
            write_json_atomic(path / "run.json", run.info)
        run._drop_partial_line()
        return run

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> "Run":
        """The run in `directory`, which may still be running; UserError if it is not a run directory."""
        path = Path(directory)
        try:
            info = json.loads((path / "run.json").read_bytes())
            lacking = [key for key in CONFIG_KEYS if key not in info["config"]]
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} is not a run directory: it has no run.json") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path / 'run.json'} is not JSON with a `config`: restore it") from None
        if lacking:
            raise UserError(f"{path / 'run.json'}: its config lacks {', '.join(lacking)}: restore it")
        return cls(path, info)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved settings this run was started with."""
        return self.info["config"]

    @property
    def results(self) -> Path:
        """Path of results.jsonl, which exists once a row has been appended."""
        return self.directory / "results.jsonl"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows on disk by rising t, without a half-written last one.

        UserError naming file and line for any other line that is not a row, or repeats a t.
        """
        if not self.results.exists():
            return []
        rows: dict[int, dict[str, Any]] = {}
        whole, _, _ = self.results.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                row = json.loads(line)
                check_row(row, self.config["megabatches"])
            except ValueError as error:
                raise UserError(f"{self.results}:{number}: not a row ({error}): restore the file") from None
            if row["t"] in rows:
                raise UserError(f"{self.results}:{number}: second row for t={row['t']}: keep one of them")
            rows[row["t"]] = row
        return [rows[t] for t in sorted(rows)]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one `Row` durably: it is on disk, whole, when this returns.

        ValueError for a row that lacks a field, has an unknown one, or repeats a t; UserError when the
        metric is not finite (training diverged); OSError when the disk is full (no half row stays).
        """
        if not self.writable:
            raise ValueError(f"{self.directory} was opened with Run.read")
        check_row(row, self.config["megabatches"])
        if not math.isfinite(row["value"]):
            what = f"{row['metric']} is {row['value']} at t={row['t']}"
            raise UserError(f"{what}: training diverged; use a lower learning rate")
        known = self._times()
        if row["t"] in known:
            raise ValueError(f"{self.results} already has t={row['t']}")
        line = (json.dumps(dict(row), allow_nan=False) + "\n").encode()
        descriptor = os.open(self.results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # One write, so that a reader of the running file meets at most one half-written line.
            written = os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if written < len(line):
            self._drop_partial_line()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.results))
        fsync_directory(self.directory)
        self._known.clear()
        self._known[self.results.stat().st_size] = known | {row["t"]}

    def _times(self) -> set[int]:
        """The t on disk; read again only if somebody else has changed the file: rows of long streams with
        replay would take quadratic time."""
        size = self.results.stat().st_size if self.results.exists() else 0
        if size not in self._known:
            self._known.clear()
            self._known[size] = {row["t"] for row in self.rows}
        return self._known[size]

    def _drop_partial_line(self) -> None:
        """Cut results.jsonl after its last newline."""
        if self.results.exists():
            with self.results.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
                os.fsync(file.fileno())


def check_row(row: Mapping[str, Any], megabatches: int) -> None:
    """ValueError unless `row` has exactly the fields of `Row`, of the right types, and 0 <= t <= B."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a mapping, not {type(row).__name__}")
    if row.keys() != _TYPES.keys():
        missing, unknown = sorted(_TYPES.keys() - row.keys()), sorted(row.keys() - _TYPES.keys())
        raise ValueError(f"missing fields {missing}, unknown fields {unknown} (free fields go into `extra`)")
    for name, types in _TYPES.items():
        if not isinstance(row[name], types) or isinstance(row[name], bool):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{name} is {row[name]!r}: it should be {wanted}")
    if not 0 <= row["t"] <= megabatches:
        raise ValueError(f"t={row['t']} is not in 0..{megabatches}")
    if row["metric"] not in METRICS:
        raise ValueError(f"metric {row['metric']!r} is not one of {METRICS}")
    if (row["stage"] is None) != (not row["trained_on"]):
        raise ValueError(f"stage is {row['stage']} but trained_on is {row['trained_on']}")


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level: {"model": {"layers": 2}} is {"model.layers": 2}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": deep for inner, deep in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def _describe(config: dict, seeds: dict) -> dict[str, Any]:
    return {
        "config": config,
        "seeds": seeds,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _is_more(now: Any, before: Any) -> bool:
    """Whether a setting has only grown."""
    if isinstance(before, list):
        return isinstance(now, list) and now[: len(before)] == before
    return isinstance(before, int) and isinstance(now, int) and now > before


def _require_same_config(run: Run, config: dict, growing: Collection[str]) -> None:
    recorded, now = flatten(run.config), flatten(config)
    differing = [
        f"{key} was {json.dumps(recorded[key]) if key in recorded else 'absent'}"
        f" and is now {json.dumps(now[key]) if key in now else 'absent'}"
        for key in sorted(recorded.keys() | now.keys())
        if key not in recorded
        or key not in now
        or not (recorded[key] == now[key] or (key in growing and _is_more(now[key], recorded[key])))
    ]
    if differing:
        raise UserError(
            f"{run.directory} holds a run with other settings: {'; '.join(differing)}; "
            "choose another --out, or give the recorded values to go on with it"
        )
