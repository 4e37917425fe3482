"""Run and draw the figures and tables of both versions of the paper, and of dated streams: `alma
reproduce`.

experiments/index.yaml says which experiments each is drawn from. This command starts the tools that
run them and draw the result. Rerun it to resume after an interruption: the tools run only what is
missing.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.errors import Parser, UserError, command, require_extra
from alma.experiments import read_settings
from alma.files import make_directory
from alma.help_texts import DATA_ROOT, JOBS
from alma.options import flag_of, given
from alma.tables import as_text
from slurm.engine import children
from slurm.engine.resources import Resources, add_cluster, add_flags, check_cluster

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SIZES = ("small", "medium", "saturated", "paper")
DATA = {"small": "digits", "medium": "mnist"}
"""The data set of all image figures at a size; at sizes not listed each figure has its own."""
TABLE2 = "table2"
TIME = "time"
TEXT = (TABLE2, TIME)  # experiments of language models, and folders of their runs
MODELS = {
    "small": ("tiny",),
    "saturated": ("saturated_small", "saturated"),
    "paper": ("base", "large"),
}
"""The model sizes of the rows of Table 2, by --size."""
_LOAD = "import sys; from alma.errors import command; from vision.data import load; "
_LOAD += "command(lambda: load(sys.argv[1], sys.argv[2], sys.argv[3:] == ['download']))()"
_DATA_SET = re.compile("cifar100?|e?mnist")
_EXAMPLES = """\
examples:
  alma reproduce --list
  alma reproduce figure7 --size small
  alma reproduce all --size small --jobs 2
  alma reproduce figure7 --size medium --download
  alma reproduce time --stream stream_git
  alma reproduce all --size medium --cluster slurm --partition long
