"""Run a whole chain of stages of a language-model learner; the same command goes on where it stopped.

python -m slurm.launch STREAM --learner gmoe --out RUN --grow-experts 2 -- --max-update 400 ...
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, command
from alma.files import locked, make_directory, sha256_file
from alma.records import Run
from alma.report import as_text
from alma.stream import FILE, Stream, is_stream
from slurm import child
from slurm.plan import LEARNERS, Plan, Request, make_plan, read_flags, reshard_command
from slurm.stage import run_stage, run_untrained


def parser() -> Parser:
    """The command line, as far as the `--`."""
    arguments = Parser(
        prog="python -m slurm.launch",
        usage="%(prog)s STREAM --learner sm|gmoe --out RUN [options] -- [flags of fairseq-train]",
        description="Train a language model on a stream of mega-batches, stage by stage, and evaluate it "
        "after each. After an interruption the same command goes on where it stopped.",
        allow_abbrev=False,
    )
    add = arguments.add_argument
    add("stream", metavar="STREAM", help="made by data_prep, or a fairseq-preprocess directory to cut up")
    add("--learner", required=True, choices=LEARNERS, help="one model, or a mixture that grows experts")
    add("--out", required=True, type=Path, metavar="RUN", help="run directory to make or to go on with")
    add("--cluster", choices=("local",), default="local", help="where the stages run (default: here)")
    add("--waiting-time", type=int, default=1, metavar="W", help="mega-batches to wait for (default: 1)")
    add("--replay", action="store_true", help="train on everything seen so far")
    add("--seed", type=int, default=0, metavar="S", help="of weights and data order (default: 0)")
    add("--grow-experts", metavar="N[,N...]", help="gmoe: experts to add at each growth (default: 2)")
    add("--grow-router", choices=("preserve", "copy"), help="gmoe: how to split a router (default: preserve)")
    add("--grow-optimizer", choices=("reset", "copy"), help="gmoe: its state after growth (default: reset)")
    add("--name", help="to tell the run apart in reports")
    return arguments


def read_request(words: Sequence[str]) -> Request:
    """The command line as a request: launcher flags up to the first `--`, flags of fairseq-train after it."""
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    options = vars(parser().parse_args(words[:split]))
    del options["cluster"]
    return Request(**options, flags=read_flags(words[split + 1 :]))


def count_megabatches(request: Request) -> int:
    """B: as stream.json says, or as the flags cut an ordinary fairseq-preprocess directory."""
    if is_stream(request.stream):
        return len(Stream.load(request.stream).megabatches)
    asked = subprocess.run(reshard_command(request), capture_output=True, text=True)
    if asked.returncode:
        problem = child.last_problem(asked.stderr)
        raise child.failure("cutting the data", asked.returncode, problem, f"data: {request.stream}")
    return json.loads(asked.stdout)["megabatches"]


def identity(stream: str) -> dict[str, str]:
    """What tells data apart in run.json: a stream may be moved, for stream.json has all its checksums."""
    if is_stream(stream):
        path = Path(stream).resolve()
        return {"stream": path.name, "stream_sha256": sha256_file(path / FILE)}
    return {"data": ":".join(str(Path(shard).resolve()) for shard in stream.split(":"))}


def run_local(plan: Plan, run: Run) -> None:
    """All stages on this machine, one after the other."""
    run_untrained(plan, run)
    for spec in plan.stages:
        run_stage(spec, run, plan.max_update)


def summary(run: Run) -> str:
    """The rows of a run as a table."""
    lines = [["t", "stage", "experts", "parameters", "perplexity", "TFLOPs", "seconds"]]
    for row in run.rows:
        stage = "-" if row["stage"] is None else row["stage"]
        cells = [row["t"], stage, row["extra"].get("experts", "-"), f"{row['parameters']:,}"]
        cells += [f"{row['value']:,.2f}", f"{row['train_flops'] / 1e12:,.2f}", f"{row['seconds']:,.0f}"]
        lines.append([str(cell) for cell in cells])
    return as_text(lines)


@command
def main() -> None:
    """Entry point of `python -m slurm.launch`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the child and say so, as on Ctrl-C
    try:
        request = read_request(sys.argv[1:])
        plan = make_plan(request, count_megabatches(request))
        make_directory(plan.out)
        with locked(plan.out):
            run = Run.open(plan.out, plan.config | identity(request.stream))
            run_local(plan, run)
    except child.StageFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(1)
    print(summary(run))
    print(f"compare runs with: python -m alma.report {plan.out}")


if __name__ == "__main__":
    main()
