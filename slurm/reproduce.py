"""Run and draw the figures and tables of both versions of the paper, and of dated streams: `alma reproduce`.

experiments/index.yaml says which experiments each is drawn from. This command starts the tools that run them
and draw the result. Rerun it to resume after an interruption: it runs only what is missing.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from alma.errors import Parser, UserError, closest, command
from alma.experiments import read_settings
from alma.files import make_directory, write_json_atomic
from alma.help_texts import DATA_ROOT, JOBS
from alma.schema import AMOUNT, parse_json
from alma.tables import as_text
from slurm.engine import children

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SIZES = ("small", "medium", "saturated", "paper")
DATA = {"small": "digits", "medium": "mnist"}
"""The data set of all image figures, by size; at the paper's size each has its own."""
TABLE2, TIME = TEXT = ("table2", "time")
"""Experiments of language models, below EXPERIMENTS, and the folders of their runs."""
MODELS = {"small": ("tiny",), "saturated": ("saturated_small", "saturated"), "paper": ("base", "large")}
"""The sizes of the rows of Table 2, by size."""
_LOAD = (
    "import sys; from alma.errors import command; from vision.data import load; "
    "command(lambda: load(sys.argv[1], sys.argv[2], sys.argv[3:] == ['download']))()"
)
_DATA_SET = re.compile("cifar100?|e?mnist")
_PRINTED = 12  # words of a command
_EXAMPLES = """\
examples:
  alma reproduce --list
  alma reproduce figure7 --size small
  alma reproduce all --size small --jobs 2
  alma reproduce figure7 --size medium --download
  alma reproduce time --stream stream_git
"""


class Command(NamedTuple):
    """A command line, and the folder in which to start it (None: here)."""

    words: list[str]
    folder: Path | None = None

    def __str__(self) -> str:
        words = ["python" if word == sys.executable else word for word in self.words]
        hidden = len(words) - _PRINTED
        return f"$ {shlex.join(words[:_PRINTED])}" + (f" ... ({hidden} more)" if hidden > 0 else "")


class _Done(msgspec.Struct):
    """done.json of a figure or table: what it was made by."""

    commands: list[list[str]]
    experiments: str
    """Digest of the experiment files."""
    seconds: AMOUNT


class Outcome(NamedTuple):
    """A line of the summary."""

    name: str
    state: str
    seconds: float = 0
    files: Sequence[Path] = ()
    code: int = 0


def tool(module: str, *words: object, folder: Path | None = None) -> Command:
    return Command([sys.executable, "-m", module, *map(str, words)], folder)


def index() -> dict[str, dict[str, Any]]:
    """Figures and tables by name. UserError: there are no experiments here."""
    if not EXPERIMENTS.is_dir():
        raise UserError(f"{EXPERIMENTS} is missing: install ALMA from a checkout (pip install -e .)")
    return read_settings(EXPERIMENTS / "index.yaml")


