"""Train image learners on a stream of mega-batches and compare them: `alma images`."""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # import from the checkout instead of the script's folder, absent with -P
    sys.path[: not sys.flags.safe_path] = [str(Path(__file__).resolve().parent.parent)]

from alma.dates import UNITS
from alma.errors import Parser, UserError, command, number_list
from alma.help_texts import DATA_ROOT, JOBS, SEEDS, SIZE
from alma.options import add_options, names_of, options_of
from alma.protocol import StreamOptions
from alma.tables import as_text
from vision import presets
from vision.experiment import run  # noqa: F401  for the package
from vision.learners import LEARNERS, all_settings, owners
from vision.periods import write_stream
from vision.sweep import USUAL, SweepRun, check_data, jobs_of, read_sections

_EXAMPLES = """
examples:
  # scikit-learn's digits with a single model: seconds
  alma images
  alma images --learner sm,ens,gmoe --waiting-time 1,5 --seeds 0-2 --jobs 2
  alma images --dataset mnist --download --learner ens --waiting-time 10 --hidden 4
  # a figure of the paper, at a size for a CPU
  alma images experiments/figure7.yaml --size small --jobs 2
"""


def run_all(jobs: Sequence[SweepRun], processes: int) -> list[Exception]:
    """Run the jobs in processes of one thread each; returns the errors of those that failed. Each process
    takes the next GPU. A single job runs in this process: an MLP, which gains nothing from more, in one
    thread unless OMP_NUM_THREADS is set. UserError: the system killed a process."""
    if not jobs:  # an empty part of a sweep
        return []
    if len(jobs) == 1:
        if jobs[0].settings.arch == "mlp" and "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(1)
        jobs[0].run()
        return []
    from alma.workers import Workers

    if downloads := {tuple(job.dataset.items()) for job in jobs if job.dataset.get("download")}:
        from vision.data import load

        for dataset in downloads:  # once, not in each process
            load(**dict(dataset))
    failed: list[Exception] = []
    began = time.monotonic()
    count = multiprocessing.get_context("spawn").Value("i", 0)
    setup = partial(_prepare, count, jobs[0].options["device"])
    with (
        tempfile.TemporaryDirectory(prefix="alma-images-") as cache,  # a folder is decoded once, for all
        Workers(processes, setup, flag="--jobs") as workers,
    ):
        cached = {"folder": {"cache_images": cache}}
        tasks = [(replace(job, dataset=cached.get(job.dataset["name"], {}) | job.dataset),) for job in jobs]
        results = workers.run(SweepRun.run, tasks)
        for done, (number, result) in enumerate(results, start=1):
            name, outcome = jobs[number].out.name, "done"
            try:
                result()
            except Exception as error:
                outcome = "failed"
                if not isinstance(error, UserError):
                    traceback.print_exception(error)
                    error = RuntimeError(f"{name}: {type(error).__name__}: {error}")
                failed.append(error)
            left = (time.monotonic() - began) / done * (len(jobs) - done) / 60
            print(f"{done}/{len(jobs)}  {name}: {outcome}  (about {left:.0f} min left)", flush=True)
    return failed


def _prepare(count: Any, device: str) -> None:
    """Set up a worker process; `count` is the number of those set up so far."""
    import torch

    torch.set_num_threads(1)  # idle OpenMP threads spin: two runs on two cores would slow each other down
    with count.get_lock():
        number = count.value
        count.value += 1
    if device in ("auto", "cuda") and (gpus := torch.cuda.device_count()):
        torch.cuda.set_device(number % gpus)


def summarise(places: Sequence[Path], out: Path) -> None:
    """Print the table of all runs in `places` and draw their figures in `out`."""
    from alma.report import compare
    from alma.report.figures import write_figures
    from alma.report.results import find_runs, group, left_out

    for results in group(find_runs(places)):
        titled = compare.titled(results)
        print(titled.title, as_text(titled.cells), sep="\n", end="\n\n")
        print(*left_out(results), *write_figures(results, out), sep="\n")


