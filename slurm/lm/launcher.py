"""Launches language models: checks, announces and then runs or submits all stages of all requests."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import locked, make_directory, patiently_locked
from alma.options import given
from alma.records import Run
from alma.stages import stages
from alma.stream import FileInfo, Stream, is_stream
from alma.tables import as_text
from slurm.engine import children, queue, resources, submission, terminal
from slurm.engine.machine import Machine
from slurm.engine.queue import SubmittedJob
from slurm.engine.resources import Resources
from slurm.engine.terminal import say
from slurm.lm.estimate import check, estimate, table, vocabulary_size
from slurm.lm.flags import described
from slurm.lm.local import run_in_order, run_side_by_side, slot
from slurm.lm.options import Launch, parse
from slurm.lm.placement import place
from slurm.lm.plan import Plan, make_plan, reshard_command
from slurm.lm.request import read_requests, resolved
from slurm.lm.rows import UNTRAINED, collect
from slurm.lm.settings import Request
from slurm.lm.sharing import describe, share
from slurm.lm.stage import in_submission_order, jobs_of

_LIBRARIES = ("fairseq_alma.preloaded",)
_VOCABULARY = 50_260  # the paper's


def count_megabatches(request: Request) -> int:
    """B: from stream.json, or from the flags that cut a fairseq-preprocess directory."""
    if is_stream(request.stream):
        return len(Stream.load(request.stream).megabatches)
    say(f"cutting {request.stream} into mega-batches")
    return json.loads(children.ask(reshard_command(request), "cutting the data"))["megabatches"]


def identity(stream: str) -> dict[str, Any]:
    """Identity of the data for run.json; a moved stream stays the same, by its checksums."""
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


def run_config(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run's config, and those of its keys that may grow with the stream.

    Raises UserError if the last stage of the existing run was cut short by the end of a shorter stream.
    """
    waiting_time, replay = plan.config["waiting_time"], plan.config["replay"]
    config = plan.config | identity(plan.stream)
    if (plan.out / "run.json").exists():
        run = Run.read(plan.out)
        if run.trained and "tokens_per_update" not in run.config:  # of an older version
            config.pop("tokens_per_update", None)
        before = run.config["megabatches"]
        if before < plan.config["megabatches"] and waiting_time <= before:
            last = stages(before, waiting_time, replay)[-1]
            now = stages(plan.config["megabatches"], waiting_time, replay)[last.index]
            if last != now and (plan.out / f"stage_{last.index:02d}").exists():
                raise UserError(
                    f"{plan.out}: stage {last.index} was trained when the stream ended with mega-batch "
                    f"{last.last}; now it would wait for mega-batch {now.last}: choose another --out"
                )
    growing = ("megabatches", "megabatch_sha256", "grow_experts") if is_stream(plan.stream) else ()
    return config, growing


def open_run(plan: Plan) -> Run:
    """Create or resume the run directory. Raises UserError if it was trained with other settings."""
    config, growing = run_config(plan)
    run = Run.open(plan.out, config, plan.seeds, growing, untrained=[UNTRAINED])
    # Stages as requested, which may be fewer than the stream has.
    run.note(stages=len(plan.stages), command=plan.command)
    if place := plan.placement:
        run.note(processes=place.processes, gpus=place.gpus, tokens_per_update=place.tokens)
    return run


def launch(plan: Plan) -> None:
    """Run all stages on this machine, one after the other; print the rows."""
    make_directory(plan.out)
    with locked(plan.out):
        _check_queue(plan)
        run = open_run(plan)
        run_in_order(plan, run)
    print(summary(run))


def launch_here(plans: Sequence[Plan], jobs: int) -> None:
    """Run all plans on this machine, `jobs` jobs at a time; print the rows."""
    if jobs == 1:
        for plan in plans:
            if len(plans) > 1:
                print(f"\n{plan.out}", flush=True)
            launch(plan)
        return
    with ExitStack() as stack:
        for plan in plans:
            make_directory(plan.out)
            stack.enter_context(locked(plan.out))
            _check_queue(plan)
        runs = [open_run(plan) for plan in plans]
        run_side_by_side(plans, runs, jobs)
    for run in runs:
        print(f"\n{run.directory}\n{summary(run)}")


def _check_queue(plan: Plan) -> None:
    """Raise UserError if SLURM has jobs of the run, which would train the same stages."""
    if not queue.on_cluster(plan.out) or not shutil.which("squeue"):
        return
    if busy := queue.live_jobs([plan.out]):
        raise _in_the_queue(plan, busy, "give --cluster slurm")


def _in_the_queue(plan: Plan, busy: Sequence[SubmittedJob], instead: str) -> UserError:
    ids = ", ".join(dict.fromkeys(str(job.job_id) for job in busy if job.run == plan.out))
    return UserError(
        f"{plan.out}: jobs of this run are in SLURM's queue (job ids {ids}): {instead}, or cancel them "
        f"with: alma cancel {plan.out}"
    )