def commands(name: str, record: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Command]:
    """The commands that run the experiments of a figure or table, and the one that draws it.

    UserError: language models need a stream, and there is none.
    """
    place = options.out / options.size
    if texts := record["experiments"].keys() & set(TEXT):  # rows of Table 2, or runs on streams with dates
        (experiment,) = texts
        place, rows = place.resolve(), record["experiments"][experiment].split()
        is_table = experiment == TABLE2
        models = MODELS[options.size] if is_table else ("small",)
        stream = options.stream and options.stream.resolve()
        if stream is None and is_table and options.size == "small":
            stream = place / "stream"
            yield Command(["sh", str(EXPERIMENTS / "streams/small.sh"), str(stream)])
        if stream is None:
            recipe = f"size {models[-1]} of {EXPERIMENTS / experiment}.yaml"
            raise UserError(f"{name} needs the stream of {recipe}: make it, and give it with --stream")
        for model in models:  # the launcher starts in `place`
            words = [EXPERIMENTS / f"{experiment}.yaml", f"runs={','.join(rows)}", "--size", model]
            words += ["--stream", stream, *([] if is_table else ["--seeds", "0-2"]), "--jobs", options.jobs]
            yield tool("slurm.launch", *words, folder=place)
        runs = [place / "runs" / TABLE2 / f"{row}_{model}" for model in models for row in rows]
        shown = [*runs, "--table", "lm"] if is_table else [place / "runs" / TIME]
        yield tool("alma.report", *shown, "--figures", "lm", "--out", place / name)
        return
    own = record.get("flags", {}).get(options.size, "")
    root = ["--data-root", options.data_root] if options.data_root else []
    drawn_runs: list[str] = []
    for key, text in record["experiments"].items():
        file, *flags = f"{text} {own}".split()
        folder = _DATA_SET.sub(DATA.get(options.size, r"\g<0>"), key) + re.sub("[- ]+", "-", own[1:])
        size = ["--size", options.size] if options.size in DATA else []
        words = [EXPERIMENTS / file, *size, *flags, "--out", place / "runs" / folder]
        found = children.ask(tool("vision.run", *words, "--list").words, file).splitlines()
        yield tool("vision.run", *words, *root, "--jobs", options.jobs, "--part", "1/1")
        if key.endswith("-stages"):
            yield tool("vision.tsne", *found, *root, "--out", place / name / "tsne.png")
        else:
            drawn_runs += found
    yield tool("alma.report", *dict.fromkeys(drawn_runs), "--figures", "vision", "--out", place / name)


def make(name: str, record: Mapping[str, Any], options: argparse.Namespace) -> Outcome:
    """Run and draw a figure or table, unless that is done; with --dry-run only print the commands."""
    out = options.out / options.size / name
    todo = list(commands(name, record, options))
    if options.dry_run:
        print(f"\n{name}", *todo, sep="\n")
        return Outcome(name, "dry run")
    experiments = sorted(set(EXPERIMENTS.rglob("*.yaml")) - {EXPERIMENTS / "index.yaml"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in experiments)).hexdigest()
    content = {"commands": [one.words for one in todo], "experiments": digest}
    marker, files = out / "done.json", drawn(out, record["drawn"])
    with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one counts as none
        done = parse_json(marker.read_bytes(), _Done)
        if files and (done.commands, done.experiments) == tuple(content.values()):
            return Outcome(name, "complete", done.seconds, files)
    started = time.monotonic()
    for one in todo:
        print(f"\n{name} {one}", flush=True)
        if code := run(one, record["drawn"] if one is todo[-1] else ()):
            return Outcome(name, f"failed, exit code {code}", time.monotonic() - started, code=code)
    seconds, files = round(time.monotonic() - started, 1), drawn(out, record["drawn"])
    if files:
        make_directory(out)
        write_json_atomic(marker, content | {"seconds": seconds})
    return Outcome(name, "done" if files else "done, nothing drawn", seconds, files)


def run(one: Command, wanted: Sequence[str] = ()) -> int:
    """Run a command; return its exit code as a shell would.

    `wanted`: figures of a report, which then does not say why its runs allow no others.
    """
    if one.folder:
        make_directory(one.folder)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, **children.OWN_MODULES, "PATH": path}
    output = subprocess.PIPE if wanted else None
    done = subprocess.run(one.words, cwd=one.folder, env=environment, check=False, stdout=output, text=True)
    for line in (done.stdout or "").splitlines():
        remark = re.match(r"\w+_B\d+ (\w+): ", line)
        if not (remark and remark[1] not in wanted):
            print(line)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def drawn(out: Path, names: Sequence[str]) -> list[Path]:
    """The files in `out` that show a figure or table, by parts of their names."""
    shows = re.compile(rf"(^|_)({'|'.join(names)})(_[hB]\d+)*$")
    files = sorted([*out.glob("*.png"), *out.glob("table*.md")])
    return [file for file in files if shows.search(file.stem)]


def finding(name: str, record: Mapping[str, Any], size: str) -> str:
    """What the paper found, and at the small size what was found there."""
    seen = f"; at this size: {record['small']}" if size == "small" else ""
    return f"{name}: {record.get('beyond', 'paper')}: {record['finding']}{seen}"


