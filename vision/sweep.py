"""Sweeps of image runs: every combination of the values on a command line, or in an experiment file."""

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alma import experiments
from alma.errors import Parser, UserError
from alma.experiments import check_nesting, folder_part, setting_text
from alma.options import flag_of
from alma.stages import check_share, stages
from vision import presets
from vision.experiment import fitting, run
from vision.learners import all_settings, refusal, resolve
from vision.periods import ImageSource, check_append, check_classes, listed
from vision.presets import Settings

DATA: tuple[str, ...] = ("dataset", "image_size", "resize_size", "megabatches", "stream_seed", "preset")
DATA += ("scenario", "replay_share", "replay_from")
_OF_THE_STREAM = {*DATA} - {"preset", "replay_share", "replay_from"}
_OF_THE_COMMAND = {"cluster", "device", "dry-run", "help", "jobs", "list", "part", "save-interval"}

PERIODS = {"by": None, "manifest": None, "group_by": None, "classes": "all"}
"""Flags of a stream by date, with their defaults."""
USUAL = {"data_root": "data", "device": "auto", "cache_images": None} | PERIODS
"""Defaults of flags that a recorded command leaves out."""

Point = dict[str, Any]
"""Settings of one run: learner, waiting time, replay, seed, values of DATA, settings of the learner."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, as plain values that can be sent to another process."""

    out: Path
    command: str  # the line that starts or resumes this run alone
    dataset: dict[str, Any]  # arguments of data.load
    megabatches: int
    stream_seed: int
    scenario: str | None
    settings: Settings
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of experiment.run
    source: ImageSource | None = None  # of a stream by date

    def run(self) -> None:
        """Start the run or resume it; a complete one stays as it is."""
        from vision.data import load
        from vision.folder import size_of
        from vision.scenarios import make_stream, read_periods

        if self.source:
            with fitting(self.out):
                size = size_of(self.dataset["image_size"], self.dataset["resize_size"])
                stream = read_periods(self.source, size, self.dataset.get("cache_images"))
        else:
            stream = make_stream(load(**self.dataset), self.megabatches, self.stream_seed, self.scenario)
        run(stream, out=self.out, command=self.command, **self.options)


def jobs_of(*sections: argparse.Namespace) -> list[SweepRun]:
    """A job for every combination of values in each section. A setting goes to those learners that take it.

    UserError: no learner takes it, a value is out of range, or `out` holds a sweep and this is a single run,
    or the reverse.
    """
    distinct: dict[Any, tuple[argparse.Namespace, Point, Settings]] = {}
    refusals: dict[str, str] = {}
    known = all_settings()
    for section in sections:
        for point, refused in _points(section):
            for name, reason in refused.items():
                refusals.setdefault(name, reason)
            stages(_megabatches(point), point["waiting_time"])
            preset, source = point.get("preset"), point.get("replay_from", "all")
            share = point.get("replay_share", presets.replay_share(preset, point["replay"]))
            # A given share of 0, the baseline of a sweep, has no use for a source.
            check_share(share, point["replay"], "all" if "replay_share" in point else source)
            settings = {name: value for name, value in point.items() if name in known}
            resolved = resolve(point["dataset"], point["learner"], preset, settings, point["waiting_time"])
            # Other names of the same values are equal, so equal runs are trained once.
            others = {name: value for name, value in point.items() if name not in {*known, "preset"}}
            others |= {"megabatches": _megabatches(point), "replay_share": share}
            others["replay_from"] = source if share else None
            distinct.setdefault((resolved, *sorted(others.items())), (section, point, resolved))
    taken = {name for _, point, _ in distinct.values() for name in point}
    for name, reason in refusals.items():
        if name not in taken:
            raise UserError(reason)
    single = len(distinct) == 1 and not sections[0].experiment
    if out := sections[0].out:
        check_nesting(out, sweep=not single)
    varying = {}  # given settings that differ between the runs of a learner, without its size
    for learner in {point["learner"] for _, point, _ in distinct.values()}:
        mine = [(x, vars(own) | x) for _, x, own in distinct.values() if x["learner"] == learner]
        given = [name for name in (*DATA, *known) if any(name in point for point, _ in mine)]
        several = [name for name in given if len({values.get(name) for _, values in mine}) > 1]
        varying[learner] = [name for name in several if name != "hidden"]
    jobs = [
        _job(section, point, resolved, None if single else varying[point["learner"]])
        for section, point, resolved in distinct.values()
    ]
    places = Counter(job.out for job in jobs)
    if twice := next((place for place, number in places.items() if number > 1), None):
        raise UserError(f"{twice}: two runs of the sweep have this folder: give them one at a time")
    return jobs


def _points(section: argparse.Namespace) -> Iterator[tuple[Point, dict[str, str]]]:
    """Every combination of a section's values, with the settings that its learner refuses, and why."""
    chosen = [name for name in all_settings() if name != "hidden" and getattr(section, name) is not None]
    others = [name for name in DATA if getattr(section, name) is not None]
    names = ["learner", "waiting_time", "hidden", *others, *chosen, "replay", "seed"]
    for values in itertools.product(*(getattr(section, name) or [None] for name in names)):
        point = dict(zip(names, values, strict=True))
        settings = {name: point.pop(name) for name in chosen}
        if point["hidden"] is None:
            del point["hidden"]
        if point["waiting_time"] == "all":
            point["waiting_time"] = _megabatches(point)
        sized = settings | {name: point[name] for name in ("hidden",) if name in point}
        refused = {name: why for name in sized if (why := refusal(point["learner"], name, sized))}
        yield {name: (point | settings)[name] for name in point | settings if name not in refused}, refused


