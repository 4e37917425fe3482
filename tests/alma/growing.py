"""Runs of one stream that was made in one go, and grown by appends, with the same cells."""

import json

from alma.records import Run

from .synthetic import drifting, edited, image_run, lm_run, with_info


def periods(count):
    """The names of `count` months."""
    return [f"{2024 + k // 12}-{k % 12 + 1:02d}" for k in range(count)]


def dated(run, cell):
    """Add an evaluation matrix and the names of its months."""
    drifting(run, cell)
    names = periods(run.config["megabatches"])
    return edited(run, lambda row: row["extra"].update(matrix_periods=names))


def whole_run(place, make, cell, count, seed=0, test=None, **config):
    """A run on a stream made in one go; `test`: values on its test set (default: of its cells)."""
    values = test or [cell(t, t) for t in range(1, count + 1)]
    if make is image_run:
        config |= {"test_periods": count}
    run = dated(make(place, values, seed=seed, **config), cell)
    if make is lm_run:
        with_info(run, test_periods=count)
    return Run.read(place)


def grown_run(place, make, cell, count, first=2, late=True, seed=0, test=None, **config):
    """The same on a stream that had `first` mega-batches and grew by one at a time.

    late    whether earlier models were tested on what arrived; or which cells, by (stage, part)
    """
    whole_run(place, make, cell, count, seed, test, **config)
    info = json.loads((place / "run.json").read_text())
    facts = info["config"] if make is image_run else info
    facts["test_periods"] = first
    (place / "run.json").write_text(json.dumps(info))
    run = Run.read(place)
    run.writable = True
    evaluations = []
    for row in run.rows_as_written:
        width = max(first, row["t"])
        for part in range(width + 1, count + 1):
            stage = row["stage"]
            if late is True or (late and late(stage, part)):
                value = row["extra"]["matrix"][part - 1]
                name = periods(count)[part - 1]
                evaluations.append(
                    {"stage": stage, "megabatch": part, "period": name, "value": value}
                )

    def cut(row):
        for name in ("matrix", "matrix_periods"):
            row["extra"][name] = row["extra"][name][: max(first, row["t"])]

    edited(run, cut)
    run = Run.read(place)
    run.writable = True
    run.append_evaluations(evaluations)
    return run
