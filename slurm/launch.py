"""Run a whole chain of stages of a language-model learner; the same command goes on where it stopped.

python -m slurm.launch STREAM --learner gmoe --out RUN --grow-experts 2 -- --max-update 400 ...
python -m slurm.launch experiments/table2/gmoe_w1_base.yaml --stream STREAM --size small lr=1e-3
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.files import locked, make_directory
from alma.records import Run
from alma.report import as_text
from alma.stages import stages
from alma.stream import FileInfo, Stream, is_stream
from slurm import child, queue, resources, submit
from slurm.estimate import check, count_units, estimate, table
from slurm.experiments import experiment_files, is_experiment, read_experiment, read_overrides
from slurm.flags import Flags, read_flags
from slurm.local import run_side_by_side, slot
from slurm.machine import Machine
from slurm.plan import LEARNERS, MEMBERS, ROUTERS, Plan, Request, make_plan, reshard_command
from slurm.progress import say
from slurm.resources import Resources
from slurm.stage import collect, evaluate_untrained, run_stage
from slurm.unit import patiently_locked

_OF_THE_MACHINE = {"--cluster", "--dry-run", "--wait", "--jobs"}
_OF_THE_MACHINE |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Resources)}


def parser() -> Parser:
    """The command line, as far as the `--`."""
    arguments = Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner L --out RUN [options] -- [flags of fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [key=value...] [--size S] [--stream STREAM] [options] [-- flags]",
        description="Train a language model on a stream of mega-batches, stage by stage, and evaluate it "
        "after each. After an interruption the same command goes on where it stopped; when the stream has "
        "got longer, it trains the new stages.",
        allow_abbrev=False,
    )
    add = arguments.add_argument
    add(
        "what",
        nargs="+",
        metavar="STREAM|EXPERIMENT",
        help="a stream made by data_prep, or a fairseq-preprocess directory to cut up; or files (or folders "
        "of files) with settings, see slurm/experiments.py, and key=value: any option by its name, or a flag "
        "of fairseq-train that the experiments have. It holds for all of them, before what files say; --key "
        "and what follows `--` come before it",
    )
    add("--stream", metavar="STREAM", help="for experiments: what they train on")
    add("--size", metavar="S", help="for experiments: a file in sizes/ beside them, such as small")
    add("--learner", choices=LEARNERS, help="sm, moe: one model; ens, gens: ensembles; umix, gmoe")
    add("--out", type=Path, metavar="RUN", help="run directory to make or to go on with")
    add(
        "--cluster",
        choices=("local", "debug", "slurm"),
        default="local",
        help="where the stages run (default: here, one after the other); debug: here, with the terminal, so "
        "that breakpoint() works in the process of fairseq-train (not in more of them: one GPU, no workers)",
    )
    add("--dry-run", action="store_true", help="with --cluster slurm: print what sbatch would get")
    add("--wait", action="store_true", help="with --cluster slurm: wait for the end, and fail if a job did")
    add("--members", type=int, metavar="N", help=f"ens, umix: how many (default: {MEMBERS})")
    add("--waiting-time", type=int, metavar="W", default=1, help="mega-batches to wait for (default: 1)")
    add("--replay", action="store_true", help="train on everything seen so far")
    add("--from-scratch", action="store_true", help="start every stage with a new model")
    add(
        "--update-multiplier",
        type=int,
        metavar="X",
        default=1,
        help="train X times --max-update (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="S", help="of weights and data order (default: 0)")
    add("--seeds", type=_seeds, metavar="A-B,C", help="a run for each, in RUN_s0 and so on")
    add("--grow-experts", metavar="N[,N...]", help="gmoe: experts to add at each growth (default: 2)")
    add("--grow-router", choices=ROUTERS, help="gmoe: how to split a router (default: preserve)")
    add("--grow-optimizer", choices=("reset", "copy"), help="gmoe: its state after growth (default: reset)")
    add(
        "--context-window",
        type=int,
        metavar="N",
        default=0,
        help="tokens of context in evaluation (default: 0)",
    )
    add("--stages", type=int, metavar="N", help="stop after N stages; later, more of them go on from there")
    add("--name", help="to tell the run apart in reports")
    add(
        "--jobs",
        type=int,
        metavar="N",
        help="on this machine: trainings side by side (default: 1), each on GPUs of its own",
    )
    resources.add_flags(arguments)
    return arguments


def _seeds(text: str) -> list[int]:
    """`0-2,5` as [0, 1, 2, 5]."""
    ends = [part.split("-") for part in text.split(",")]
    if not all(len(pair) <= 2 and all(end.isdecimal() for end in pair) for pair in ends):
        raise argparse.ArgumentTypeError(f"{text}: give seeds such as 0-2 or 0,3")
    return list(dict.fromkeys(s for pair in ends for s in range(int(pair[0]), int(pair[-1]) + 1)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The launcher's options: up to the first `--`; the last of two that contradict each other counts."""
    return parser().parse_intermixed_args(list(itertools.takewhile(lambda word: word != "--", words)))


