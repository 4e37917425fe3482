"""Run directories with known numbers, and the report command on them."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from alma.records import Run, check_row
from alma.report import compare, style
from alma.report.__main__ import main as report_main
from alma.report.advice.__main__ import main as advise_main
from alma.report.lm.entries import find_entries
from alma.report.losses import Losses
from alma.report.results import find_runs, group
from alma.report.vision import select
from alma.stages import stages

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 65_000_000
STAGE_FLOPS = 2e15
B = 40
"""Errors of `law`."""


def law(level, exponent, offset, noise=0.0, seed=0, count=B):
    """`count` errors by a power law with an offset, with noise of their logarithm."""
    t = np.arange(1.0, count + 1)
    steps = np.random.default_rng(seed).normal(0, noise, count)
    return ((level * t**-exponent + offset) * np.exp(steps)).tolist()


def losses(law, seeds=1, count=8, models=None):
    """Losses of the models of some periods, or all:
    law(u, p, seed) is that of the model of u on period p."""
    at = range(1, count + 1)
    models = models or at
    matrices = []
    for seed in range(seeds):
        matrices.append(tuple(tuple(law(u, p, seed) for p in at) for u in models))
    return Losses("made up", tuple(models), tuple(at), tuple(matrices))


def write_run(directory, values, config, rows, metric, parameters, flops, extra=None):
    """A run with `values` of the metric at t = 0..B, or its first `rows` rows.

    `flops` is a function of a stage; `parameters` and `extra` are constant,
    or functions of (t, stage), where the stage is None while the learner is untrained.
    """
    megabatches = len(values) - 1
    config = {"learner": "sm", "waiting_time": 1, "replay": False, "seed": 0} | config
    run = Run.open(directory, config | {"megabatches": megabatches})
    schedule = stages(megabatches, config["waiting_time"], config["replay"])
    lines = []
    for t, value in list(enumerate(values))[:rows]:
        stage = next((stage for stage in reversed(schedule) if stage.last <= t), None)
        row = {
            "t": t,
            "stage": stage.index if stage else None,
            "trained_on": list(stage.train_on) if stage else [],
            "metric": metric,
            "value": value,
            "parameters": parameters(t, stage) if callable(parameters) else parameters,
            "train_flops": flops(stage) if stage and stage.last == t else 0,
            "eval_flops_per_example": 10.0 * parameters if isinstance(parameters, int) else 1.0,
            "seconds": 1.5,
            "peak_memory_bytes": 1 << 30,
            "extra": extra(t, stage) if extra else {},
        }
        check_row(row, megabatches)
        lines.append(json.dumps(row) + "\n")
    if lines:
        run.results.write_text("".join(lines))
    return run


def make_run(
    directory,
    values,
    waiting_time=1,
    rows=None,
    metric="perplexity",
    experts=None,
    valid=None,
    **config,
):
    """A run with `values` of the metric and `experts` at t = 0..B,
    and `valid` scores of trained models."""

    def extra(t, stage):
        fields = {}
        if experts:
            fields["experts"] = experts[t]
        if valid:
            fields["valid"] = {"loss": 1.0, metric: valid[t]} if stage else None
        return fields

    def stage_flops(stage):
        return STAGE_FLOPS * len(stage.train_on)

    config = {"waiting_time": waiting_time} | config
    return write_run(directory, values, config, rows, metric, PARAMETERS, stage_flops, extra)


def edited(run, edit):
    """Call edit(row) on each row of a run, and write the rows."""
    rows = run.rows
    for row in rows:
        edit(row)
    run.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def replaced(run, old, new):
    """Replace a text in the rows of a run."""
    text = run.results.read_text()
    assert old in text
    run.results.write_text(text.replace(old, new))
    return run


def rename_metric(run, new):
    """Turn a run of errors into one of perplexity, or the reverse."""
    return replaced(run, {"error": '"perplexity"', "perplexity": '"error"'}[new], f'"{new}"')


def with_info(run, **info):
    """Add entries to run.json."""
    (run.directory / "run.json").write_text(json.dumps(run.info | info))
    return run


def lm_run(
    directory, values, learner="sm", w=1, experts=4, members=None, millions=64, rows=None, **config
):
    """A language-model run of B = len(values) mega-batches:
    perplexity 5e4 while untrained, then values[t-1].

    `experts`, `members` (None: a single model) and `millions` of parameters are numbers,
    or lists over t = 1..B; a stage costs `flops`. Perplexity per word is twice the perplexity.
    """
    flops = config.pop("flops", 1e15)
    lists = {
        name: value if isinstance(value, list) else [value] * len(values)
        for name, value in (("experts", experts), ("members", members), ("millions", millions))
    }
    at = []
    for t in range(len(values) + 1):
        place = max(t, 1) - 1
        at.append({name: settings[place] for name, settings in lists.items()})
    settings = {"learner": learner, "waiting_time": w, "arch": "switch_gmoe", "fairseq_flags": []}
    settings |= {"moe_expert_count": at[0]["experts"]} | (
        {"members": members} if isinstance(members, int) else {}
    )
    shown = [5e4 if t < w else value for t, value in enumerate([0, *values])]

    def extra(t, stage):
        constants = {
            name: at[t][name] for name in ("experts", "members") if lists[name][0] is not None
        }
        return constants | {"perplexity_per_word": 2 * shown[t]}

    def parameters(t, stage):
        return round(1e6 * at[t]["millions"])

    return write_run(
        directory,
        shown,
        settings | config,
        rows,
        "perplexity",
        parameters,
        lambda stage: flops,
        extra,
    )


def image_run(directory, trained, w=1, size=8, seed=0, rows=None, **config):
    """An image run of B = len(trained) mega-batches: error .9 while untrained, then trained[t-1].

    It has 10 * size parameters; training costs 1e12 FLOPs per mega-batch, a test 100 * size.
    """
    settings = {"dataset": "digits", "data": "00", "arch": "mlp", "hidden": size}
    settings |= {"waiting_time": w, "seed": seed}
    values = [0.9 if t < w else error for t, error in enumerate([0, *trained])]

    def flops(stage):
        return 1e12 * len(stage.train_on)

    return write_run(directory, values, settings | config, rows, "error", 10 * size, flops)


def averaged(run, factor):
    """Make the metric of a run the raw one; that of the averaged weights is `factor` times as
    large."""

    def edit(row):
        if row["stage"] is not None:
            row["extra"]["raw"] = {row["metric"]: row["value"]}
            row["value"] *= factor

    return edited(run, edit)


def drifting(run, cell, experts=None):
    """Add an evaluation matrix to a run: cell(t, j) on the held-out part of mega-batch j;
    untrained, t = 0.

    `experts`, too, is a function of (t, j): the shares of the experts by layer.
    """
    parts = range(1, run.config["megabatches"] + 1)

    def edit(row):
        t = row["t"] if row["stage"] is not None else 0
        row["extra"]["matrix"] = [cell(t, j) for j in parts]
        row["extra"] |= {"matrix_experts": [experts(t, j) for j in parts]} if experts else {}

    return edited(run, edit)


def table_rows(*places):
    """The rows of all general tables, as dictionaries."""
    tables = [compare.table(results) for results in group(find_runs(places))]
    return [dict(zip(header, row, strict=True)) for header, *rows in tables for row in rows]


def by_learner(*places):
    """`table_rows` by the cell of the learner."""
    return {row["learner"]: row for row in table_rows(*places)}


def entries_of(*places):
    """The language-model entries of folders, all of one B."""
    (entry,) = find_entries(find_runs(places))[0].values()
    return entry


def error_of(done):
    """The one line of an error, of a command that ended with code 2 and printed nothing else."""
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    return done.stderr


def results_of(place):
    """The results of the image runs in a folder, all of one data set and B."""
    (results,) = select.data_sets(find_runs([place])).values()
    return results


def report(*arguments, cwd=ROOT):
    """Run `python -m alma.report` in this process: its exit code, stdout and stderr.

    The files of figures are empty: to draw them takes most of the time.
    """

    def touch(figure, path, formats=("png", "svg", "pdf")):
        for suffix in formats:
            path.with_suffix(f".{suffix}").touch()

    with mock.patch.object(style, "save", touch):
        return run_here(report_main, arguments, cwd)


def run_here(main, arguments, cwd=ROOT):
    """Run the entry point of a tool in this process: its exit code, stdout and stderr."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    words = [main.__module__, *map(str, arguments)]
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.argv", words),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def call_advise(*arguments):
    """Run `alma advise` in this process; if it ends with --out,
    `record` is what it wrote there as JSON."""
    done = run_here(advise_main, arguments)
    if arguments[-2:-1] == ("--out",):
        (file,) = Path(arguments[-1]).glob("*.json")
        done.record = json.loads(file.read_text())
    return done


def legend_of(figure):
    """Texts of a figure's legend, each in one line."""
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
