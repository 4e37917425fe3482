"""The flags about MLflow of `alma advise` and `alma report`, and what does not fit together."""

import argparse

from alma.errors import UserError, require_extra

_OF_MLFLOW = ("tracking_uri", "model_date_tag", "period_tag", "log_decision")


def _not_empty(text: str) -> str:
    """The value of a flag; a variable of the shell that is not set would make it empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty: give a name, or leave the flag out")
    return text


def add_flags(command_line: argparse.ArgumentParser) -> None:
    """Add the flags of `alma advise` that read an experiment of MLflow."""
    add = command_line.add_argument
    mlflow = "in place of runs, an experiment of MLflow, with --metric: a run for each model and "
    mlflow += "period (tags trained_until, tested_on), or metrics such as accuracy/2024-03"
    add("--mlflow", type=_not_empty, metavar="EXPERIMENT", help=mlflow)
    uri = "with --mlflow: the store, such as http://localhost:5000, sqlite:///mlflow.db or mlruns "
    uri += "(default: MLFLOW_TRACKING_URI)"
    add("--tracking-uri", type=_not_empty, metavar="URI", help=uri)
    date = "with --mlflow: tag or param with the time until which a model was trained (default: "
    date += "trained_until, model_date or train_end, else the start of the run)"
    add("--model-date-tag", metavar="KEY", default="", help=date)
    period = "with --mlflow: tag or param with the period of a test, or step: the steps of the "
    period += "metric are the periods (default: tested_on, eval_period or test_period)"
    add("--period-tag", metavar="KEY", default="", help=period)
    decision = "with --mlflow: write the answer into the experiment, as a run `alma advice` with "
    decision += "tags and files (default: MLflow is only read)"
    add("--log-decision", action="store_true", help=decision)


def check_flags(options: argparse.Namespace) -> None:
    """Raise a UserError if flags about MLflow contradict others."""
    if options.mlflow:
        if options.runs or options.matrix:
            raise UserError("--mlflow takes the place of runs and --matrix: give one of them")
        if not options.metric:
            raise UserError("--mlflow needs --metric NAME, the metric of MLflow to read")
        return
    for name in _OF_MLFLOW:
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')} needs --mlflow EXPERIMENT")


def add_report_flags(command_line: argparse.ArgumentParser) -> None:
    """Add the flags of `alma report` that write into MLflow."""
    add = command_line.add_argument
    mlflow = "log the runs, the page and the advice into a store of MLflow, such as "
    mlflow += "http://localhost:5000, sqlite:///mlflow.db or mlruns; a repeat updates them"
    add("--mlflow", type=_not_empty, metavar="URI", help=mlflow)
    experiment = "with --mlflow: the experiment, made if there is none (default: alma)"
    add("--experiment", type=_not_empty, metavar="NAME", help=experiment)


def check_report_flags(options: argparse.Namespace) -> None:
    """Raise a UserError if options contradict --mlflow, or its package is missing."""
    if options.experiment and not options.mlflow:
        raise UserError("--experiment needs --mlflow URI")
    if not options.mlflow:
        return
    if options.metric:
        raise UserError("--mlflow logs the records as they are: leave out --metric")
    require_extra("mlflow", "--mlflow")