def read_requests(words: Sequence[str]) -> list[Request]:
    """The command line as requests: launcher flags up to the first `--`, flags of fairseq-train after it."""
    options = parse(words)
    flags = read_flags(list(itertools.dropwhile(lambda word: word != "--", words))[1:])
    options.what, overrides = read_overrides(options.what)
    experiments = [Path(each) for each in options.what if is_experiment(Path(each))]
    if not experiments:
        if overrides:
            key = next(iter(overrides))
            raise UserError(
                f"{key}=: key=value is for experiments (.yaml), and none is given: give --{key}; a flag of "
                "fairseq-train after `--`"
            )
        return _for_seeds(options, _request(options, flags))
    if len(experiments) < len(options.what):
        raise UserError("give a stream, or experiments (.yaml), whose stream is --stream; not both")
    requests: dict[Path, Request] = {}
    for file in experiment_files(experiments):
        own_words, own_flags = read_experiment(file, options.size, overrides)
        if machine := sorted(_OF_THE_MACHINE & {word.partition("=")[0] for word in own_words}):
            raise UserError(f"{file}: {machine[0]} says where to run: give {machine[0]} on the command line")
        try:
            merged = parse([*own_words, *words])
        except UserError as error:
            other = "; key=value is for flags that the file has, others go after `--`" if overrides else ""
            raise UserError(f"{file}: {error}{other}") from None
        merged.what = [merged.stream]
        for request in _for_seeds(merged, _request(merged, {**own_flags, **flags})):
            if requests.setdefault(request.out, request) != request:
                raise UserError(f"{file}: another experiment goes to {request.out} too: give one at a time")
    return list(requests.values())


def _for_seeds(options: argparse.Namespace, request: Request) -> list[Request]:
    """The request, or with --seeds one for each."""
    if options.seeds is None:
        return [request]
    out = request.out
    return [
        dataclasses.replace(request, seed=seed, out=out.with_name(f"{out.name}_s{seed}"))
        for seed in options.seeds
    ]


def _request(options: argparse.Namespace, flags: Flags) -> Request:
    """UserError: an option that is missing, or that is for experiments only."""
    given = vars(options)
    if len(given["what"]) > 1:
        raise UserError(f"{given['what'][1]}: give one stream; shards of one corpus are joined by ':'")
    (stream,) = given["what"]
    if stream != given["stream"] and (given["stream"], given["size"]) != (None, None):
        raise UserError(f"--size and --stream are for experiments (.yaml), and {stream} is none")
    for name in ("learner", "out", *(["stream"] if stream is None else [])):
        if given[name] is None:
            raise UserError(f"give --{name}; see `python -m slurm.launch --help`")
    named = {field.name: given[field.name] for field in dataclasses.fields(Request) if field.name in given}
    flags = {name: words for name, words in flags.items() if words != [f"{name}=false"]}
    return Request(**{**named, "stream": stream, "flags": flags})


def count_megabatches(request: Request) -> int:
    """B: as stream.json says, or as the flags cut an ordinary fairseq-preprocess directory."""
    if is_stream(request.stream):
        return len(Stream.load(request.stream).megabatches)
    asked = subprocess.run(reshard_command(request), capture_output=True, text=True)
    if asked.returncode:
        problem = child.last_problem(asked.stderr)
        raise child.failure("cutting the data", asked.returncode, problem, f"data: {request.stream}")
    return json.loads(asked.stdout)["megabatches"]


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