def chosen(options: argparse.Namespace, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names to reproduce; all: those of the paper at this size. UserError: no such name or size."""
    if not options.figures:
        raise UserError("give a figure or table, such as figure7, or all; --list shows them")
    names: list[str] = []
    for name in options.figures:
        if name == "all":
            paper = [own for own in records if "beyond" not in records[own]]
            names += [own for own in paper if options.size in _sizes(records[own])]
        elif name in ("figure6", "draft-figure2"):
            raise UserError(f"{name} is a drawing of a growth step: there is nothing to run")
        elif name not in records:
            number = re.findall(r"\d+", name)
            near = closest(name, [own for own in records if re.findall(r"\d+", own) == number])
            raise UserError(f"{name}: no such figure; " + (f"did you mean {near}?" if near else "see --list"))
        elif options.size not in (sizes := _sizes(records[name])):
            raise UserError(f"{name} has no --size {options.size}: give --size {' or '.join(sizes)}")
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def _sizes(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The sizes at which a figure or table can be reproduced."""
    if "beyond" in record:
        return ("small",)
    return ("small", "saturated" if TABLE2 in record["experiments"] else "medium", "paper")


def parser() -> Parser:
    made = Parser(
        prog="python -m slurm.reproduce",
        usage="%(prog)s FIGURE... [options]",
        description="Run and draw the figures and tables of both versions of the paper, and the benchmark of "
        "streams with dates. Rerun the command to resume after an interruption; what is complete is skipped.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    figures = "such as figure7, table2, draft-figure3; all: those of the paper; or time"
    add("figures", nargs="*", metavar="FIGURE", help=figures)
    add("--list", action="store_true", help="print all figures and tables with data, runs and cost, and exit")
    size = "small: for a CPU, without a download; medium: image figures on MNIST, B = 50; saturated: "
    size += "language models with the paper's tokens a parameter, on a CPU; paper: the paper's settings "
    add("--size", choices=SIZES, default="small", help=f"{size}(default: small)")
    out = "folder for runs, figures and tables (default: reproduced)"
    add("--out", type=Path, default=Path("reproduced"), metavar="DIR", help=out)
    add("--data-root", type=Path, metavar="DIR", help=f"with --size medium or paper: {DATA_ROOT}")
    add("--download", action="store_true", help="download missing image data sets with torchvision")
    stream = "stream of the language models; --size small makes its own for the paper's, and an error names "
    stream += "the recipe of a missing one"
    add("--stream", type=Path, metavar="STREAM", help=stream)
    add("--jobs", type=int, default=1, metavar="N", help=JOBS)
    add("--dry-run", action="store_true", help="print the commands, run nothing")
    return made


@command
@children.failures_in_one_line()
def main() -> None:
    options, records = parser().parse_args(), index()
    if options.list:
        lines = [["name", "runs: small", "paper", "cost: small", "paper", "data, what it shows"]]
        for name, one in records.items():
            lines.append([name, *map(str, one["runs"]), *one["cost"], f"{one['data']}: {one['shows']}"])
        print(as_text(lines, left=(0, -1)))
        return
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give 1 or more")
    names = chosen(options, records)
    if not options.dry_run:  # read, with --download fetch, each image data set that the figures need
        texts = [folder for name in names for folder in records[name]["experiments"] if folder not in TEXT]
        sets = {DATA.get(options.size) or _DATA_SET.search(text)[0] for text in texts}  # type: ignore[index]
        for name in sorted(sets - {"digits"}):
            words = [sys.executable, "-c", _LOAD, name, str(options.data_root or "data")]
            if code := run(Command(words + ["download"] * options.download)):
                sys.exit(code)
    rows: list[Outcome] = []
    for name in names:
        rows.append(make(name, records[name], options))
        if rows[-1].code:
            break
    if not options.dry_run:
        lines = [["figure", "state", "time", "files"]]
        for row in rows:
            first, *others = [str(file) for file in row.files] or [""]
            lines.append([row.name, row.state, f"{row.seconds:.0f} s", first])
            lines += [["", "", "", other] for other in others]
        findings = [finding(row.name, records[row.name], options.size) for row in rows if not row.code]
        print(f"\n{as_text(lines)}\n", *findings, sep="\n")
    sys.exit(rows[-1].code)


if __name__ == "__main__":
    main()
