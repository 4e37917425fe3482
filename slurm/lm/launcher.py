"""Launches language models: words -> requests -> checked -> placed -> plans -> shared -> announced -> run."""

import argparse
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from alma.errors import UserError, interrupt
from slurm.engine import children, resources, submission
from slurm.engine.machine import Machine
from slurm.lm.announce import announce
from slurm.lm.checks import check, check_kept, megabatch_sizes
from slurm.lm.cluster import launch_on_slurm, show_jobs
from slurm.lm.local import launch_here
from slurm.lm.placement import place, with_hosts
from slurm.lm.plan import make_plan
from slurm.lm.request import read_requests, resolved
from slurm.lm.sharing import share


@children.failures_in_one_line()
def start(words: Sequence[str], options: argparse.Namespace) -> None:
    """Run a command line of the launcher, whose own options are parsed."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ending, interrupt)  # end the child and say so, as on Ctrl-C
    resources.check_cluster(options, slurm=("wait",), local=("jobs",))
    wanted, jobs, on_slurm = resources.read(options), options.jobs or 1, options.cluster == "slurm"
    if options.megabatches and not options.dry_run:
        raise UserError("--megabatches plans without a stream: add --dry-run, or leave it out")
    requests = read_requests(words, options)
    for request in requests:
        if not options.megabatches and not any(map(os.path.exists, request.stream.split(":"))):
            raise UserError(f"{request.stream}: no such directory; make a stream with `alma data`")
    if jobs > 1:  # idle OpenMP threads spin: trainings that share cores would take many times longer
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before the first child, which reads it once
    forks = options.cluster == "local" and not options.dry_run and not Machine.here().gpus
    forks = forks and not all(request.trainer for request in requests)
    if on_slurm and wanted.nodes * wanted.tasks_per_node > 1 and any(one.trainer for one in requests):
        raise UserError("--trainer: a job is one task of one node; start your processes in COMMAND")
    with children.preloaded(["fairseq_alma.preloaded"]) if forks else nullcontext():
        requests = resolved(requests, without_code=options.dry_run)
        on_cpu = all(request.settings["--cpu"] for request in requests)
        if on_slurm and on_cpu and options.gpus_per_node is None:
            wanted = replace(wanted, gpus_per_node=0)
        machine = wanted.machine() if on_slurm else Machine.here().slot(jobs, on_cpu)
        plans = []
        for request in requests:
            sizes = () if options.megabatches else megabatch_sizes(request)
            try:
                check(request)
                placed = request if request.trainer else place(request, machine)
                plan = make_plan(replace(placed, sizes=sizes), options.megabatches or len(sizes))
                updates = [one.updates or 0 for spec in plan.stages for one in spec.trainings]
                check_kept(request, min(updates))
                plans.append(plan)
            except UserError as error:
                raise UserError(f"{request.out}: {error}") from error
        plans = share(plans)
        estimates = announce(plans, machine, options)
        if on_slurm:
            wanted = with_hosts(wanted, estimates)
        if on_slurm and options.dry_run:
            show_jobs(plans, wanted, options.verbose)
        elif on_slurm:
            submission.check(wanted)
            launch_on_slurm(plans, wanted, options.wait)
        elif not options.dry_run:
            launch_here(plans, jobs)
            print("compare runs with:", shlex.join(["alma", "report", *(str(plan.out) for plan in plans)]))
