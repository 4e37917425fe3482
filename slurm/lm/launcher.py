"""Launch language models.

words -> requests -> checked -> placed -> plans -> shared -> announced -> run
"""

import argparse
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from alma.errors import UserError, interrupt
from slurm.engine import children, resources, submission
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.lm.announce import announce
from slurm.lm.checks import check, check_kept, megabatch_sizes
from slurm.lm.cluster import launch_on_slurm, show_jobs
from slurm.lm.local import launch_here
from slurm.lm.placement import place, with_hosts
from slurm.lm.plan import Plan, Request, make_plan
from slurm.lm.request import read_requests, resolved
from slurm.lm.sharing import share


@children.failures_in_one_line()
def start(words: Sequence[str], options: argparse.Namespace) -> None:
    """Run a command line of the launcher, whose own options are parsed."""
    end_child_at_signals()
    resources.check_cluster(options, slurm=("wait",), local=("jobs",))
    job_resources = resources.read(options)
    requests = _requests(words, options, job_resources)
    limit_threads(options.jobs or 1)
    with forks(requests, options):
        requests = resolved(requests, without_code=options.dry_run)
        job_resources, machine = place_of(requests, options, job_resources)
        plans = share([_plan(request, machine, options) for request in requests])
        estimates = announce(plans, machine, options)
        if options.cluster == "slurm":
            _run_on_slurm(plans, with_hosts(job_resources, estimates), options)
        elif not options.dry_run:
            launch_here(plans, options.jobs or 1)
            runs = [str(plan.out) for plan in plans]
            print("compare runs with:", shlex.join(["alma", "report", *runs]))


def _requests(
    words: Sequence[str], options: argparse.Namespace, job_resources: Resources
) -> list[Request]:
    """The requests of a command line. UserError: a stream is missing, or options contradict."""
    if options.megabatches and not options.dry_run:
        raise UserError("--megabatches plans without a stream: add --dry-run, or leave it out")
    requests = read_requests(words, options)
    for request in requests:
        shards = request.stream.split(":")
        if not options.megabatches and not any(map(os.path.exists, shards)):
            message = "no such directory; make a stream with `alma data`"
            raise UserError(f"{request.stream}: {message}")
    tasks = job_resources.nodes * job_resources.tasks_per_node
    has_trainer = any(request.trainer for request in requests)
    if options.cluster == "slurm" and tasks > 1 and has_trainer:
        remedy = "start your processes in COMMAND"
        raise UserError(f"--trainer: a job is one task of one node; {remedy}")
    has_engine = any(request.engine for request in requests)
    if job_resources.tasks_per_node > 1 and has_engine:
        flag = f"--tasks-per-node {job_resources.tasks_per_node}"
        problem = "the task of a node starts a process for each GPU"
        raise UserError(f"{flag}: {problem}: leave it out, or give `-- --num_processes N`")
    return requests


def end_child_at_signals() -> None:
    """End the child and say so, as on Ctrl-C, when the terminal closes or a scheduler says so."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ending, interrupt)


def place_of(
    requests: Sequence[Request], options: argparse.Namespace, job_resources: Resources
) -> tuple[Resources, Machine]:
    """The resources of each job, without GPUs if all are for a CPU, and the machine of each."""
    on_cpu = all(request.settings["--cpu"] for request in requests)
    if options.cluster != "slurm":
        return job_resources, Machine.here().slot(options.jobs or 1, on_cpu)
    if on_cpu and options.gpus_per_node is None:
        job_resources = replace(job_resources, gpus_per_node=0)
    return job_resources, job_resources.machine()


def limit_threads(jobs: int) -> None:
    """Divide the cores among concurrent trainings, before the first child reads the variable."""
    if jobs > 1:  # idle OpenMP threads spin, which slows down trainings that share cores
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def forks(requests: Sequence[Request], options: argparse.Namespace) -> AbstractContextManager[None]:
    """A context in which children are started as forks, if that is safe (no GPUs) and pays."""
    is_local_run = options.cluster == "local" and not options.dry_run
    modules = []
    if any(request.by_fairseq for request in requests):
        modules.append("fairseq_alma.preloaded")
    if any(request.engine for request in requests):
        modules.append("transformers_alma.preloaded")
    if is_local_run and modules and not Machine.here().gpus:
        return children.preloaded(modules)
    return nullcontext()


def _plan(request: Request, machine: Machine, options: argparse.Namespace) -> Plan:
    """Check a request, place it on the machine and plan it.

    A UserError names the run's directory.
    """
    sizes: Sequence[int] = () if options.megabatches else megabatch_sizes(request)
    try:
        check(request)
        placed = request if request.trainer else place(request, machine)
        plan = make_plan(replace(placed, sizes=sizes), options.megabatches or len(sizes))
        trainings = [training for spec in plan.stages for training in spec.trainings]
        check_kept(request, min(training.updates or 0 for training in trainings))
    except UserError as error:
        raise UserError(f"{request.out}: {error}") from error
    return plan


def _run_on_slurm(
    plans: Sequence[Plan], job_resources: Resources, options: argparse.Namespace
) -> None:
    """Submit the jobs, or with --dry-run print them."""
    if options.dry_run:
        show_jobs(plans, job_resources, options.verbose)
        return
    submission.check(job_resources)
    launch_on_slurm(plans, job_resources, options.wait)
