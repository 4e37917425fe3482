"""Train image learners on a stream of mega-batches and compare them: `alma images`."""

import argparse
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # import from the checkout instead of the script's folder
    checkout = str(Path(__file__).resolve().parent.parent)
    if sys.flags.safe_path:  # python -P leaves the script's folder out
        sys.path.insert(0, checkout)
    else:
        sys.path[0] = checkout

from alma.dates import UNITS
from alma.errors import Parser, UserError, command, number_list, require_extra
from alma.help_texts import DATA_ROOT, JOBS, SEEDS, SIZE
from alma.options import add_options, names_of, options_of
from alma.protocol import StreamOptions
from alma.tables import as_text
from vision import arrived, presets, unreadable
from vision.dated_stream import write_stream
from vision.experiment import run  # noqa: F401  for the package
from vision.image_files import ImageSource
from vision.learners import LEARNERS, all_settings, owners
from vision.local import run_all
from vision.periods import listed, unreadable_of
from vision.sections import USUAL, read_sections
from vision.sweep import SweepRun, check_data, jobs_of

_EXAMPLES = """
examples:
  # scikit-learn's digits with a single model: seconds
  alma images
  alma images --learner sm,ens,gmoe --waiting-time 1,5 --seeds 0-2 --jobs 2
  alma images --dataset mnist --download --learner ens --waiting-time 10 --hidden 4
  # a figure of the paper, at a size for a CPU
  alma images experiments/figure7.yaml --size small --jobs 2
"""


def summarise(places: Sequence[Path], out: Path) -> None:
    """Print the tables of all runs in `places`, the newest first, and draw figures in `out`."""
    from alma.report import compare, newest
    from alma.report.figures import write_figures
    from alma.report.results import find_runs, group, left_out

    for results in group(find_runs(places)):
        of_newest = newest.titled(results)
        tables = [of_newest] if of_newest else []
        for titled in [*tables, compare.titled(results)]:
            lines = [titled.title, *titled.above, as_text(titled.cells)]
            print(*lines, sep="\n", end="\n\n")
        print(*left_out(results), *write_figures(results, out), sep="\n")


def parser() -> Parser:
    """The command line: flags of the data, of the runs, and one for each setting of a learner."""
    learners = []
    for name, kind in LEARNERS.items():
        summary = (kind.__doc__ or "").splitlines()[0]
        learners.append(f"  {name:5} {summary}")
    command_line = Parser(
        prog="python vision/run.py",
        usage="%(prog)s [EXPERIMENT.yaml] [options]",
        description="Train image learners on a stream of mega-batches, test them after each "
        "mega-batch, and compare them. Comma lists make a sweep: each combination is a run in its "
        "own folder. Rerun the command to resume interrupted runs; complete ones are skipped.",
        epilog="\n".join(["learners:", *learners, _EXAMPLES]),
    )
    command_line.add_argument(
        "experiment",
        nargs="?",
        type=Path,
        metavar="EXPERIMENT",
        help="YAML file of options, without dashes; options of the command line override it",
    )
    command_line.add_argument("--size", metavar="SIZE", help=SIZE)
    _add_data(command_line)
    _add_periods(command_line)
    settings = all_settings()
    _add_runs(command_line, settings.pop("hidden"))
    _add_where(command_line)
    _add_settings(command_line, settings)
    return command_line


def _add_data(command_line: Parser) -> None:
    """Add the flags of the data set and the stream."""
    text = "The data set, and how it is cut into mega-batches."
    add = command_line.add_argument_group("data", text).add_argument
    text = "data set (default: digits; with --by, folder)"
    add("--dataset", **names_of(presets.DATASETS), help=text)
    add("--data-root", default=USUAL["data_root"], metavar="DIR", help=DATA_ROOT)
    text = "download missing files with torchvision"
    add("--download", action=argparse.BooleanOptionalAction, default=False, help=text)
    text = "scale images to S x S pixels (default: their own size)"
    add("--image-size", type=number_list, metavar="S", help=text)
    text = "with --image-size: scale the shorter side to R pixels first, then cut out the centre"
    add("--resize-size", type=number_list, metavar="R", help=text)
    text = (
        "with --dataset folder: keep the decoded images in files in DIR, made once, instead of in "
        "memory"
    )
    add("--cache-images", metavar="DIR", help=text)
    text = "images with alpha are composed on this colour, a name or #rrggbb (default: white)"
    add("--background", default=USUAL["background"], metavar="COLOUR", help=text)
    text = "leave out images that cannot be decoded, and list them in unreadable.csv in --out"
    add("--skip-unreadable", action="store_true", help=text)
    usual = "MNIST 500, CIFAR-10 and folder 100, digits 20; EMNIST, CIFAR-100 and --preset draft 50"
    text = f"mega-batches of the stream (default: {usual})"
    add("--megabatches", type=number_list, metavar="B", help=text)
    text = (
        "a stream that drifts: each mega-batch has classes of its own, its images rotated or its "
        "pixels permuted, and a test set of its own (default B: "
        f"{presets.SCENARIO_MEGABATCHES})"
    )
    add("--scenario", **names_of(presets.SCENARIOS), help=text)
    text = "seed of the partition into mega-batches (default: --seed; of the authors' code: 432)"
    add("--stream-seed", type=number_list, metavar="S", help=text)


