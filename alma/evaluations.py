"""Late evaluations: what models of a run do on held-out parts that came after their rows.

A stream grows: when a row of results.jsonl is written, its evaluation matrix ends with the newest
mega-batch that the stream has then. Once later ones have arrived, the models that are still there
are tested on them too. `evaluations.jsonl` has a line for each such cell of the matrix:

    {"stage": 2, "megabatch": 7, "period": "2024-07", "value": 133.2}

`held_out/` has the losses of single documents or images, by which two models are compared on the
same ones (`alma gate`).
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import msgspec

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.json_lines import complete_lines, version
from alma.schema import AMOUNT, COUNT, NATURAL, NUMBER, TEXT, parse_json
from alma.tables import as_text

if TYPE_CHECKING:
    import numpy as np

EVALUATIONS = "evaluations.jsonl"
HELD_OUT = "held_out"


class LateEvaluation(TypedDict):
    """A cell of the evaluation matrix: a model, and the held-out part of a mega-batch."""

    stage: NATURAL | None  # the last completed stage of the model; None: it is untrained
    megabatch: COUNT  # number t of the mega-batch whose held-out part was tested
    value: AMOUNT  # of the run's metric; an error is a fraction
    period: NotRequired[TEXT]  # of the mega-batch, in a dated stream
    raw: NotRequired[AMOUNT]  # of the weights before averaging
    experts: NotRequired[dict[str, list[NUMBER]]]  # each expert's share of the tokens, by layer
    seen: NotRequired[bool]  # the period is not after the cutoff of the model that began the run


def as_line(evaluation: LateEvaluation, megabatches: int) -> str:
    """A late evaluation as JSON. ValueError: a field is missing, unknown or of another kind."""
    text = json.dumps(dict(evaluation), allow_nan=False)
    _check(parse_json(text), megabatches)
    return text


def _check(record: Any, megabatches: int) -> None:
    """ValueError unless `record` is a `LateEvaluation` of a stream of B = `megabatches`."""
    msgspec.convert(record, LateEvaluation)
    unknown = sorted(record.keys() - LateEvaluation.__annotations__.keys())
    if unknown:
        raise ValueError(f"unknown fields {unknown}")
    stages = 0 if record["stage"] is None else record["stage"] + 1
    if max(record["megabatch"], stages) > megabatches:
        raise ValueError(f"stage or megabatch is beyond mega-batch {megabatches}")


def read_evaluations(path: Path, megabatches: int) -> list[LateEvaluation]:
    """The complete lines of evaluations.jsonl; [] without that file.

    UserError: a line is no late evaluation of a stream of B = `megabatches`, or repeats a cell.
    """
    of_file = version(path)
    return list(_read(path, megabatches, of_file)) if of_file else []


@functools.lru_cache(maxsize=4096)
def _read(path: Path, megabatches: int, _version: tuple[int, ...]) -> tuple[LateEvaluation, ...]:
    """The late evaluations of a file, read once for each of its versions: reports need them
    often."""
    evaluations: list[LateEvaluation] = []
    cells = set()
    for number, line in complete_lines(path):
        try:
            record = parse_json(line)
            _check(record, megabatches)
        except ValueError as error:
            problem = f"not an evaluation ({error})"
            raise UserError(f"{path}:{number}: {problem}: restore the file") from None
        cell = (record["stage"], record["megabatch"])
        if cell in cells:
            problem = f"second evaluation of stage {cell[0]} on mega-batch {cell[1]}"
            raise UserError(f"{path}:{number}: {problem}: keep one of them")
        cells.add(cell)
        evaluations.append(record)
    return tuple(evaluations)


def merged(
    rows: Sequence[Mapping[str, Any]], evaluations: Iterable[LateEvaluation]
) -> tuple[dict[str, Any], ...]:
    """The rows with their late evaluations: longer matrices, NaN where a model was not tested.

    A row that waits has those of its model, the last one that was trained. The rows that are given
    are not changed.
    """
    of_model: dict[int | None, dict[int, LateEvaluation]] = {}
    names: dict[int, str] = {}  # periods by mega-batch
    for row in rows:
        names |= dict(enumerate(row["extra"].get("matrix_periods", ()), start=1))
    for late in evaluations:
        of_model.setdefault(late["stage"], {})[late["megabatch"]] = late
        if "period" in late:
            names[late["megabatch"]] = late["period"]
    merged_rows = []
    for row in rows:
        extra = row["extra"]
        later = of_model.get(row["stage"])
        if later and "matrix" in extra:
            extra = _extended(extra, later, names)
        merged_rows.append({**row, "extra": extra})
    return tuple(merged_rows)


def _extended(
    extra: Mapping[str, Any], later: Mapping[int, LateEvaluation], names: Mapping[int, str]
) -> dict[str, Any]:
    """`extra` of a row, continued by the late evaluations of its model, by mega-batch."""
    matrix = list(extra["matrix"])
    first = len(matrix) + 1
    last = max(later)
    span = range(first, last + 1)
    extended = dict(extra)
    extended["matrix"] = matrix + [_value(later.get(t), "value") for t in span]
    raw = extra.get("raw") or {}
    if "matrix" in raw:
        raw_matrix = raw["matrix"] + [_value(later.get(t), "raw") for t in span]
        extended["raw"] = raw | {"matrix": raw_matrix}
    if "matrix_periods" in extra:
        extended["matrix_periods"] = [names.get(t, "") for t in range(1, max(first, last + 1))]
    if "matrix_experts" in extra:
        shares = list(extra["matrix_experts"])
        # a part without shares would shift those after it
        tested = itertools.takewhile(lambda t: "experts" in later.get(t, {}), span)
        shares += [later[t]["experts"] for t in tested]
        extended["matrix_experts"] = shares
    if "matrix_seen" in extra:
        seen = sum(later[t].get("seen", False) for t in span if t in later)
        extended["matrix_seen"] = extra["matrix_seen"] + seen
    return extended


def _value(late: Mapping[str, Any] | None, name: str) -> float:
    """A number of a late evaluation; NaN if the model was not tested there."""
    return math.nan if late is None else late.get(name, math.nan)


def table_of(
    evaluations: Sequence[LateEvaluation],
    trained_until: Callable[[int], str],
    shown: Callable[[float], str],
) -> str:
    """Late evaluations as a table: a line for each model, a column for each mega-batch.

    trained_until: the newest period, or mega-batch, that the model of a stage was trained on.
    shown: a value as text.
    """
    names: dict[int, str] = {}
    values: dict[int | None, dict[int, float]] = {}
    for late in evaluations:
        names[late["megabatch"]] = late.get("period") or f"mega-batch {late['megabatch']}"
        values.setdefault(late["stage"], {})[late["megabatch"]] = late["value"]
    columns = sorted(names)
    lines = [["model", *(names[t] for t in columns)]]
    for stage in sorted(values, key=lambda stage: -1 if stage is None else stage):
        model = "untrained" if stage is None else f"of {trained_until(stage)}"
        cells = [shown(values[stage][t]) if t in values[stage] else "-" for t in columns]
        lines.append([model, *cells])
    return as_text(lines)


def item_losses_file(run: Path, stage: int, megabatch: int) -> Path:
    """The file with the losses of single documents or images, see `write_item_losses`."""
    return run / HELD_OUT / f"stage_{stage:03d}_megabatch_{megabatch:04d}.npy"


def write_item_losses(path: Path, losses: "np.ndarray") -> None:
    """Write the losses of a model on the documents or images of a held-out part, atomically.

    losses: float64 (items, 2), in the order of the part: of a document its loss in nats, summed
    over its tokens, and the number of tokens; of an image 1 or 0 for a wrong or right class, and 1,
    or twice 0 if it does not count.
    """
    import numpy as np

    make_directory(path.parent)
    with atomic_write(path, "wb") as file:
        np.save(file, np.asarray(losses, np.float64), allow_pickle=False)


def read_item_losses(path: Path) -> "np.ndarray | None":
    """The losses that `write_item_losses` wrote; None without the file. UserError: damaged."""
    import numpy as np

    if not path.exists():
        return None
    problem = "not an array of losses and counts"
    try:
        losses = np.load(path, allow_pickle=False)
        is_table = losses.ndim == 2 and losses.shape[1] == 2 and losses.dtype == np.float64
        if is_table and np.isfinite(losses).all() and (losses >= 0).all():
            return losses
    except (OSError, ValueError, EOFError) as error:
        problem = " ".join(str(error).split())
    raise UserError(f"{path}: damaged ({problem}): delete it, and start `alma test` again")