def _megabatches(point: Point) -> int:
    default = presets.megabatches(point["dataset"], point.get("preset"), point.get("scenario"))
    return point.get("megabatches", default)


def _job(
    section: argparse.Namespace, point: Point, resolved: Settings, varying: Sequence[str] | None
) -> SweepRun:
    """The job of a point. In a sweep its folder is called, say, gmoe_w1_h32_router-flat_replay_s0: learner,
    waiting time, size, what else is `varying`, seed. A single run (None) has the folder of the section."""
    folder = ""
    if varying is not None:
        values = vars(resolved) | point
        parts = [point["learner"], f"w{point['waiting_time']}"]
        parts += [] if resolved.whole else [f"h{resolved.hidden}"]
        parts += [folder_part(name, values[name]) for name in varying if values.get(name) is not None]
        folder = "_".join([*parts, *["replay"] * point["replay"], f"s{point['seed']}"])
    out = section.out / folder
    dataset = {"name": point["dataset"], "root": section.data_root, "download": section.download}
    dataset |= {size: point.get(size) for size in ("image_size", "resize_size")}
    if section.cache_images:
        if point.get("scenario") in ("rotated", "permuted"):
            raise UserError(f"--cache-images: --scenario {point['scenario']} has changed images in memory")
        dataset["cache_images"] = section.cache_images
    presets.check_dataset(**dataset)
    if not section.save_interval >= 0:
        raise UserError(f"--save-interval {section.save_interval:g}: give seconds from 0 on")
    options = {name: value for name, value in point.items() if name not in _OF_THE_STREAM}
    options |= {name: getattr(section, name) for name in ("device", "save_interval", "save_stages")}
    # The command has the settings that were given for this run.
    given = {name: value for name, value in point.items() if (name, value) != ("replay", False)}
    if section.source:
        check_classes(listed(section.source)[0], point["waiting_time"], resolved)
        given = {name: value for name, value in given.items() if name not in ("dataset", "megabatches")}
        options |= {"append": section.append, "classes": section.classes}
    given |= {name: getattr(section, name) for name in USUAL if getattr(section, name) != USUAL[name]}
    words = [word for name, value in given.items() for word in (flag_of(name), setting_text(value))]
    words += [flag_of(name) for name in ("download", "save_stages") if getattr(section, name)]
    command = shlex.join(["alma", "images", *words, "--out", str(out)])
    count, seed = _megabatches(point), point["stream_seed" if "stream_seed" in point else "seed"]
    scenario = point.get("scenario")
    return SweepRun(out, command, dataset, count, seed, scenario, resolved, options, section.source)


def check_data(jobs: Sequence[SweepRun]) -> list[str]:
    """Lines about the files of each folder of images, and about each period. UserError: it is none, a stream
    does not fit, or does not go on where the run of a job ended."""
    from vision import folder

    streams = [listed(source) for source in dict.fromkeys(job.source for job in jobs if job.source)]
    lines = [line for found, last in streams for line in (*map(str, found), last)]
    folders = [job for job in jobs if job.dataset["name"] == "folder" and not job.source]
    roots = dict.fromkeys(job.dataset["root"] for job in folders)
    listings = {root: folder.listed(Path(root)) for root in roots}
    sizes = {root: (len(listing.train), 0, len(listing.classes)) for root, listing in listings.items()}
    for job in jobs:
        presets.check_seed(job.options["seed"])
        if job.source:
            check_append(job.out, listed(job.source)[0], job.options["append"])
            continue
        *_, images, _, classes = presets.SIZES.get(job.dataset["name"]) or sizes[job.dataset["root"]]
        presets.check_megabatches(job.megabatches, images, classes if job.scenario == "classes" else 0)
        presets.check_seed(job.stream_seed)
    return [*lines, *map(str, listings.values())]


def read_sections(parser: Parser, words: Sequence[str]) -> list[argparse.Namespace]:
    """The sections of a command line, see `experiments.read_sections`, with the defaults of --dataset and
    --out, and as --megabatches the number of periods. UserError: flags that contradict --by, or need it."""
    sections = experiments.read_sections(parser, words, _OF_THE_COMMAND)
    for section in sections:
        off = PERIODS | {"append": False, "write": None}
        section.source = None
        if section.by:
            for name in ("dataset", "megabatches", "stream_seed", "scenario"):
                if getattr(section, name) not in (None, ["folder"]):
                    raise UserError(f"{flag_of(name)}: leave it out, --by makes the stream")
            if section.manifest and section.data_root != USUAL["data_root"]:
                raise UserError("--data-root: leave it out, paths of --manifest are relative to its folder")
            section.source = ImageSource(section.data_root, section.by, section.manifest, section.group_by)
            section.dataset, section.megabatches = ["folder"], [len(listed(section.source)[0])]
        elif given := [name for name, value in off.items() if getattr(section, name) != value]:
            raise UserError(f"{flag_of(given[0])} needs --by, such as --by week")
        section.dataset = section.dataset or ["digits"]
        section.out = section.out or Path("runs", "_".join([*section.dataset, *section.learner]))
    return sections