def _add_periods(command_line: Parser) -> None:
    """Add the flags of streams by date."""
    text = "Images that arrive over time: a mega-batch for each period (docs/weekly-images.md)."
    add = command_line.add_argument_group("streams by date", text).add_argument
    text = (
        "periods, from the dates of folders (DIR/2026-W03/CLASS/*.jpg), of --manifest or of EXIF; "
        "folder: each folder is one, in the order of their names"
    )
    add("--by", choices=("folder", *UNITS), help=text)
    text = (
        "file .csv, .jsonl or .parquet: path, label, date, maybe split (train, valid, test) of "
        "each image"
    )
    add("--manifest", metavar="FILE", help=text)
    text = "column of the manifest whose equal values are in one split"
    add("--group-by", metavar="COLUMN", help=text)
    text = "errors count all images, or those of classes that the model has met (default: all)"
    add("--classes", choices=("all", "known"), default="all", help=text)
    text = (
        "go on with runs, or a stream of --write, of fewer periods: earlier models are tested on "
        "what has arrived, then the new stages are trained"
    )
    add("--append", action="store_true", help=text)
    text = "test the models of the newest N earlier stages only on what has arrived (default: all)"
    add("--test-past", type=whole_number, metavar="N", help=text)
    text = "write the stream for alma train STREAM --trainer, and train nothing"
    add("--write", type=Path, metavar="STREAM", help=text)


def _add_runs(command_line: Parser, hidden: Field) -> None:
    """Add the flags of stages, learners and presets; `hidden` is the setting of the size."""
    text = "What is trained in each stage, and on which mega-batches."
    group = command_line.add_argument_group("runs", text)
    add = group.add_argument
    options = options_of(StreamOptions)
    learners = names_of(LEARNERS) | {"metavar": "L,..."}
    text = "learners, listed below (default: sm)"
    add("--learner", **learners, default=["sm"], help=text)
    text = f"{options['waiting_time'].metadata['help']}; all: the whole stream (default: 1)"
    add("--waiting-time", type=_waits, default=[1], metavar="W,...", help=text)
    replay = [options[name] for name in options if name.startswith("replay")]
    changes = {"replay": {"default": [False]}}
    add_options(group, replay, StreamOptions, sweeps=True, changes=changes)
    add_options(group, [hidden], sweeps=True)
    text = (
        f"{SEEDS}; seeds the weights, the data order and the partition into mega-batches "
        "(default: 0)"
    )
    add("--seed", "--seeds", type=number_list, default=[0], metavar="LIST", help=text)
    text = (
        "settings of the paper, its first draft or the authors' code, or anytime, for a tenth of "
        "the paper's compute, three tenths for a VGG (default: paper; EMNIST, CIFAR-100: draft)"
    )
    add("--preset", **names_of(presets.PRESETS), help=text)


def _add_where(command_line: Parser) -> None:
    """Add the flags of devices, processes and output."""
    add = command_line.add_argument_group("where to run").add_argument
    text = "auto, cpu, cuda, cuda:1, ... (default: auto)"
    add("--device", default=USUAL["device"], help=text)
    text = "run directory; of a sweep, the folder of its runs (default: runs/DATASET_LEARNER)"
    add("--out", type=Path, metavar="RUN", help=text)
    add("--jobs", type=int, default=1, metavar="N", help=JOBS)
    text = (
        "where to run; slurm: as jobs, with flags of their own: see alma images --cluster slurm "
        "--help (default: local)"
    )
    add("--cluster", choices=("local", "slurm"), default="local", help=text)
    text = "train every N-th run from the K-th on, without tables and figures"
    add("--part", type=_part, metavar="K/N", help=text)
    text = "print the cost of each run: FLOPs, minutes, memory; run and write nothing"
    add("--dry-run", action="store_true", help=text)
    text = "print the run directories, one per line, and exit"
    add("--list", action="store_true", help=text)
    text = "print the periods of a stream by date with a hash of their images, and exit"
    add("--list-periods", action="store_true", help=text)
    text = "seconds between two checkpoints (default: 30)"
    add("--save-interval", type=float, default=30.0, metavar="SECONDS", help=text)
    text = (
        "keep the model of every stage, for tests on later periods, `alma predict --t` and `alma "
        "tsne` (default: with --by)"
    )
    add("--save-stages", action=argparse.BooleanOptionalAction, help=text)


