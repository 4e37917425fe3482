"""Sweeps of image runs: every combination of the values on a command line, or in an experiment
file."""

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
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
from vision.learners import all_settings, resolve
from vision.periods import ImageSource, check_append, check_classes, listed
from vision.points import DATA, SweepPoint, points_of
from vision.presets import Settings

_OF_THE_STREAM = {*DATA} - {"preset", "replay_share", "replay_from"}
_OF_THE_COMMAND = {
    "cluster",
    "device",
    "dry-run",
    "help",
    "jobs",
    "list",
    "part",
    "save-interval",
}

PERIODS = {"by": None, "manifest": None, "group_by": None, "classes": "all"}
"""Flags of a stream by date, with their defaults."""
USUAL = {"data_root": "data", "device": "auto", "cache_images": None} | PERIODS
"""Defaults of flags that a recorded command leaves out."""


@dataclass(frozen=True)
class _Combination:
    """A valid point of a sweep, with its section and all settings of its learner."""

    section: argparse.Namespace
    point: SweepPoint
    settings: Settings

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for combinations that give the same results.

        For example, a value given by a preset and the same value given by a flag.
        """
        point = self.point
        data = {name: value for name, value in point.data.items() if name != "preset"}
        data["megabatches"] = point.megabatches
        data["replay_share"] = point.replay_share
        data["replay_from"] = point.replay_from if point.replay_share else None
        run = (point.learner, point.waiting_time, point.replay, point.seed)
        return (self.settings, *run, *sorted(data.items()))


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
            dataset = load(**self.dataset)
            stream = make_stream(dataset, self.megabatches, self.stream_seed, self.scenario)
        run(stream, out=self.out, command=self.command, **self.options)


def jobs_of(*sections: argparse.Namespace) -> list[SweepRun]:
    """A job for each combination of values in each section; equal runs are trained once.

    A setting goes to those learners that take it. UserError: no learner takes it, a value is out of
    range, or `out` holds a sweep and this is a single run, or the reverse.
    """
    combinations = _combinations(sections)
    is_single = len(combinations) == 1 and not sections[0].experiment
    if sections[0].out:
        check_nesting(sections[0].out, sweep=not is_single)
    of_learner: dict[str, list[_Combination]] = {}
    for combination in combinations:
        of_learner.setdefault(combination.point.learner, []).append(combination)
    varying = {learner: _varying(group) for learner, group in of_learner.items()}
    jobs = []
    for combination in combinations:
        folder = ""
        if not is_single:
            folder = _folder(combination, varying[combination.point.learner])
        jobs.append(_job(combination, combination.section.out / folder))
    for place, number in Counter(job.out for job in jobs).items():
        if number > 1:
            conflict = "two runs of the sweep have this folder"
            raise UserError(f"{place}: {conflict}: give them one at a time")
    return jobs


def _combinations(sections: Sequence[argparse.Namespace]) -> list[_Combination]:
    """The distinct combinations of all sections. UserError: as for `jobs_of`."""
    combinations: dict[tuple[Any, ...], _Combination] = {}
    refusals: dict[str, str] = {}
    for section in sections:
        for point, refused in points_of(section):
            for name, reason in refused.items():
                refusals.setdefault(name, reason)
            combination = _Combination(section, point, _resolved(point))
            combinations.setdefault(combination.identity, combination)
    accepted: set[str] = set()
    for combination in combinations.values():
        accepted.update(combination.point.settings)
    for name, reason in refusals.items():
        if name not in accepted:
            raise UserError(reason)
    return list(combinations.values())


def _resolved(point: SweepPoint) -> Settings:
    """All settings of the learner of a point. UserError: a value of the point is out of range."""
    stages(point.megabatches, point.waiting_time)
    # `replay_from` has no effect on a run with an explicit share, such as a sweep's baseline of 0.
    replay_from = "all" if "replay_share" in point.data else point.replay_from
    check_share(point.replay_share, point.replay, replay_from)
    preset = point.data.get("preset")
    dataset = point.data["dataset"]
    return resolve(dataset, point.learner, preset, point.settings, point.waiting_time)


def _varying(combinations: Sequence[_Combination]) -> list[str]:
    """The given values, except the size, in which combinations of one learner differ."""
    values = [combination.point.values for combination in combinations]
    settings = [combination.settings for combination in combinations]
    names = []
    for name in (*DATA, *all_settings()):
        if name == "hidden" or not any(name in given_values for given_values in values):
            continue
        values_of_name = set()
        for given_values, defaults in zip(values, settings, strict=True):
            values_of_name.add(given_values.get(name, getattr(defaults, name, None)))
        if len(values_of_name) > 1:
            names.append(name)
    return names


def _folder(combination: _Combination, varying: Sequence[str]) -> str:
    """The folder of a run in a sweep, such as gmoe_w1_h32_router-flat_replay_s0: learner, waiting
    time, size, the values that are `varying`, seed."""
    point = combination.point
    settings = combination.settings
    values = vars(settings) | point.values
    parts = [point.learner, f"w{point.waiting_time}"]
    if not settings.whole:
        parts.append(f"h{settings.hidden}")
    for name in varying:
        if values.get(name) is not None:
            parts.append(folder_part(name, values[name]))
    if point.replay:
        parts.append("replay")
    parts.append(f"s{point.seed}")
    return "_".join(parts)


def _job(combination: _Combination, out: Path) -> SweepRun:
    """The job of a combination, in the folder `out`."""
    section = combination.section
    point = combination.point
    dataset = _dataset(section, point)
    if not section.save_interval >= 0:
        raise UserError(f"--save-interval {section.save_interval:g}: give seconds from 0 on")
    options = {name: x for name, x in point.values.items() if name not in _OF_THE_STREAM}
    for name in ("device", "save_interval", "save_stages"):
        options[name] = getattr(section, name)
    if section.source:
        periods, _ = listed(section.source)
        check_classes(periods, point.waiting_time, combination.settings)
        options["append"] = section.append
        options["classes"] = section.classes
    return SweepRun(
        out=out,
        command=_command(section, point, out),
        dataset=dataset,
        megabatches=point.megabatches,
        stream_seed=point.stream_seed,
        scenario=point.scenario,
        settings=combination.settings,
        options=options,
        source=section.source,
    )


def _dataset(section: argparse.Namespace, point: SweepPoint) -> dict[str, Any]:
    """The arguments of `data.load`. UserError: they do not fit together."""
    dataset = {
        "name": point.data["dataset"],
        "root": section.data_root,
        "download": section.download,
        "image_size": point.data.get("image_size"),
        "resize_size": point.data.get("resize_size"),
    }
    if section.cache_images:
        if point.scenario in ("rotated", "permuted"):
            reason = f"--scenario {point.scenario} has changed images in memory"
            raise UserError(f"--cache-images: {reason}")
        dataset["cache_images"] = section.cache_images
    presets.check_dataset(**dataset)
    return dataset


def _command(section: argparse.Namespace, point: SweepPoint, out: Path) -> str:
    """The command line of one run, with the values that were given for it."""
    values = point.values
    if not point.replay:
        del values["replay"]
    if section.source:  # its periods are the mega-batches
        del values["dataset"]
        del values["megabatches"]
    for name, default in USUAL.items():
        value = getattr(section, name)
        if value != default:
            values[name] = value
    words = []
    for name, value in values.items():
        words += [flag_of(name), setting_text(value)]
    for name in ("download", "save_stages"):
        if getattr(section, name):
            words.append(flag_of(name))
    return shlex.join(["alma", "images", *words, "--out", str(out)])


def check_data(jobs: Sequence[SweepRun]) -> list[str]:
    """Lines about the files of each folder of images, and about each period.

    UserError: images are missing, a stream does not fit them, or does not continue that of the run.
    """
    from vision import folder

    lines = []
    for source in dict.fromkeys(job.source for job in jobs if job.source):
        periods, about_files = listed(source)
        lines += [*map(str, periods), about_files]
    listings: dict[str, folder.Listing] = {}
    for job in jobs:
        if job.dataset["name"] == "folder" and not job.source:
            root = job.dataset["root"]
            if root not in listings:
                listings[root] = folder.listed(Path(root))
    for job in jobs:
        presets.check_seed(job.options["seed"])
        if job.source:
            periods, _ = listed(job.source)
            check_append(job.out, periods, job.options["append"])
            continue
        if job.dataset["name"] == "folder":
            listing = listings[job.dataset["root"]]
            images = len(listing.train)
            classes = len(listing.classes)
        else:
            _, _, images, _, classes = presets.SIZES[job.dataset["name"]]
        by_classes = job.scenario == "classes"
        presets.check_megabatches(job.megabatches, images, classes if by_classes else 0)
        presets.check_seed(job.stream_seed)
    return [*lines, *map(str, listings.values())]


def read_sections(parser: Parser, words: Sequence[str]) -> list[argparse.Namespace]:
    """The sections of a command line, see `experiments.read_sections`, with the default of --out,
    and the data set and the number of mega-batches of a stream by date.

    UserError: flags contradict --by, or need it.
    """
    sections = experiments.read_sections(parser, words, _OF_THE_COMMAND)
    for section in sections:
        section.source = None
        if section.by:
            section.source = _source(section)
            periods, _ = listed(section.source)
            section.dataset = ["folder"]
            section.megabatches = [len(periods)]
        else:
            _check_without_by(section)
        section.dataset = section.dataset or ["digits"]
        section.out = section.out or Path("runs", "_".join([*section.dataset, *section.learner]))
    return sections


def _source(section: argparse.Namespace) -> ImageSource:
    """The images of a section with --by. UserError: other flags contradict it."""
    for name in ("dataset", "megabatches", "stream_seed", "scenario"):
        if getattr(section, name) not in (None, ["folder"]):
            raise UserError(f"{flag_of(name)}: leave it out, --by makes the stream")
    if section.manifest and section.data_root != USUAL["data_root"]:
        relative = "paths of --manifest are relative to its folder"
        raise UserError(f"--data-root: leave it out, {relative}")
    return ImageSource(section.data_root, section.by, section.manifest, section.group_by)


def _check_without_by(section: argparse.Namespace) -> None:
    """Raise a UserError if a flag is given that needs --by."""
    defaults = PERIODS | {"append": False, "write": None}
    for name, default in defaults.items():
        if getattr(section, name) != default:
            raise UserError(f"{flag_of(name)} needs --by, such as --by week")
