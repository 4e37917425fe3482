"""The steps of `alma matrix`: check, split the data, test the models, write the matrix."""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from alma.dates import Dates, interval
from alma.errors import UserError, require_extra
from alma.files import locked, make_directory
from alma.tables import as_text
from alma.trainer import LOSS
from slurm.engine import children, resources
from slurm.engine.machine import Machine
from slurm.engine.terminal import say
from slurm.lm.launcher import end_child_at_signals
from slurm.matrix.cells import BITS_PER_BYTE, summary, write_matrix
from slurm.matrix.jobs import run_here, run_on_slurm
from slurm.matrix.measure import ModelTest, Program, key_of
from slurm.matrix.models import ModelOptions, TestedModel, find_models, remarks_on_dates
from slurm.matrix.periods import DataSource, SplitData, split, survey


@children.failures_in_one_line()
def make_matrix(options: argparse.Namespace) -> None:
    """Do what the options of `alma matrix` say."""
    end_child_at_signals()
    dates = _dates(options)
    _check_program(options)
    _check_out(options.out)
    models = find_models(options.models, _model_options(options))
    source = DataSource.of(
        options.data,
        dates=dates,
        text_key="" if options.metric else _text_key(options),
        skip_bad_input=options.on_bad_input == "skip",
        has_program=options.command is not None,
    )
    if options.dry_run:
        _show(models, survey(source))
        return
    if not options.command:
        require_extra("transformers", "a folder of Hugging Face")
    job_resources = resources.read(options)
    folder = options.out.with_suffix(".cells")
    is_new = not folder.exists()
    make_directory(folder)
    with locked(folder):
        try:
            data = split(source, folder)
            remarks = remarks_on_dates(models, data.names)
        except UserError:
            if is_new:
                shutil.rmtree(folder)
            raise
        say("\n".join([data.announcement, *remarks]))
        tests = _tests(options, models, data, folder)
        if options.cluster == "slurm":
            run_on_slurm(tests, job_resources, options.wait)
        else:
            with _forks(options):
                run_here(tests)
        if any(test.missing for test in tests):
            print(f"when they have ended, type this command again: it writes {options.out}")
            return
        rows = [test.row for test in tests]
        column = options.metric or BITS_PER_BYTE
        write_matrix(rows, column, options.out)
        data.remove_earlier()
    print(as_text(summary(rows, column)))
    print("how often to retrain? ask with:", _next_command(options.out, column))


def _next_command(out: Path, column: str) -> str:
    """The command that reads the matrix; of an unknown metric it says which way is better."""
    from alma.report.advice.metric_of_column import is_known

    words = ["alma", "advise", "--matrix", str(out)]
    if is_known(column):
        return shlex.join(words)
    words += ["--metric", column, "--higher-is-better"]
    return f"{shlex.join(words)} (or --lower-is-better)"


def _tests(
    options: argparse.Namespace, models: Sequence[TestedModel], data: SplitData, folder: Path
) -> list[ModelTest]:
    """The test of each model on the periods."""
    words = _words(options)
    program = Program(
        words=words,
        key=key_of(words),
        metric=options.metric or LOSS,
        in_bits=not options.metric,
        is_own=options.command is not None,
    )
    tests = []
    for model in models:
        hashed = model.with_checksum(of_all_files=program.is_own)
        tests.append(ModelTest(folder, hashed, program, data))
    return tests


def _dates(options: argparse.Namespace) -> Dates:
    """How records get their periods. UserError: a date of --from or --until is none."""
    start = vars(options)["from"]  # `from` is a keyword of Python
    for flag, text in (("--from", start), ("--until", options.until)):
        if text is None:
            continue
        try:
            interval(text)
        except (ValueError, OverflowError):
            form = "write it as 2023, 2023-05 or 2023-05-17"
            raise UserError(f"{flag} {text!r}: no date; {form}") from None
    return Dates(
        options.by,
        options.date_key,
        options.date_format or "",
        start=start or "",
        until=options.until or "",
        undated=options.undated,
    )


