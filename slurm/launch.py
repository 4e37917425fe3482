"""Run a whole chain of stages of a language-model learner; the same command goes on where it stopped.

python -m slurm.launch STREAM --learner gmoe --out RUN --grow-experts 2 -- --max-update 400 ...
python -m slurm.launch experiments/table2/gmoe_w1_base.yaml --stream STREAM --size small lr=1e-3
"""

import hashlib
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alma.errors import UserError, command
from alma.files import locked, make_directory
from alma.records import Run
from alma.report.tables import as_text
from alma.stages import stages
from alma.stream import FileInfo, Stream, is_stream
from slurm.engine import children as child
from slurm.engine import queue, resources
from slurm.engine import submission as submit
from slurm.engine.jobs import patiently_locked
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.lm.estimate import check, count_units, estimate, table
from slurm.lm.flags import described
from slurm.lm.local import run_side_by_side, slot
from slurm.lm.plan import Plan, Request, make_plan, reshard_command
from slurm.lm.progress import say
from slurm.lm.request import parse, read_requests, resolved
from slurm.lm.stage import UNTRAINED, collect, run_stages


def count_megabatches(request: Request) -> int:
    """B: as stream.json says, or as the flags cut an ordinary fairseq-preprocess directory."""
    if is_stream(request.stream):
        return len(Stream.load(request.stream).megabatches)
    say(f"cutting {request.stream} into mega-batches")
    return json.loads(child.ask(reshard_command(request), "cutting the data"))["megabatches"]


def identity(stream: str) -> dict[str, Any]:
    """What tells data apart in run.json: a stream may be moved, for stream.json has all its checksums."""
    if not is_stream(stream):
        return {"data": ":".join(str(Path(shard).resolve()) for shard in stream.split(":"))}
    made = Stream.load(stream)
    shared = made.files | made.valid.files | made.test.files
    return {
        "stream": Path(stream).resolve().name,
        "stream_sha256": _digest(shared),
        "megabatch_sha256": [_digest(part.files) for part in made.megabatches],
    }


def _digest(files: Mapping[str, FileInfo]) -> str:
    return hashlib.sha256("".join(files[name].sha256 for name in sorted(files)).encode()).hexdigest()


