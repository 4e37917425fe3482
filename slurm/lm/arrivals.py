"""`alma test` for language models: late evaluations of runs, by the command in run.json."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace

from alma.configs import changes
from alma.errors import UserError
from alma.evaluations import table_of
from alma.records import Run
from alma.stream import Stream, is_stream
from alma.tables import fixed
from slurm.engine import children, resources, submission
from slurm.engine.terminal import say
from slurm.lm.announce import programs
from slurm.lm.checks import check, megabatch_sizes
from slurm.lm.cluster import launch_on_slurm, show_jobs
from slurm.lm.estimate import vocabulary_size
from slurm.lm.late import announcement, plan_on_longer
from slurm.lm.launcher import end_child_at_signals, forks, limit_threads, place_of
from slurm.lm.local import do_here
from slurm.lm.plan import Plan, Request
from slurm.lm.record import run_config
from slurm.lm.request import read_requests, resolved
from slurm.lm.stage import late_jobs


@children.failures_in_one_line()
def test(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Test the models of runs on mega-batches that came later; options: of `alma test`."""
    end_child_at_signals()
    job_resources = resources.read(options)
    requests = [_request(run, options) for run in runs]
    limit_threads(options.jobs or 1)
    with forks(requests, options):
        requests = resolved(requests, without_code=options.dry_run)
        job_resources, machine = place_of(requests, options, job_resources)
        plans = [_plan(request) for request in requests]
        for plan in plans:
            _check_stream(plan)
            vocabulary = vocabulary_size(plan.request.stream)
            for line in [*announcement(plan, vocabulary, machine), *programs(plan)]:
                say(line)
        earlier = {run.directory: len(run.late_evaluations) for run in runs}
        to_test = {plan.out: late_jobs(plan) for plan in plans}
        if options.dry_run and options.cluster == "slurm":
            show_jobs(plans, job_resources, verbose=False)
        if options.dry_run:
            return
        errors: list[Exception] = []
        if options.cluster == "slurm":
            submission.check(job_resources)
            launch_on_slurm(plans, job_resources, options.wait)
        else:
            _, errors = do_here(plans, options.jobs or 1)
    if options.cluster == "slurm" and not options.wait:
        return
    for plan in plans:
        print(_news(plan, earlier[plan.out], bool(to_test[plan.out])))
    names = shlex.join(["alma", "due", *(str(plan.out) for plan in plans)])
    print("is a training due? ask with:", names)
    if errors:
        raise errors[0]


def _request(run: Run, options: argparse.Namespace) -> Request:
    """The request that made a run, from its run.json. UserError: it has none, or no stream."""
    place = run.directory
    words = shlex.split(run.info.get("command", ""))
    if words[:2] != ["alma", "train"]:
        raise UserError(f"{place}/run.json has no command of `alma train`: rerun that first")
    (request,) = read_requests(words[2:])
    request = replace(request, out=place, stream=options.stream or request.stream, evaluate=None)
    if options.test_past is not None:
        request = replace(request, test_past=options.test_past)
    if not is_stream(request.stream):
        problem = f"no stream in {request.stream}, on which it was trained"
        raise UserError(f"{place}: {problem}: give its new place as --stream STREAM")
    if not Stream.load(request.stream).ordered:
        problem = f"{request.stream} has no held-out part of each mega-batch"
        raise UserError(f"{place}: {problem}: make it with `alma data --by` or `--ordered`")
    return request


def _plan(request: Request) -> Plan:
    """The plan that tests a run on its stream as it is now. UserError: with the run's directory."""
    try:
        sizes = megabatch_sizes(request)
        check(request)
        plan = plan_on_longer(replace(request, sizes=sizes), len(sizes))
    except UserError as error:
        raise UserError(f"{request.out}: {error}") from error
    return replace(plan, tests_only=True)


def _check_stream(plan: Plan) -> None:
    """UserError: the stream is another one than that on which the run was trained."""
    config, growing = run_config(plan)
    changed = changes(Run.read(plan.out).config, config, growing)
    if changed:
        problem = f"it was trained on another stream than {plan.request.stream}"
        differences = "; ".join(changed)
        raise UserError(f"{plan.out}: {problem} ({differences}): give --stream STREAM")


def _news(plan: Plan, earlier: int, was_incomplete: bool) -> str:
    """The late evaluations of a run after the first `earlier` ones, as a table.

    was_incomplete: whether something was missing before.
    """
    run = Run.read(plan.out)
    new = run.late_evaluations[earlier:]
    if not new and was_incomplete:
        return f"{plan.out}: the losses by document that were missing are written"
    if not new:
        count = run.config["megabatches"]
        return f"{plan.out}: nothing new: its models are tested on all {count} mega-batches"
    table = table_of(new, lambda stage: _trained_until(plan, stage), fixed)
    return f"{plan.out}: perplexity on what has arrived\n{table}"


def _trained_until(plan: Plan, stage: int) -> str:
    """The newest mega-batch that a stage was trained on, by its period if it has one."""
    last = plan.stages[stage].stage.last
    part = Stream.load(plan.request.stream).held_out[last - 1]
    return part.period or f"mega-batch {last}"
