"""Run a whole chain of stages of a language-model learner; the same command goes on where it stopped.

python -m slurm.launch STREAM --learner gmoe --out RUN --grow-experts 2 -- --max-update 400 ...
python -m slurm.launch experiments/table2/gmoe_w1_base.yaml --stream STREAM --size small
"""

import argparse
import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.files import locked, make_directory
from alma.records import Run
from alma.report import as_text
from alma.stages import stages
from alma.stream import FileInfo, Stream, is_stream
from slurm import child
from slurm.estimate import check, count_units, estimate, table
from slurm.experiments import experiment_files, is_experiment, read_experiment
from slurm.flags import Flags, read_flags
from slurm.machine import Machine
from slurm.plan import LEARNERS, MEMBERS, ROUTERS, Plan, Request, make_plan, reshard_command
from slurm.progress import say
from slurm.stage import run_stage, run_untrained


def parser() -> Parser:
    """The command line, as far as the `--`."""
    arguments = Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner L --out RUN [options] -- [flags of fairseq-train]\n"
        "       %(prog)s EXPERIMENT.yaml... [--size S] [--stream STREAM] [options] [-- flags]",
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
        "of files) with settings, see slurm/experiments.py",
    )
    add("--stream", metavar="STREAM", help="for experiments: what they train on")
    add("--size", metavar="S", help="for experiments: a file in sizes/ beside them, such as small")
    add("--learner", choices=LEARNERS, help="sm, moe: one model; ens, gens: ensembles; umix, gmoe")
    add("--out", type=Path, metavar="RUN", help="run directory to make or to go on with")
    add("--cluster", choices=("local",), default="local", help="where the stages run (default: here)")
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
    return arguments


def read_requests(words: Sequence[str]) -> list[Request]:
    """The command line as requests: launcher flags up to the first `--`, flags of fairseq-train after it."""
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:split])
    flags = read_flags(words[split + 1 :])
    experiments = [Path(each) for each in options.what if is_experiment(Path(each))]
    if not experiments:
        return [_request(options, flags)]
    if len(experiments) < len(options.what):
        raise UserError("give a stream, or experiments (.yaml), whose stream is --stream; not both")
    requests: dict[Path, Request] = {}
    for file in experiment_files(experiments):
        own_words, own_flags = read_experiment(file, options.size)
        try:
            merged = parser().parse_args([*own_words, *words[:split]])  # the last of two options counts
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        merged.what = [merged.stream]
        request = _request(merged, {**own_flags, **flags})
        if requests.setdefault(request.out, request) != request:
            raise UserError(f"{file}: another experiment goes to {request.out} too: give one at a time")
    return list(requests.values())


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
        run = open_run(request, plan)
        run_untrained(plan, run)
        for spec in plan.stages:
            run_stage(spec, run, plan.max_update)
    print(summary(run))


def announce(requests: Sequence[Request], plans: Sequence[Plan]) -> None:
    """Say what all runs will take. UserError: what is left of one does not fit this machine."""
    machine = Machine.here()
    estimates = [
        estimate(plan, count_units(request.stream), machine)
        for request, plan in zip(requests, plans, strict=True)
    ]
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
        plans = [make_plan(request, count_megabatches(request)) for request in requests]
        announce(requests, plans)
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