def run_config(request: Request, plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What tells the plan's run apart, and those of it that may grow: a finished run goes on when its stream
    has got longer.

    UserError: the run that is there has a last stage that ended early because its stream did.
    """
    if (plan.out / "run.json").exists():
        before = Run.read(plan.out).config["megabatches"]
        if before < plan.config["megabatches"] and request.waiting_time <= before:
            last = stages(before, request.waiting_time, request.replay)[-1]
            now = stages(plan.config["megabatches"], request.waiting_time, request.replay)[last.index]
            if last != now and (plan.out / f"stage_{last.index:02d}").exists():
                raise UserError(
                    f"{plan.out}: stage {last.index} trained when its stream ended with mega-batch "
                    f"{last.last}; now it would wait for mega-batch {now.last}: choose another --out"
                )
    growing = ("megabatches", "megabatch_sha256", "grow_experts") if is_stream(request.stream) else ()
    return plan.config | identity(request.stream), growing


def open_run(request: Request, plan: Plan) -> Run:
    """The plan's run directory. UserError: something was trained there with other settings."""
    config, growing = run_config(request, plan)
    run = Run.open(plan.out, config, plan.seeds, growing, untrained=[UNTRAINED])
    run.note(stages=len(plan.stages))  # so many were asked for
    return run


def launch(request: Request, plan: Plan) -> None:
    """Run one request to its end, all stages on this machine, one after the other; print its rows."""
    make_directory(plan.out)
    with locked(plan.out):
        _check_queue(plan)
        run = open_run(request, plan)
        run_stages(plan, run)
    print(summary(run))


def launch_side_by_side(requests: Sequence[Request], plans: Sequence[Plan], jobs: int) -> None:
    """Run all requests to their end on this machine, `jobs` trainings at a time; print their rows."""
    with ExitStack() as stack:
        for plan in plans:
            make_directory(plan.out)
            stack.enter_context(locked(plan.out))
            _check_queue(plan)
        runs = [open_run(request, plan) for request, plan in zip(requests, plans, strict=True)]
        run_side_by_side(plans, runs, jobs)
    for run in runs:
        print(f"\n{run.directory}\n{summary(run)}")


def _check_queue(plan: Plan) -> None:
    """UserError: jobs of the run are in SLURM's queue, which would train the same stages."""
    if not queue.on_cluster(plan.out) or not shutil.which("squeue"):
        return
    if busy := queue.live_units([plan.out]):
        raise _in_the_queue(plan, busy, "give --cluster slurm")


def _in_the_queue(plan: Plan, busy: Sequence[queue.Unit], instead: str) -> UserError:
    jobs = ", ".join(dict.fromkeys(str(unit.job) for unit in busy if unit.run == plan.out))
    return UserError(
        f"{plan.out}: jobs {jobs} of this run are in SLURM's queue: {instead}, or cancel them "
        f"with: python -m slurm.cancel {plan.out}"
    )


def launch_on_slurm(
    requests: Sequence[Request], plans: Sequence[Plan], wanted: Resources, wait: bool
) -> None:
    """Submit all that is not complete, and not in the queue."""
    folder = submit.log_folder(plans)
    outs = [plan.out for plan in plans]
    with ExitStack() as stack:  # two launches at a time would both find nothing in the queue
        for out in outs:
            make_directory(out)
            stack.enter_context(patiently_locked(out))
        busy = submit.in_queue(outs)
        if busy:
            say(f"{len(busy)} units are in the queue already, {busy[0].run} {busy[0].name} among them")
        taken = {unit.run for unit in busy}
        for request, plan in zip(requests, plans, strict=True):
            if plan.out in taken and not Run.check(plan.out, *run_config(request, plan)):
                raise _in_the_queue(plan, busy, "wait for them")
            open_run(request, plan)
        jobs = {unit.marker: str(unit.job) for unit in busy}
        try:
            submit.submit(plans, wanted, submit.to_slurm(folder), jobs)
        finally:
            submit.record(plans, jobs, folder, busy)
    new = len(jobs) - len(busy)
    say(f"{new} units submitted" + (f"; their logs: {folder}" if new else ""))
    names = " ".join(str(out) for out in outs)
    if not wait:
        print(f"watch them with: python -m slurm.status --watch {names}")
        return
    problems = queue.wait(outs)
    for request, plan in zip(requests, plans, strict=True):
        with patiently_locked(plan.out):  # the last job may not have appended its rows yet
            run = open_run(request, plan)
            collect(plan, run)
        print(f"\n{plan.out}\n{summary(run)}")
    if problems:
        raise child.StageFailed("; ".join(str(problem) for problem in problems))


def show_jobs(plans: Sequence[Plan], wanted: Resources, verbose: bool) -> None:
    """Print which jobs would be submitted; `verbose`: as sbatch would get them."""
    paper = submit.Paper()
    submit.submit(plans, wanted, submit.to_paper(submit.log_folder(plans), paper), {})
    texts = paper.texts if verbose else [text.partition("\n")[0] for text in paper.texts]
    print("\n".join([*texts, str(paper)]))


def announce(requests: Sequence[Request], plans: Sequence[Plan], machine: Machine, verbose: bool) -> None:
    """Say what all runs will take, and with which settings.

    UserError: what is left of one does not fit `machine`, or its directory has a training with other
    settings. Nothing has been written by then.
    """
    pairs = list(zip(requests, plans, strict=True))
    estimates = [estimate(plan, count_units(request.stream), machine) for request, plan in pairs]
    say(table(estimates))
    trained_with: dict[str, Path] = {}
    for plan in plans:
        trained_with.setdefault(described(plan.stages[0].settings, verbose), plan.out)
    for text, out in trained_with.items():
        say(f"{out}: {text}" if len(trained_with) > 1 else text)
    if verbose:
        for plan in plans:
            for spec in plan.stages:
                commands = [training.command for training in spec.trainings] + [spec.evaluate]
                say("\n".join(map(shlex.join, commands)))
    check(estimates)
    for request, plan in pairs:
        Run.check(plan.out, *run_config(request, plan))


def summary(run: Run) -> str:
    """The rows of a run as a table."""
    lines = [["t", "stage", "experts", "parameters", "perplexity", "TFLOPs", "seconds"]]
    for row in run.rows:
        stage = "-" if row["stage"] is None else row["stage"]
        members = row["extra"].get("members", 1)
        experts = str(row["extra"].get("experts", "-")) + (f"@{members}" if members > 1 else "")
        cells = [row["t"], stage, experts, f"{row['parameters']:,}"]
        cells += [f"{row['value']:,.2f}", f"{row['train_flops'] / 1e12:,.2f}", f"{row['seconds']:,.0f}"]
        lines.append([str(cell) for cell in cells])
    return as_text(lines)


def launch_here(requests: Sequence[Request], plans: Sequence[Plan], jobs: int) -> None:
    """Run all requests to their end on this machine."""
    if jobs > 1:
        launch_side_by_side(requests, plans, jobs)
        return
    for request, plan in zip(requests, plans, strict=True):
        if len(requests) > 1:
            print(f"\n{request.out}", flush=True)
        launch(request, plan)


@command
def main() -> None:
    """Entry point of `python -m slurm.launch`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child and say so, as on Ctrl-C
    try:
        requests = read_requests(sys.argv[1:])
        options = parse(sys.argv[1:])
        resources.check_cluster(options, slurm=("wait",), local=("jobs",))
        wanted, jobs = resources.read(options), 1 if options.jobs is None else options.jobs
        if jobs < 1:
            raise UserError(f"--jobs {jobs}: give 1 or more")
        if options.cluster == "debug" and jobs > 1:
            raise UserError(f"--jobs {jobs}: only one child can have the terminal: leave it out")
        say("checking the flags of fairseq-train")
        requests = resolved(requests)
        plans = [make_plan(request, count_megabatches(request)) for request in requests]
        on_slurm = options.cluster == "slurm"
        announce(requests, plans, wanted.machine() if on_slurm else slot(plans, jobs), options.verbose)
        if options.dry_run:
            if on_slurm:
                show_jobs(plans, wanted, options.verbose)
            return
        if on_slurm:
            submit.check(wanted)
            launch_on_slurm(requests, plans, wanted, options.wait)
            return
        if options.cluster == "debug":
            child.lend_terminal()
        launch_here(requests, plans, jobs)
    except child.StageFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)
    print(f"compare runs with: python -m alma.report {' '.join(str(request.out) for request in requests)}")


if __name__ == "__main__":
    main()