"""


class Command(NamedTuple):
    """A command line, and the folder in which to start it (None: here)."""

    words: list[str]
    folder: Path | None = None

    def __str__(self) -> str:
        return "$ " + shlex.join(
            ["python" if word == sys.executable else word for word in self.words]
        )


def tool(module: str, *words: object, folder: Path | None = None) -> Command:
    return Command([sys.executable, "-m", module, *map(str, words)], folder)


def index() -> dict[str, dict[str, Any]]:
    """Figures and tables by name."""
    return read_settings(EXPERIMENTS / "index.yaml")


def commands(
    name: str, record: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[Command]:
    """The commands that run and draw a figure or table. UserError: its stream is missing."""
    experiments = [key for key in record["experiments"] if key in TEXT]
    if experiments:
        yield from _commands_of_text(name, record, experiments[0], options)
    else:
        yield from _commands_of_images(name, record, options)


def _commands_of_text(
    name: str, record: Mapping[str, Any], experiment: str, options: argparse.Namespace
) -> Iterator[Command]:
    """Commands for rows of Table 2, or for runs on streams with dates."""
    place = (options.out / options.size).resolve()
    rows = record["experiments"][experiment].split()
    is_table = experiment == TABLE2
    models = MODELS[options.size] if is_table else ("small",)
    stream = options.stream and options.stream.resolve()
    if stream is None and is_table and options.size == "small":
        stream = place / "stream"
        yield Command(["sh", str(EXPERIMENTS / "streams/small.sh"), str(stream)])
    if stream is None:
        recipe = f"size {models[-1]} of {EXPERIMENTS / experiment}.yaml"
        raise UserError(f"{name} needs the stream of {recipe}: make it, and give it with --stream")
    for model in models:  # the launcher is started in the folder `place`
        words = [EXPERIMENTS / f"{experiment}.yaml", f"runs={','.join(rows)}", "--size", model]
        words += ["--stream", stream]
        if not is_table:
            words += ["--seeds", "0-2"]
        yield tool("slurm.launch", *words, *_where(options, "--jobs", options.jobs), folder=place)
    shown = [place / "runs" / TIME]
    if is_table:
        shown = [place / "runs" / TABLE2 / f"{row}_{model}" for model in models for row in rows]
        shown += ["--table", "lm"]
    yield tool("alma.report", *shown, "--figures", "lm", "--out", place / name)


def _commands_of_images(
    name: str, record: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[Command]:
    """Commands for sweeps of image runs."""
    place = options.out / options.size
    flags_of_size = record.get("flags", {}).get(options.size, "")
    suffix = re.sub("[- ]+", "-", flags_of_size[1:])
    root = ["--data-root", options.data_root] if options.data_root else []
    size = ["--size", options.size] if options.size in DATA else []
    drawn_runs: list[str] = []
    for key, text in record["experiments"].items():
        file, *flags = f"{text} {flags_of_size}".split()
        folder = _DATA_SET.sub(DATA.get(options.size, r"\g<0>"), key) + suffix
        words = [EXPERIMENTS / file, *size, *flags, "--out", place / "runs" / folder]
        runs = children.ask(tool("vision.run", *words, "--list").words, file).splitlines()
        local_flags = ("--jobs", options.jobs, "--part", "1/1")
        yield tool("vision.run", *words, *root, *_where(options, *local_flags))
        if key.endswith("-stages"):
            yield tool("vision.tsne", *runs, *root, "--out", place / name / "tsne.png")
        else:
            drawn_runs += runs
    shown = [*dict.fromkeys(drawn_runs), "--figures", "vision"]
    drawn = [figure for figure in record["drawn"] if figure != "tsne"]
    yield tool("alma.report", *shown, "--draw", ",".join(drawn), "--out", place / name)


def _where(options: argparse.Namespace, *local_flags: object) -> tuple[object, ...]:
    """Flags that say where runs are trained: `local_flags`, or SLURM jobs with flags of theirs."""
    if options.cluster == "slurm":
        return ("--cluster", "slurm", "--wait", *_resource_flags(options))
    return local_flags


def _resource_flags(options: argparse.Namespace) -> Iterator[str]:
    """The flags of jobs that were given, with their values."""
    for name, value in given(Resources, options).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            yield from (flag_of(name), str(one))


_RECORDED_SMALL = "ALMA's own runs of this size, not those just made, showed"
_RECORDED_REAL = "ALMA's own runs on real data showed"


def make(name: str, record: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Run and draw a figure or table; return what was found, and where. Exits if a tool fails."""
    out = options.out / options.size / name
    began = time.monotonic()
    for step in list(commands(name, record, options)):
        print(f"\n{name} {step}", flush=True)
        code = run(step)
        if code:
            sys.exit(code)
    shows = re.compile(rf"(^|_)({'|'.join(record['drawn'])})(_[hB]\d+)*$")
    files = [
        file for file in (*out.glob("*.png"), *out.glob("table*.md")) if shows.search(file.stem)
    ]
    finding = f"{name}: {record.get('beyond', 'paper')}: {record['finding']}"
    for key, where in (("small", _RECORDED_SMALL), ("real", _RECORDED_REAL)):
        if key in record and (key == "real" or options.size == "small"):
            finding += f"; {where}: {record[key]}"
    seconds = f"{name}: {time.monotonic() - began:.0f} s"
    return "\n".join([": ".join([seconds, *map(str, sorted(files))]), finding])


def run(one: Command) -> int:
    """Run a command; return its exit code as a shell would."""
    if one.folder:
        make_directory(one.folder)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, **children.OWN_MODULES, "PATH": path}
    code = subprocess.run(one.words, cwd=one.folder, env=environment, check=False).returncode
    return code if code >= 0 else 128 - code