def _add_settings(command_line: Parser, settings: Mapping[str, Field]) -> None:
    """Add a flag for each setting, whose help names its learners unless all have it."""
    text = "Settings of learners. Without a value, the preset decides by the data set."
    group = command_line.add_argument_group("settings", text)
    for name, setting in settings.items():
        text = setting.metadata["help"]
        learners = owners(name)
        if len(learners) < len(LEARNERS):
            text += f" ({', '.join(learners)})"
        add_options(group, [setting], sweeps=True, changes={name: {"help": text}})


def _waits(text: str) -> list[int | str]:
    """Parse "1,10,all"; `all` stands for the number of mega-batches."""
    waits: list[int | str] = []
    for part in text.split(","):
        if part == "all":
            waits.append("all")
        else:
            waits += number_list(part)
    return list(dict.fromkeys(waits))


def whole_number(text: str) -> int:
    """Parse a number from 0 on."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0 on, such as 3")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    """Parse "2/10" as (2, 10)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: K/N with K from 1 to N, such as 2/10")
    return int(match[1]), int(match[2])


def _is_for_cluster() -> bool:
    """Whether the command line has `--cluster slurm`, also beside flags of slurm.vision only."""
    cluster = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    cluster.add_argument("--cluster", nargs="?")
    options, _ = cluster.parse_known_args()
    return options.cluster == "slurm"


def _start_on_cluster() -> None:
    """Submit the runs as jobs, each of which runs this command for a part of them.

    slurm.vision is found by its name: the launcher imports no wing, and no wing the launcher.
    """
    sys.argv[0] = "alma images --cluster slurm"  # the program in its errors
    importlib.import_module("slurm.vision.__main__").main()


def sources_of(jobs: Sequence[SweepRun]) -> list[ImageSource]:
    """The images of those jobs that are by date, each source once."""
    return list(dict.fromkeys(job.source for job in jobs if job.source))


def record_arrivals(jobs: Sequence[SweepRun]) -> None:
    """Record the images of streams by date, before runs use them: later ones are late."""
    for source in sources_of(jobs):
        if source.record:
            periods, _ = listed(source)
            arrived.write(source.record, periods)


def _list_unreadable(jobs: Sequence[SweepRun], out: Path) -> None:
    """Write the list of the images that --skip-unreadable leaves out, if there are any."""
    from vision import folder

    faults: dict[str, str] = {}
    for source in sources_of(jobs):
        if source.skip_unreadable:
            faults |= unreadable_of(source)
    roots = set()
    for job in jobs:
        is_folder = job.dataset["name"] == "folder" and not job.source
        if is_folder and job.dataset["skip_unreadable"]:
            roots.add(job.dataset["root"])
    for root in sorted(roots):
        faults |= folder.listed(Path(root), skip_unreadable=True).unreadable
    if faults:
        print(f"{unreadable.write(faults, out)} lists the unreadable images", flush=True)


def _print_list(jobs: Sequence[SweepRun], of_periods: bool) -> None:
    """Print the run directories, or the periods of streams by date with their hashes."""
    if of_periods:
        for source in sources_of(jobs):
            periods, _ = listed(source)
            for period in periods:
                print(period.name, period.sha256)
    else:
        for job in jobs:
            print(job.out)


def exit_with(failed: Sequence[Exception], count: int) -> NoReturn:
    """End with the errors of those runs, of `count`, that failed."""
    message = "; ".join(dict.fromkeys(map(str, failed)))
    if count > 1:
        message = f"{len(failed)} of {count} runs failed: {message}"
    if all(isinstance(error, UserError) for error in failed):
        raise UserError(message)
    sys.exit("error: " + " ".join(message.split()))


@command
def main() -> None:
    """Entry point of `python vision/run.py`."""
    if _is_for_cluster():
        _start_on_cluster()
        return
    sections = read_sections(parser(), sys.argv[1:])
    require_extra("images", "alma images")
    options = sections[0]
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: at least 1")
    jobs = jobs_of(*sections)
    lines = check_data(jobs)
    if options.part:
        first, count = options.part
        jobs = jobs[first - 1 :: count]
    if options.list or options.list_periods:
        _print_list(jobs, options.list_periods)
        return
    for line in lines:
        print(line, flush=True)
    if options.write and jobs[0].source:
        _list_unreadable(jobs, options.write)
        write_stream(jobs[0].source, options.write, options.append)
        return
    if options.dry_run:
        from vision import late_cost
        from vision.estimate import table

        print(table(jobs), *late_cost.lines(jobs), sep="\n")
        return
    record_arrivals(jobs)
    _list_unreadable(jobs, options.out)
    failed = run_all(jobs, options.jobs)
    if len(failed) < len(jobs) and not options.part:  # other parts may still run
        places = [options.out]
        if options.experiment:
            places = [job.out for job in jobs if job.out.exists()]
        summarise(places, options.out)
    if failed:
        exit_with(failed, len(jobs))


if __name__ == "__main__":
    main()