def _text_key(options: argparse.Namespace) -> str:
    """The field with the text."""
    return str(options.text_key or "text")


def _check_program(options: argparse.Namespace) -> None:
    """UserError: flags of another kind of program, or no such program."""
    of_folders = ("block_size", "batch_size", "dtype", "device")
    flags = [f"--{name.replace('_', '-')}" for name in of_folders if getattr(options, name)]
    if options.metric is not None:
        _check_metric(options)
    if options.command is None:
        return
    if flags:
        raise UserError(f"{', '.join(flags)}: not with --command, which has its own flags")
    try:
        words = shlex.split(options.command)
    except ValueError as error:
        raise UserError(f"--command: {error}: check its quotes") from None
    if not words or not shutil.which(words[0]):
        problem = "no such program" if words else "no program"
        raise UserError(f"--command {options.command!r}: {problem}: name one that runs here")


def _check_metric(options: argparse.Namespace) -> None:
    """UserError: --metric is no name of a column, or is not for folders of Hugging Face."""
    from alma.report.advice.metric_of_column import COLUMNS_OF_CELLS

    if options.command is None:
        raise UserError("--metric: folders of Hugging Face have bits a byte; add --command")
    if options.text_key is not None:
        raise UserError("--text-key: with --metric no text is read: leave it out")
    name = options.metric
    if not name.strip() or not name.isprintable() or name in COLUMNS_OF_CELLS:
        raise UserError(f"--metric {name!r}: give the name of a metric, such as accuracy")


def _check_out(out: Path) -> None:
    """UserError: the matrix cannot be written there."""
    if out.suffix != ".csv":
        raise UserError(f"--out {out}: the matrix is a CSV file: give {out}.csv")
    if out.is_dir() or not out.absolute().parent.is_dir():
        problem = "a folder" if out.is_dir() else "its folder does not exist"
        raise UserError(f"--out {out}: {problem}: give the path of a file")


def _model_options(options: argparse.Namespace) -> ModelOptions:
    """What the options say about the models. UserError: not MODEL=VALUE, or given twice."""
    return ModelOptions(
        by=options.by,
        cutoffs=_pairs("--cutoff", options.cutoff, "MODEL=DATE"),
        groups=_pairs("--group", options.group, "MODEL=NAME"),
        by_command=options.command is not None,
    )


def _pairs(flag: str, words: Sequence[str], form: str) -> dict[str, str]:
    """The values of a repeated flag, by model."""
    values: dict[str, str] = {}
    for word in words:
        model, equals, value = word.rpartition("=")
        model = model.rstrip("/")
        if not equals or not model or not value:
            raise UserError(f"{flag} {word}: give {form}")
        if model in values:
            raise UserError(f"{flag} {word}: {model} already has {values[model]}; leave out one")
        values[model] = value
    return values


def _words(options: argparse.Namespace) -> tuple[str, ...]:
    """The command of the program that measures the models."""
    if options.command:
        return tuple(shlex.split(options.command))
    words = [sys.executable, "-m", "transformers_alma.texts", "--text-key", _text_key(options)]
    for name in ("block_size", "batch_size", "dtype", "device"):
        value = getattr(options, name)
        if value:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)


def _show(models: Sequence[TestedModel], data: SplitData) -> None:
    """Print the periods, and the models with their dates. UserError: no model is tested later."""
    remarks = remarks_on_dates(models, data.names)
    table = [["model", "trained until", "says", "group", "later periods"]]
    for model in models:
        later = len(model.later(data.names))
        row = [model.name, model.cutoff.period, model.cutoff.source, model.group, f"{later}"]
        table.append(row)
    print("\n".join([data.announcement, *remarks, as_text(table, left=(0, 2, 3))]))


def _forks(options: argparse.Namespace) -> AbstractContextManager[None]:
    """A context in which transformers is imported once, if that is safe (no GPUs)."""
    if options.command or Machine.here().gpus:
        return nullcontext()
    return children.preloaded(["transformers_alma.preloaded", "transformers_alma.texts"])