def parser() -> Parser:
    """The command line: flags of the data, of the runs, and one for each setting of a learner."""
    learners = [f"  {name:5} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in LEARNERS.items()]
    made = Parser(
        prog="python vision/run.py",
        usage="%(prog)s [EXPERIMENT.yaml] [options]",
        description="Train image learners on a stream of mega-batches, test them after each mega-batch, and "
        "compare them. Comma lists make a sweep: each combination is a run in its own folder. Rerun the "
        "command to resume interrupted runs; complete ones are skipped.",
        epilog="\n".join(["learners:", *learners, _EXAMPLES]),
    )
    text = "YAML file of options, without dashes; options of the command line override it"
    made.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT", help=text)
    made.add_argument("--size", metavar="SIZE", help=SIZE)

    add = made.add_argument_group("data", "The data set, and how it is cut into mega-batches.").add_argument
    add("--dataset", **names_of(presets.DATASETS), help="data set (default: digits; with --by, folder)")
    add("--data-root", default=USUAL["data_root"], metavar="DIR", help=DATA_ROOT)
    text = "download missing files with torchvision"
    add("--download", action=argparse.BooleanOptionalAction, default=False, help=text)
    text = "scale images to S x S pixels (default: their own size)"
    add("--image-size", type=number_list, metavar="S", help=text)
    text = "with --image-size: scale the shorter side to R pixels first, then cut out the centre"
    add("--resize-size", type=number_list, metavar="R", help=text)
    text = "with --dataset folder: keep the decoded images in files in DIR, made once, instead of in memory"
    add("--cache-images", metavar="DIR", help=text)
    usual = "MNIST 500, CIFAR-10 and folder 100, digits 20; EMNIST, CIFAR-100 and --preset draft 50"
    text = f"mega-batches of the stream (default: {usual})"
    add("--megabatches", type=number_list, metavar="B", help=text)
    text = (
        "a stream that drifts: each mega-batch has classes of its own, its images rotated or its pixels "
        f"permuted, and a test set of its own (default B: {presets.SCENARIO_MEGABATCHES})"
    )
    add("--scenario", **names_of(presets.SCENARIOS), help=text)
    text = "seed of the partition into mega-batches (default: --seed; of the authors' code: 432)"
    add("--stream-seed", type=number_list, metavar="S", help=text)
    _add_periods(made)
    group = made.add_argument_group("runs", "What is trained in each stage, and on which mega-batches.")
    add, options = group.add_argument, options_of(StreamOptions)
    known = names_of(LEARNERS) | {"metavar": "L,..."}
    add("--learner", **known, default=["sm"], help="learners, listed below (default: sm)")
    text = f"{options['waiting_time'].metadata['help']}; all: the whole stream (default: 1)"
    add("--waiting-time", type=_waits, default=[1], metavar="W,...", help=text)
    replay = [options[name] for name in options if name.startswith("replay")]
    add_options(group, replay, StreamOptions, several=True, changes={"replay": {"default": [False]}})
    settings = all_settings()
    add_options(group, [settings.pop("hidden")], several=True)
    text = f"{SEEDS}; seeds the weights, the data order and the partition into mega-batches (default: 0)"
    add("--seed", "--seeds", type=number_list, default=[0], metavar="LIST", help=text)
    text = (
        "settings of the paper, its first draft or the authors' code, or anytime, for a tenth of the paper's "
        "compute, three tenths for a VGG (default: paper; EMNIST, CIFAR-100: draft)"
    )
    add("--preset", **names_of(presets.PRESETS), help=text)

    add = made.add_argument_group("where to run").add_argument
    add("--device", default=USUAL["device"], help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    text = "run directory; of a sweep, the folder of its runs (default: runs/DATASET_LEARNER)"
    add("--out", type=Path, metavar="RUN", help=text)
    add("--jobs", type=int, default=1, metavar="N", help=JOBS)
    cluster = "where to run; slurm: as jobs, with flags of their own: see alma images --cluster slurm --help"
    add("--cluster", choices=("local", "slurm"), default="local", help=f"{cluster} (default: local)")
    part = "train every N-th run from the K-th on, without tables and figures"
    add("--part", type=_part, metavar="K/N", help=part)
    text = "print the cost of each run: FLOPs, minutes, memory; run and write nothing"
    add("--dry-run", action="store_true", help=text)
    add("--list", action="store_true", help="print the run directories, one per line, and exit")
    text = "seconds between two checkpoints (default: 30)"
    add("--save-interval", type=float, default=30.0, metavar="SECONDS", help=text)
    text = "keep the model of every stage, for `alma predict --t` and `alma tsne`"
    add("--save-stages", action=argparse.BooleanOptionalAction, default=False, help=text)

    text = "Settings of learners. Without a value, the preset decides by the data set."
    group = made.add_argument_group("settings", text)
    for name, setting in settings.items():
        having = owners(name)
        whose = f" ({', '.join(having)})" if len(having) < len(LEARNERS) else ""
        changes = {name: {"help": setting.metadata["help"] + whose}}
        add_options(group, [setting], several=True, changes=changes)
    return made


def _add_periods(made: Parser) -> None:
    """Add the flags of streams by date."""
    text = "Images that arrive over time: a mega-batch for each period (docs/weekly-images.md)."
    add = made.add_argument_group("streams by date", text).add_argument
    text = "periods, from the dates of folders (DIR/2026-W03/CLASS/*.jpg), of --manifest or of EXIF; folder: "
    add("--by", choices=("folder", *UNITS), help=f"{text}each folder is one, in the order of their names")
    text = "file .csv, .jsonl or .parquet: path, label, date, maybe split (train, valid, test) of each image"
    add("--manifest", metavar="FILE", help=text)
    add("--group-by", metavar="COLUMN", help="column of the manifest whose equal values are in one split")
    text = "errors count all images, or those of classes that the model has met (default: all)"
    add("--classes", choices=("all", "known"), default="all", help=text)
    add("--append", action="store_true", help="go on with runs, or a stream of --write, of fewer periods")
    text = "write the stream for alma train STREAM --trainer, and train nothing"
    add("--write", type=Path, metavar="STREAM", help=text)


def _waits(text: str) -> list[int | str]:
    """Parse "1,10,all"; `all` stands for the number of mega-batches."""
    parts = (["all"] if part == "all" else number_list(part) for part in text.split(","))
    return list(dict.fromkeys(chain(*parts)))


def _part(text: str) -> tuple[int, int]:
    """Parse "2/10" as (2, 10)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: K/N with K from 1 to N, such as 2/10")
    return int(match[1]), int(match[2])


@command
def main() -> None:
    """Entry point of `python vision/run.py`."""
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("--cluster", nargs="?")
    if where.parse_known_args()[0].cluster == "slurm":  # of another wing, which only starts this command
        os.execv(sys.executable, [sys.executable, "-P", "-m", "slurm.vision", *sys.argv[1:]])
    sections = read_sections(parser(), sys.argv[1:])
    options = sections[0]
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: at least 1")
    jobs = jobs_of(*sections)
    lines = check_data(jobs)
    if options.part:
        first, count = options.part
        jobs = jobs[first - 1 :: count]
    if options.list:
        for job in jobs:
            print(job.out)
        return
    print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
    if options.write and jobs[0].source:
        write_stream(jobs[0].source, options.write, options.append)
        return
    if options.dry_run:
        from vision.estimate import table

        print(table(jobs))
        return
    failed = run_all(jobs, options.jobs)
    if len(failed) < len(jobs) and not options.part:  # other parts may still run
        done = [job.out for job in jobs if job.out.exists()]
        summarise(done if options.experiment else [options.out], options.out)
    if failed:
        several = f"{len(failed)} of {len(jobs)} runs failed: " if len(jobs) > 1 else ""
        message = several + "; ".join(dict.fromkeys(map(str, failed)))
        if all(isinstance(error, UserError) for error in failed):
            raise UserError(message)
        sys.exit("error: " + " ".join(message.split()))


if __name__ == "__main__":
    main()
