"""The run directory: `run.json` (what was run, where) and `results.jsonl` (one row per mega-batch).

Rows are appended, never rewritten. A crash can leave half of a last line: readers pass over it and
`Run.open` drops it.
"""

import errno
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
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
_ABSENT = "not given"
_SHORT = 40  # characters of a value that are shown


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
        untrained: Collection[str] = (),
    ) -> "Run":
        """Start a run in `directory`, or go on with the one that is there.

        `config` holds CONFIG_KEYS, optionally `name`, and every other setting that changes results
        (JSON values, no output paths): runs whose configs differ only in `seed` count as repeats.
        `seeds` are those derived from it, for the record. The settings of `growing` may be more than
        they were when the run was started (a larger number, a list with more at its end), and are then
        recorded anew. A run with another config in which nothing was trained is started anew: its rows
        are removed, and the files `untrained`, which measure its untrained model. UserError if something
        was trained with another config; ValueError if `config` lacks one of CONFIG_KEYS.
        """
        path = Path(directory)
        goes_on = cls.check(path, config, growing)
        config = _as_read_back(config)
        make_directory(path)
        if not goes_on:
            for name in ("results.jsonl", *untrained):  # before run.json, whose settings they are of
                (path / name).unlink(missing_ok=True)
            run = cls(path, _describe(config, seeds or {}), writable=True)
            write_json_atomic(path / "run.json", run.info)
            return run
        run = cls(path, cls.read(path).info, writable=True)
        if run.config != config:
            run.info["config"] = config
            write_json_atomic(path / "run.json", run.info)
        run._drop_partial_line()
        return run

    @classmethod
    def check(cls, directory: str | os.PathLike[str], config: dict, growing: Collection[str] = ()) -> bool:
        """Whether `open` would go on with the run in `directory`, rather than start one; writes nothing.

        Errors are those of `open`.
        """
        missing = [key for key in CONFIG_KEYS if key not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        path = Path(directory)
        if not (path / "run.json").exists():
            if (path / "results.jsonl").exists():
                raise UserError(f"{path} has results.jsonl but not its run.json: choose another --out")
            return False
        run = cls.read(path)
        differing = differences(run.config, _as_read_back(config), growing)
        if differing and run.trained:
            raise UserError(
                f"{path} holds a run with other settings ({'; '.join(differing)}): choose another --out, "
                "or give the settings of that run to go on with it"
            )
        return not differing

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
    def trained(self) -> bool:
        """Whether anything was trained: a row has a stage, or a checkpoint is there."""
        stages = (row["stage"] is not None for row in self.rows)
        return any(stages) or any(self.directory.rglob("*.pt"))

    def note(self, **facts: Any) -> None:
        """Record in run.json what may change from one start of the run to the next."""
        if any(self.info.get(name) != fact for name, fact in facts.items()):
            self.info.update(facts)
            write_json_atomic(self.directory / "run.json", self.info)

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
    """Nested settings as one level: {"model": {"layers": 2}} is {"model.layers": 2}.

    The words of a command line are taken flag by flag: {"flags": ["--lr", "1e-3"]} is {"--lr": "1e-3"}.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": deep for inner, deep in flatten(value).items()}
        elif isinstance(value, list) and value and str(value[0]).startswith("--"):
            flat |= _by_flag(value)
        else:
            flat[key] = value
    return flat


def _by_flag(words: Sequence[str]) -> dict[str, str]:
    """The flags of a command line with their values, "" for none; of two that are the same the last one."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if re.match("--?[A-Za-z]", word):
            name, _, flags[name] = word.partition("=")
        else:
            flags[name] = f"{flags[name]} {word}".strip()
    return flags


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], growing: Collection[str] = ()
) -> list[str]:
    """How two configs differ, a text for each setting: `--lr: 4e-3 -> 2e-3`.

    Those of `growing` may be more than they were.
    """
    recorded, given = flatten(before), flatten(now)
    return [
        _difference(key, recorded.get(key, _ABSENT), given.get(key, _ABSENT))
        for key in sorted(recorded.keys() | given.keys())
        if recorded.get(key, _ABSENT) != given.get(key, _ABSENT)
        and not (key in growing and key in recorded and _is_more(given.get(key), recorded[key]))
    ]


def _difference(key: str, before: Any, now: Any) -> str:
    """Of long lists the first place where they differ."""
    if isinstance(before, list) and isinstance(now, list) and max(map(len, map(str, (before, now)))) > _SHORT:
        place = next((i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return f"{key}: {len(before)} values -> {len(now)}"
        key, before, now = f"{key}[{place}]", before[place], now[place]
    return f"{key}: {_shown(before)} -> {_shown(now)}"


def _shown(value: Any) -> str:
    text = (value or "given") if isinstance(value, str) else json.dumps(value)  # "": a flag without a value
    return text if len(text) <= _SHORT else f"{text[:12]}…"


def _as_read_back(config: dict) -> dict[str, Any]:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(config, allow_nan=False))


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