def open_run(request: Request, plan: Plan) -> Run:
    """The plan's run directory. A finished run goes on when its stream has got longer.

    UserError: it holds a run with other settings, or one whose last stage ended early because its stream did.
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
    return Run.open(plan.out, plan.config | identity(request.stream), plan.seeds, growing)


def launch(request: Request, plan: Plan) -> None:
    """Run one request to its end, all stages on this machine, one after the other; print its rows."""
    make_directory(plan.out)
    with locked(plan.out):
        _check_queue(plan)
        run = open_run(request, plan)
        evaluate_untrained(plan)
        collect(plan, run)
        for spec in plan.stages:
            run_stage(plan, spec, run)
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
        jobs = ", ".join(dict.fromkeys(str(unit.job) for unit in busy))
        raise UserError(
            f"{plan.out}: jobs {jobs} of this run are in SLURM's queue: give --cluster slurm, or cancel them "
            f"with: python -m slurm.cancel {plan.out}"
        )


def launch_on_slurm(
    requests: Sequence[Request], plans: Sequence[Plan], wanted: Resources, dry: bool, wait: bool
) -> None:
    """Submit all that is not complete, and not in the queue; `dry`: print what sbatch would get instead."""
    folder = submit.log_folder(plans)
    if dry:
        paper = submit.Paper()
        submit.submit(plans, wanted, submit.to_paper(folder, paper), {})
        print("\n".join([*paper.texts, str(paper)]))
        return
    outs = [plan.out for plan in plans]
    jobs: dict[Path, str] = {}
    with ExitStack() as stack:  # two launches at a time would both find nothing in the queue
        for request, plan in zip(requests, plans, strict=True):
            make_directory(plan.out)
            stack.enter_context(patiently_locked(plan.out))
            open_run(request, plan)
        busy = queue.live_units([out for out in outs if queue.on_cluster(out)])
        if busy:
            say(f"{len(busy)} units are in the queue already, {busy[0].run} {busy[0].name} among them")
        free = [plan for plan in plans if plan.out not in {unit.run for unit in busy}]
        try:
            submit.submit(free, wanted, submit.to_slurm(folder), jobs)
        finally:
            submit.record(free, jobs, folder)
    say(f"{len(jobs)} units submitted; their logs: {folder}" if jobs else "0 units submitted")
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


def announce(
    requests: Sequence[Request], plans: Sequence[Plan], machine: Machine, strict: bool = True
) -> None:
    """Say what all runs will take. UserError: what is left of one does not fit `machine`, if `strict`."""
    estimates = [
        estimate(plan, count_units(request.stream), machine)
        for request, plan in zip(requests, plans, strict=True)
    ]
    if strict:
        check(estimates)
    say(table(estimates))


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


@command
def main() -> None:
    """Entry point of `python -m slurm.launch`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child and say so, as on Ctrl-C
    try:
        requests = read_requests(sys.argv[1:])
        options = parse(sys.argv[1:])
        resources.check_cluster(options, local=("jobs",))
        plans = [make_plan(request, count_megabatches(request)) for request in requests]
        if options.cluster == "slurm":
            wanted = resources.read(options)
            announce(requests, plans, wanted.machine(), strict=not options.dry_run)
            launch_on_slurm(requests, plans, wanted, options.dry_run, options.wait)
            return
        jobs = 1 if options.jobs is None else options.jobs
        if options.cluster == "debug":
            if jobs > 1:
                raise UserError(f"--jobs {jobs}: only one child can have the terminal: leave it out")
            child.lend_terminal()
        announce(requests, plans, slot(plans, jobs))
        if jobs > 1:
            launch_side_by_side(requests, plans, jobs)
        else:
            for request, plan in zip(requests, plans, strict=True):
                if len(requests) > 1:
                    print(f"\n{request.out}", flush=True)
                launch(request, plan)
    except child.StageFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)
    print(f"compare runs with: python -m alma.report {' '.join(str(request.out) for request in requests)}")


if __name__ == "__main__":
    main()
