"""Learners of images on a stream of mega-batches: train, test after every mega-batch, compare.

    python vision/run.py                                    # digits, a single model: seconds
    python vision/run.py --learner sm,ens,gmoe --waiting-time 1,5 --seeds 0-2 --jobs 2
    python vision/run.py --dataset mnist --download --learner ens --waiting-time 10 --hidden 4

Comma lists make a sweep: every combination is a run in a folder of its own, and is skipped when it is
done. Interrupted runs go on where they were.
"""

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # a script's own folder is no place to import from; the checkout is
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from alma.errors import Parser, UserError, command, number_list
from alma.records import Run
from alma.report import __main__ as report
from alma.report import figures
from alma.report.results import find_runs, group
from alma.workers import Workers
from vision import presets
from vision.data import MegaBatchStream, load
from vision.experiment import run


@dataclass(frozen=True)
class Job:
    """One run of a sweep, as plain values for another process."""

    out: Path
    dataset: dict[str, Any]  # arguments of data.load
    megabatches: int
    stream_seed: int
    options: dict[str, Any] = field(default_factory=dict)  # of experiment.run

    def run(self) -> Run:
        """Train, or go on, or return what is complete."""
        stream = MegaBatchStream(load(**self.dataset), self.megabatches, self.stream_seed)
        return run(stream, out=self.out, **self.options)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every combination of the comma lists. UserError: settings that no run, or no learner, can have."""
    dataset = {
        "name": options.dataset,
        "root": options.data_root,
        "download": options.download,
        "image_size": options.image_size,
    }
    chosen = {s.name: getattr(options, s.name) for s in fields(presets.Settings) if s.name != "hidden"}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    of = {s.name: s.metadata["learners"] for s in fields(presets.Settings)}
    for name in chosen:
        takers = [learner for learner in options.learner if learner in of[name]]
        if not takers and name != "from_scratch":
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is of {', '.join(of[name])}, and none of them is in --learner")
        if not any(presets.applies(name, learner, chosen) for learner in options.learner):
            presets.require((takers or options.learner)[0], name, chosen)
    megabatches = options.megabatches
    if megabatches is None:
        megabatches = presets.megabatches(options.dataset, options.preset)
    seeds = options.seeds or [options.seed]
    axes = list(itertools.product(options.learner, options.waiting_time, options.hidden or [None], seeds))
    jobs = []
    for learner, waiting_time, hidden, seed in axes:
        settings = {name: value for name, value in chosen.items() if presets.applies(name, learner, chosen)}
        if hidden is not None:
            settings["hidden"] = hidden
        resolved = presets.resolve(  # fails early
            options.dataset, learner, options.preset, settings, waiting_time
        )
        replay = "_replay" if options.replay else ""
        name = f"{learner}_w{waiting_time}_h{resolved.hidden}{replay}_s{seed}"
        run_options = {
            "learner": learner,
            "waiting_time": waiting_time,
            "seed": seed,
            **{
                key: getattr(options, key)
                for key in ("replay", "preset", "device", "save_interval", "save_stages")
            },
            **settings,
        }
        out = options.out if len(axes) == 1 else options.out / name
        stream_seed = seed if options.stream_seed is None else options.stream_seed
        jobs.append(Job(out, dataset, megabatches, stream_seed, run_options))
    return jobs


def run_all(jobs: Sequence[Job], processes: int) -> list[Exception]:
    """Run the jobs in processes of one thread each; returns the errors of those that failed.

    UserError: the system killed a process.
    """
    if not jobs:
        return []
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


def _timed(job: Job) -> float:
    started = time.monotonic()
    job.run()
    return time.monotonic() - started


def _outcome(seconds: Callable[[], float], job: Job, failed: list[Exception]) -> str:
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
    """Print the table of all runs in `out`, and draw its figures there."""
    for results in group(find_runs([out])):
        print(report.heading(results), report.as_text(report.table(results)), sep="\n", end="\n\n")
        print(*figures.draw(results, out), sep="\n")


def parser() -> argparse.ArgumentParser:
    """The command line; a flag for every field of `presets.Settings`."""
    made = Parser(
        prog="python vision/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--dataset", default="digits", choices=presets.DATASETS)
    made.add_argument(
        "--data-root", default="data", metavar="DIR", help="folder of the data set (default: data)"
    )
    made.add_argument("--download", action="store_true", help="let torchvision download what is missing")
    made.add_argument("--image-size", type=int, metavar="S", help="scale the images of a folder to S x S")
    made.add_argument(
        "--learner", type=_names, default=["sm"], metavar="L,...", help="of " + ", ".join(presets.LEARNERS)
    )
    made.add_argument(
        "--megabatches",
        type=int,
        metavar="B",
        help="default: the paper's (MNIST 500, CIFAR-10 100), of EMNIST, CIFAR-100 and --preset draft 50; "
        "digits 20",
    )
    made.add_argument(
        "--waiting-time",
        type=number_list,
        default=[1],
        metavar="W,...",
        help="mega-batches of a stage (default: 1)",
    )
    made.add_argument("--replay", action="store_true", help="train on all mega-batches seen so far")
    made.add_argument(
        "--hidden",
        type=number_list,
        metavar="H,...",
        help="units of a hidden layer, or channels of a convolution",
    )
    made.add_argument("--seed", type=int, default=0, help="of weights, order and partition (default: 0)")
    made.add_argument("--seeds", type=number_list, metavar="0-2", help="several of them: a range or a list")
    made.add_argument(
        "--stream-seed", type=int, metavar="S", help="of the partition alone (the authors' is 432)"
    )
    made.add_argument(
        "--preset",
        choices=presets.PRESETS,
        help="settings of the paper, of its first draft, or of its released code (default: paper; draft for "
        "EMNIST and CIFAR-100, which only the draft has)",
    )
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    made.add_argument(
        "--out",
        type=Path,
        metavar="RUN",
        help="run directory, of a sweep the folder of its runs (default: runs/DATASET_LEARNER)",
    )
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="runs of a sweep at a time")
    made.add_argument(
        "--part",
        type=_part,
        metavar="K/N",
        help="of a sweep every N-th run only, from the K-th on, and no tables and figures",
    )
    made.add_argument(
        "--list", action="store_true", help="run nothing: print the run directories, each on a line"
    )
    made.add_argument(
        "--save-interval",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="between checkpoints (default: 30)",
    )
    made.add_argument(
        "--save-stages", action="store_true", help="keep the model of every stage (for vision.tsne)"
    )
    settings = made.add_argument_group("settings", "default: the preset's for the data set")
    for setting in fields(presets.Settings):
        if setting.name == "hidden":
            continue
        learners = setting.metadata["learners"]
        whose = "" if learners == presets.LEARNERS else f" ({', '.join(learners)})"
        kind: dict[str, Any] = {"type": setting.type, "choices": setting.metadata["choices"]}
        if setting.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        settings.add_argument(
            "--" + setting.name.replace("_", "-"), help=setting.metadata["help"] + whose, **kind
        )
    return made


def _names(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in presets.LEARNERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(presets.LEARNERS)}")
    return list(dict.fromkeys(found))


def _part(text: str) -> tuple[int, int]:
    """ "2/10" as numbers."""
    first, slash, count = text.partition("/")
    numbers = first.isdecimal() and slash and count.isdecimal()
    if not numbers or not 1 <= int(first) <= int(count):
        raise argparse.ArgumentTypeError(f"{text!r}: K/N with K from 1 to N, such as 2/10")
    return int(first), int(count)


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
    if len(failed) < len(jobs) and not options.part:  # other parts may be drawing, or still be running
        summarise(options.out)
    if failed:
        several = f"{len(failed)} of {len(jobs)} runs failed: " if len(jobs) > 1 else ""
        message = several + "; ".join(dict.fromkeys(map(str, failed)))
        if all(isinstance(error, UserError) for error in failed):
            raise UserError(message)
        sys.exit("error: " + " ".join(message.split()))


if __name__ == "__main__":
    main()
