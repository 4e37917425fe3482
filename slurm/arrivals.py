"""Test the models of runs on mega-batches that came later, and train nothing: `alma test`."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, command, count
from alma.files import walk
from alma.help_texts import DATA_ROOT, RUNS
from alma.options import add_options, options_of
from alma.records import Run
from slurm.engine import resources
from slurm.lm.run_options import RunOptions

_EXAMPLES = """\
examples:
  alma test runs/sm --dry-run
  alma test runs/sm
"""


def parser() -> Parser:
    """The command line."""
    test_parser = Parser(
        prog="alma test",
        usage="%(prog)s RUN... [options]",
        description="Test the models of runs on the mega-batches that their stream has gained, and "
        "train nothing: the untrained model and the deployed ones of all stages, on the held-out "
        "part of each new mega-batch. `alma train` and `alma images` do the same before they "
        "train. run.json says how: it may name programs that are run, by --trainer or --user-dir.",
        epilog=_EXAMPLES,
    )
    add = test_parser.add_argument
    add("runs", nargs="+", metavar="RUN", help=RUNS)
    add("--stream", metavar="STREAM", help="the stream of the runs, if it has moved")
    past = "test the models of the newest N stages alone; 0: none (default: as the run was "
    past += "launched; else all, and the untrained model)"
    option = [options_of(RunOptions)["test_past"]]
    add_options(test_parser, option, changes={"test_past": {"help": past}})
    dry_run = "print what would be tested and its cost; run and write nothing"
    add("--dry-run", action="store_true", help=dry_run)
    group = test_parser.add_argument_group("where to run")
    resources.add_cluster(group, "local", "slurm")
    jobs = "with --cluster local: models at a time; the GPUs are divided (default: 1)"
    group.add_argument("--jobs", type=count, metavar="N", help=jobs)
    devices = ("auto", "cpu", "cuda")
    device = "of runs of images (default: as the run was launched)"
    group.add_argument("--device", choices=devices, help=device)
    group.add_argument("--data-root", metavar="DIR", help=f"of runs of images: {DATA_ROOT}")
    group.add_argument("--wait", action="store_true", help=resources.WAIT)
    resources.add_flags(test_parser, job="test")
    return test_parser


@command
def main() -> None:
    """Test what is there."""
    options = parser().parse_args()
    resources.check_cluster(options, slurm=("wait",), local=("jobs",))
    runs = _recorded(options.runs)
    if not runs:
        raise UserError(f"{', '.join(options.runs)}: no run has begun: rerun its launch command")
    of_images = [run for run in runs if "dataset" in run.config]
    of_text = [run for run in runs if "dataset" not in run.config]
    if of_text:
        _test_with("slurm.lm.arrivals", of_text, options)
    if of_images:
        options.jobs = options.jobs or 1
        _test_with("vision.arrivals", of_images, options)


def _recorded(places: Sequence[str]) -> list[Run]:
    """The runs at and below `places` that have begun. UserError: a place has no run."""
    from slurm.engine import queue  # imports much, so the options are checked first

    folders: dict[Path, Path] = {}
    for place in queue.find(places):
        # A sweep of images that was launched on a cluster has its runs below.
        below = [place]
        if not (place / "run.json").exists():
            below = [Path(folder) for folder, _, files in walk(place) if "run.json" in files]
        for folder in sorted(below):
            folders.setdefault(folder.resolve(), folder)
    return [Run.read(folder) for folder in folders.values()]


def _test_with(module: str, runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Test the runs of one kind with its package, which is imported only now."""
    importlib.import_module(module).test(runs, options)


if __name__ == "__main__":
    main()