def launch_on_slurm(plans: Sequence[Plan], wanted: Resources, wait: bool) -> None:
    """Submit all jobs that are neither complete nor queued; with `wait` print the rows at the end."""
    folder = submission.log_folder(common_folder(plans))
    jobs = [job for plan in plans for job in jobs_of(plan)]
    outs = [plan.out for plan in plans]
    with ExitStack() as stack:  # else two launches could both find an empty queue
        for out in outs:
            make_directory(out)
            stack.enter_context(patiently_locked(out))
        busy = submission.in_queue(outs)
        if busy:
            say(f"{len(busy)} jobs are already in the queue, among them {busy[0].run} {busy[0].name}")
        taken = {job.run for job in busy}
        for plan in plans:
            if plan.out in taken and not Run.check(plan.out, *run_config(plan)):
                raise _in_the_queue(plan, busy, "wait for them")
            open_run(plan)
        ids = {job.marker: str(job.job_id) for job in busy}
        try:
            submission.submit(in_submission_order(jobs), wanted, submission.to_slurm(folder), ids)
        finally:
            for out in outs:
                submission.record(out, [job for job in jobs if job.run == out], ids, folder, busy)
    new = len(ids) - len(busy)
    say(f"{new} jobs submitted" + (f"; their logs: {folder}" if new else ""))
    if not wait:
        print(f"watch them with: alma status --watch {' '.join(map(str, outs))}")
        return
    problems = queue.wait(outs)
    for plan in plans:
        with patiently_locked(plan.out):  # the last job may not have appended its rows yet
            run = open_run(plan)
            collect(plan, run)
        print(f"\n{plan.out}\n{summary(run)}")
    if problems:
        raise children.StageFailed("; ".join(map(str, problems)))


def common_folder(plans: Sequence[Plan]) -> Path:
    """The deepest folder that contains all runs; that of a single run is its own."""
    return Path(os.path.commonpath([plan.out.resolve() for plan in plans]))


def show_jobs(plans: Sequence[Plan], wanted: Resources, verbose: bool) -> None:
    """Print which jobs would be submitted; `verbose`: with the input of sbatch."""
    folder = submission.log_folder(common_folder(plans))
    jobs = in_submission_order([job for plan in plans for job in jobs_of(plan)])
    texts, totals = submission.dry_run(jobs, wanted, folder)
    print(*(text if verbose else text.partition("\n")[0] for text in texts), totals, sep="\n")


def announce(plans: Sequence[Plan], machine: Machine, options: Launch) -> None:
    """Print the cost and the settings of all runs; write nothing.

    Raises UserError if a run does not fit `machine` (with --dry-run it only says so), or its directory was
    trained with other settings.
    """
    sizes = {plan.stream: vocabulary_size(plan.stream) for plan in plans}
    if options.megabatches and None in sizes.values():
        say(f"assumed: {options.megabatches} mega-batches, and a dictionary of {_VOCABULARY:,} tokens")
        sizes = {stream: size or _VOCABULARY for stream, size in sizes.items()}
    estimates = [estimate(plan, sizes[plan.stream], machine) for plan in plans]
    say(table(estimates, options.tflops_per_gpu))
    verbose = options.verbose
    if text := describe(plans):
        say(text)
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
    try:
        check(estimates)
    except UserError as error:
        if not options.dry_run:
            raise
        say(f"warning: {error}")
    for plan in [] if options.megabatches else plans:
        Run.check(plan.out, *run_config(plan))


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


def start(words: Sequence[str]) -> None:
    """Run a command line of the launcher."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child and say so, as on Ctrl-C
    try:
        requests = read_requests(words)
        parsed = parse(words)
        options = Launch(parsed.cluster, **given(Launch, parsed))
        resources.check_cluster(parsed, slurm=("wait",), local=("jobs",))
        wanted, jobs = resources.read(parsed), options.jobs or 1
        if options.megabatches and not options.dry_run:
            raise UserError("--megabatches plans without a stream: add --dry-run, or leave it out")
        if options.cluster == "debug" and jobs > 1:
            raise UserError(f"--jobs {jobs}: debug attaches one training to the terminal: leave it out")
        for request in requests:
            if not options.megabatches and not any(map(os.path.exists, request.stream.split(":"))):
                raise UserError(f"{request.stream}: no such directory; make a stream with `alma data`")
        many = options.cluster == "local" and not options.dry_run
        with children.preloaded(_LIBRARIES) if many and not Machine.here().gpus else nullcontext():
            _start(options, requests, wanted, jobs)
    except children.StageFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)


def _planned(request: Request, machine: Machine, megabatches: int | None) -> Plan:
    """The plan of a request. Raises UserError, which names the run."""
    placed = place(request, machine)
    megabatches = megabatches or count_megabatches(request)
    try:
        return make_plan(placed, megabatches)
    except UserError as error:
        raise UserError(f"{request.out}: {error}") from error


def _start(options: Launch, requests: Sequence[Request], wanted: Resources, jobs: int) -> None:
    say("checking the flags of fairseq-train")
    on_slurm = options.cluster == "slurm"
    asked = resolved(requests)
    machine = wanted.machine() if on_slurm else slot(asked, jobs)
    plans = share([_planned(each, machine, options.megabatches) for each in asked])
    announce(plans, machine, options)
    if options.dry_run:
        if on_slurm:
            show_jobs(plans, wanted, options.verbose)
        return
    if on_slurm:
        submission.check(wanted)
        launch_on_slurm(plans, wanted, options.wait)
        return
    if options.cluster == "debug":
        terminal.attached = True
    launch_here(plans, jobs)
    print(f"compare runs with: alma report {' '.join(str(plan.out) for plan in plans)}")
