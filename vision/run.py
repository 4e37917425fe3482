"""Train image learners on a stream of mega-batches, test them after each mega-batch, and compare them.

    python vision/run.py                                    # digits, a single model: seconds
    python vision/run.py --learner sm,ens,gmoe --waiting-time 1,5 --seeds 0-2 --jobs 2
    python vision/run.py --dataset mnist --download --learner ens --waiting-time 10 --hidden 4

Comma lists make a sweep: each combination is a run in its own folder. The same command skips complete runs
and resumes interrupted ones.
"""

import argparse
import itertools
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # import from the checkout instead of the script's folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from alma.errors import Parser, UserError, command, number_list
from alma.records import Run
from alma.report import compare
from alma.report.figures import write_figures
from alma.report.results import find_runs, group
from alma.report.tables import as_text
from alma.workers import Workers
from vision import presets
from vision.data import MegaBatchStream, load
from vision.experiment import run
from vision.learners import LEARNERS, all_settings, owners, refusal, resolve


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, as plain values that can be sent to another process."""

    out: Path
    dataset: dict[str, Any]  # arguments of data.load
    megabatches: int
    stream_seed: int
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of experiment.run

    def run(self) -> Run:
        """Start the run, resume it, or return a complete one."""
        stream = MegaBatchStream(load(**self.dataset), self.megabatches, self.stream_seed)
        return run(stream, out=self.out, **self.options)


def jobs_of(options: argparse.Namespace) -> list[SweepRun]:
    """One job for every combination of the comma lists. A setting goes to those learners that take it.
    UserError: no learner takes it, or a value is out of range."""
    dataset = {"name": options.dataset, "root": options.data_root, "download": options.download}
    dataset["image_size"] = options.image_size
    chosen = {name: getattr(options, name) for name in all_settings() if name != "hidden"}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    for name in chosen:
        refusals = [refusal(learner, name, chosen) for learner in options.learner]
        if all(refusals):
            raise UserError(refusals[0])
    megabatches = options.megabatches
    if megabatches is None:
        megabatches = presets.megabatches(options.dataset, options.preset)
    seeds = options.seeds or [options.seed]
    axes = list(itertools.product(options.learner, options.waiting_time, options.hidden or [None], seeds))
    common = ("replay", "preset", "device", "save_interval", "save_stages")
    jobs = []
    for learner, waiting_time, hidden, seed in axes:
        settings = {name: value for name, value in chosen.items() if not refusal(learner, name, chosen)}
        if hidden is not None:
            settings["hidden"] = hidden
        resolved = resolve(options.dataset, learner, options.preset, settings, waiting_time)
        replay = "_replay" if options.replay else ""
        name = f"{learner}_w{waiting_time}_h{resolved.hidden}{replay}_s{seed}"
        run_options = {"learner": learner, "waiting_time": waiting_time, "seed": seed, **settings}
        run_options |= {key: getattr(options, key) for key in common}
        out = options.out if len(axes) == 1 else options.out / name
        stream_seed = seed if options.stream_seed is None else options.stream_seed
        jobs.append(SweepRun(out, dataset, megabatches, stream_seed, run_options))
    return jobs


def run_all(jobs: Sequence[SweepRun], processes: int) -> list[Exception]:
    """Run the jobs in processes of one thread each; returns the errors of those that failed.

    UserError: the system killed a process.
    """
    if len(jobs) == 1:
        jobs[0].run()
        return []
    failed: list[Exception] = []
    started = time.monotonic()
    with Workers(processes, _one_thread, terminate=True, flag="--jobs") as workers:
        for done, (number, seconds) in enumerate(workers.run(_timed, [(job,) for job in jobs]), start=1):
            line = _outcome(seconds, jobs[number], failed)
            left = (time.monotonic() - started) / done * (len(jobs) - done)
            print(f"{done}/{len(jobs)}  {line}  (about {left / 60:.0f} min left)", flush=True)
    return failed


def _one_thread() -> None:
    torch.set_num_threads(1)  # idle OpenMP threads spin: two runs on two cores would slow each other down


def _timed(job: SweepRun) -> float:
    started = time.monotonic()
    job.run()
    return time.monotonic() - started


def _outcome(seconds: Callable[[], float], job: SweepRun, failed: list[Exception]) -> str:
    try:
        return f"{job.out.name}: {seconds():.0f} s"
    except UserError as error:
        failed.append(error)
        return f"{job.out.name}: failed"
    except Exception as error:
        traceback.print_exception(error)
        failed.append(RuntimeError(f"{job.out.name}: {type(error).__name__}: {error}"))
        return f"{job.out.name}: failed"


def summarise(out: Path) -> None:
    """Print the table of all runs in `out` and draw their figures there."""
    for results in group(find_runs([out])):
        print(compare.heading(results), as_text(compare.table(results)), sep="\n", end="\n\n")
        print(*write_figures(results, out), sep="\n")


def parser() -> argparse.ArgumentParser:
    """The command line: flags of the data, of the runs, and one for each setting of a learner."""
    lines = [f"  {name:5} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in LEARNERS.items()]
    made = Parser(
        prog="python vision/run.py",
        description=__doc__,
        epilog="\n".join(["learners:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_data_flags(made.add_argument_group("data"))
    _add_run_flags(made.add_argument_group("runs"))
    _add_settings(made.add_argument_group("settings", "default: that of the preset for the data set"))
    return made


def _add_data_flags(group: Any) -> None:
    add = group.add_argument
    add("--dataset", default="digits", choices=presets.DATASETS)
    add("--data-root", default="data", metavar="DIR", help="folder of the data set (default: data)")
    add("--download", action="store_true", help="download missing files with torchvision")
    add("--image-size", type=int, metavar="S", help="scale images to S x S (--dataset folder)")
    defaults = "MNIST 500, CIFAR-10 and folder 100, digits 20; EMNIST, CIFAR-100 and --preset draft 50"
    add("--megabatches", type=int, metavar="B", help=f"mega-batches of the stream (default: {defaults})")
    add("--stream-seed", type=int, metavar="S", help="seed of the partition (default: --seed; authors: 432)")


def _add_run_flags(group: Any) -> None:
    add = group.add_argument
    add("--learner", type=_learners, default=["sm"], metavar="L,...", help="any of " + ", ".join(LEARNERS))
    wait = "mega-batches per stage (default: 1)"
    add("--waiting-time", type=number_list, default=[1], metavar="W,...", help=wait)
    add("--replay", action="store_true", help="train on all mega-batches received so far")
    add("--hidden", type=number_list, metavar="H,...", help=all_settings()["hidden"].metadata["help"])
    add("--seed", type=int, default=0, help="seed of weights, order and partition (default: 0)")
    add("--seeds", type=number_list, metavar="0-2", help="several seeds: a range or a list")
    source = "of the paper, its first draft or the authors' code (default: paper; EMNIST, CIFAR-100: draft)"
    add("--preset", choices=presets.PRESETS, help=f"settings {source}")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    folder = "run directory; of a sweep, the folder of its runs (default: runs/DATASET_LEARNER)"
    add("--out", type=Path, metavar="RUN", help=folder)
    add("--jobs", type=int, default=1, metavar="N", help="runs of a sweep at a time (default: 1)")
    add(
        "--part",
        type=_part,
        metavar="K/N",
        help="every N-th run from the K-th on; no tables and figures",
    )
    add("--list", action="store_true", help="print the run directories, one per line, and exit")
    interval = "time between checkpoints (default: 30)"
    add("--save-interval", type=float, default=30.0, metavar="SECONDS", help=interval)
    add("--save-stages", action="store_true", help="keep the model of every stage (for vision.tsne)")


def _add_settings(group: Any) -> None:
    for name, setting in all_settings().items():
        if name == "hidden":
            continue
        having = owners(name)
        whose = "" if len(having) == len(LEARNERS) else f" ({', '.join(having)})"
        kind: dict[str, Any] = {"type": setting.type, "choices": setting.metadata["choices"]}
        if setting.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        group.add_argument(presets.flag_of(name), help=setting.metadata["help"] + whose, **kind)


def _learners(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in LEARNERS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(LEARNERS)}")
    return list(dict.fromkeys(names))


def _part(text: str) -> tuple[int, int]:
    """Parse "2/10" as (2, 10)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: K/N with K from 1 to N, such as 2/10")
    return int(match[1]), int(match[2])


@command
def main() -> None:
    """Entry point of `python vision/run.py`."""
    options = parser().parse_args()
    if options.out is None:
        options.out = Path("runs", f"{options.dataset}_{'_'.join(options.learner)}")
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: at least 1")
    jobs = jobs_of(options)
    if options.part:
        first, count = options.part
        jobs = jobs[first - 1 :: count]
    if options.list:
        for job in jobs:
            print(job.out)
        return
    failed = run_all(jobs, options.jobs)
    if len(failed) < len(jobs) and not options.part:  # other parts may still run
        summarise(options.out)
    if failed:
        several = f"{len(failed)} of {len(jobs)} runs failed: " if len(jobs) > 1 else ""
        message = several + "; ".join(dict.fromkeys(map(str, failed)))
        if all(isinstance(error, UserError) for error in failed):
            raise UserError(message)
        sys.exit("error: " + " ".join(message.split()))


if __name__ == "__main__":
    main()