def chosen(options: argparse.Namespace, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names to reproduce; all: those of the paper. UserError: no such name or size."""
    if not options.figures:
        raise UserError("give a figure or table, such as figure7, or all; --list shows them")
    paper = [name for name in records if "beyond" not in records[name]]
    every = [name for name in paper if options.size in _sizes(records[name])]
    names: list[str] = []
    for figure in options.figures:
        names += every if figure == "all" else [figure]
    for name in names:
        if name not in records:
            raise UserError(f"{name}: no such figure that needs runs; --list shows them")
        sizes = _sizes(records[name])
        if options.size not in sizes:
            raise UserError(
                f"{name} has no --size {options.size}: give --size {' or '.join(sizes)}"
            )
    return list(dict.fromkeys(names))


def _sizes(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The sizes at which a figure or table can be reproduced."""
    if "beyond" in record:
        return ("small",)
    return ("small", "saturated" if TABLE2 in record["experiments"] else "medium", "paper")


def parser() -> Parser:
    reproduce_parser = Parser(
        prog="alma reproduce",
        usage="%(prog)s FIGURE... [options]",
        description="Run and draw the figures and tables of both versions of the paper, and the "
        "benchmark of streams with dates. Rerun the command to resume after an interruption.",
        epilog=_EXAMPLES,
    )
    add = reproduce_parser.add_argument
    figures = "such as figure7, table2, draft-figure3; all: those of the paper; or time"
    add("figures", nargs="*", metavar="FIGURE", help=figures)
    add(
        "--list",
        action="store_true",
        help="print all figures and tables with data, runs and cost, and exit",
    )
    size = "small: for a CPU, without a download; medium: image figures on MNIST, B = 50; "
    size += "saturated: language models with the paper's tokens a parameter, on a CPU; "
    size += "paper: the paper's settings "
    add("--size", choices=SIZES, default="small", help=f"{size}(default: small)")
    out = "folder for runs, figures and tables (default: reproduced)"
    add("--out", type=Path, default=Path("reproduced"), metavar="DIR", help=out)
    add("--data-root", type=Path, metavar="DIR", help=f"with --size medium or paper: {DATA_ROOT}")
    add("--download", action="store_true", help="download missing image data sets with torchvision")
    stream = "stream of the language models; without it, an error names its recipe, or --size "
    stream += "small makes one"
    add("--stream", type=Path, metavar="STREAM", help=stream)
    add("--jobs", type=int, default=1, metavar="N", help=JOBS)
    add("--dry-run", action="store_true", help="print the commands, run nothing")
    add_cluster(reproduce_parser.add_argument_group("where to run"), "local", "slurm")
    add_flags(reproduce_parser, Resources(), "training, or array of image runs")
    return reproduce_parser


def _read_words() -> argparse.Namespace:
    """The command line. UserError: its flags contradict --cluster, or there is no SLURM."""
    options = parser().parse_args()
    check_cluster(options, slurm=())
    if options.cluster == "slurm" and options.jobs != 1:
        raise UserError("--jobs: on this machine only: leave it out, or --cluster slurm")
    return options


def data_sets(records: list[dict[str, Any]], size: str) -> set[str]:
    """The image data sets of the records' experiments at a size."""
    folders = [folder for record in records for folder in record["experiments"]]
    matches = [_DATA_SET.search(folder) for folder in folders if folder not in TEXT]
    return {DATA.get(size, match[0]) for match in matches if match}


def _require_extras(records: Sequence[Mapping[str, Any]]) -> None:
    """UserError: a package that an experiment needs is missing."""
    for record in records:
        is_text = any(name in TEXT for name in record["experiments"])
        require_extra("text" if is_text else "images", "alma reproduce")


@command
@children.failures_in_one_line()
def main() -> None:
    options = _read_words()
    records = index()
    if options.list:
        lines = [["name", "runs: small", "paper", "cost: small", "paper", "data, what it shows"]]
        for name, record in records.items():
            about = f"{record['data']}: {record['shows']}"
            lines.append([name, *map(str, record["runs"]), *record["cost"], about])
        print(as_text(lines, left=(0, -1)))
        return
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give 1 or more")
    names = chosen(options, records)
    if options.dry_run:
        for name in names:
            print(f"\n{name}", *commands(name, records[name], options), sep="\n")
        return
    _require_extras([records[name] for name in names])
    # Before any run, read each image data set that the figures need (with --download, fetch it).
    for data in sorted(data_sets([records[name] for name in names], options.size) - {"digits"}):
        words = [sys.executable, "-c", _LOAD, data, str(options.data_root or "data")]
        if options.download:
            words.append("download")
        code = run(Command(words))
        if code:
            sys.exit(code)
    summary: list[str] = []
    try:
        for name in names:
            summary.append(make(name, records[name], options))
    finally:
        print("", *summary, sep="\n")
