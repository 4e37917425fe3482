"""Sweeps of image runs: every combination of the values on a command line, or in an experiment
file."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import UserError
from alma.options import flag_of
from alma.stages import check_share, stages
from alma.sweeps import (
    check_nesting,
    common_folder,
    folder_parts,
    seed_part,
    setting_text,
    varying,
)
from vision import alpha, copies, presets, unreadable
from vision.experiment import fitting, run
from vision.image_files import ImageSource, paths_of
from vision.learners import all_settings, resolve
from vision.periods import check_append, check_classes, check_some_classes, listed
from vision.points import DATA, SweepPoint, points_of
from vision.presets import Settings
from vision.sections import USUAL

if TYPE_CHECKING:
    from vision.folder import Listing

_OF_THE_STREAM = {*DATA} - {"preset", "replay_share", "replay_from"}


@dataclass(frozen=True)
class _Combination:
    """A valid point of a sweep, with its section and all settings of its learner."""

    section: argparse.Namespace
    point: SweepPoint
    settings: Settings

    @property
    def values(self) -> dict[str, Any]:
        """All settings of the learner and the values of the point, by name."""
        return vars(self.settings) | self.point.values

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
    shared: Path | None = None  # folder of data that several processes map

    def run(self) -> None:
        """Start the run or resume it; a complete one stays as it is."""
        from vision import shared
        from vision.data import load
        from vision.decoding import size_of
        from vision.scenarios import make_stream, read_periods

        if self.source:
            with fitting(self.out):
                size = size_of(self.dataset["image_size"], self.dataset["resize_size"])
                stream = read_periods(self.source, size, self.dataset.get("cache_images"))
        else:
            if self.shared:
                dataset = shared.load(self.shared, self.dataset)
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
    named = {learner: _varying(group) for learner, group in of_learner.items()}
    jobs = []
    for combination in combinations:
        out = combination.section.out
        if not is_single:
            out = out / _folder(combination, named[combination.point.learner])
        jobs.append(_job(combination, out))
    folder = common_folder(job.out for job in jobs)
    if folder:
        conflict = "two runs of the sweep have this folder"
        raise UserError(f"{folder}: {conflict}: give them one at a time")
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
    given_names: set[str] = set()
    for combination in combinations:
        given_names.update(combination.point.values)
    given_names.discard("hidden")
    names = [name for name in (*DATA, *all_settings()) if name in given_names]
    return varying(names, [combination.values for combination in combinations])


def _folder(combination: _Combination, named: Sequence[str]) -> str:
    """The folder of a run in a sweep, such as gmoe_w1_h32_router-flat_replay_s0: learner, waiting
    time, size, the values of `named`, seed."""
    point = combination.point
    settings = combination.settings
    values = combination.values
    parts = [point.learner, f"w{point.waiting_time}"]
    if not settings.whole:
        parts.append(f"h{settings.hidden}")
    parts += folder_parts({name: values.get(name) for name in named})
    if point.replay:
        parts.append("replay")
    parts.append(seed_part(point.seed))
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
        options["test_past"] = section.test_past
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
        "background": section.background,
        "skip_unreadable": section.skip_unreadable,
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
    for name in ("download", "skip_unreadable", "save_stages"):
        if getattr(section, name):
            words.append(flag_of(name))
    if section.source and section.save_stages is False:
        words.append("--no-save-stages")
    if section.test_past is not None:
        words += ["--test-past", str(section.test_past)]
    return shlex.join(["alma", "images", *words, "--out", str(out)])


def check_data(jobs: Sequence[SweepRun]) -> list[str]:
    """Lines about the files of each folder of images, and about each period.

    UserError: images are missing or tell nothing, a stream does not fit them, or does not continue
    that of the run.
    """
    from vision import folder

    lines = _lines_of_sources(jobs)
    listings: dict[tuple[str, bool], Listing] = {}
    for job in jobs:
        if job.dataset["name"] == "folder" and not job.source:
            key = (job.dataset["root"], job.dataset["skip_unreadable"])
            if key not in listings:
                listings[key] = folder.listed(Path(key[0]), key[1])
                lines += _lines_of_folder(listings[key], job)
    for job in jobs:
        presets.check_seed(job.options["seed"])
        if job.source:
            periods, _ = listed(job.source)
            only_test = job.options.get("only_test", False)
            check_append(job.out, periods, job.options["append"], only_test)
            continue
        if job.dataset["name"] == "folder":
            listing = listings[job.dataset["root"], job.dataset["skip_unreadable"]]
            images = len(listing.train)
            classes = len(listing.classes)
        else:
            _, _, images, _, classes = presets.SIZES[job.dataset["name"]]
        by_classes = job.scenario == "classes"
        presets.check_megabatches(job.megabatches, images, classes if by_classes else 0)
        presets.check_seed(job.stream_seed)
    return lines


def _lines_of_folder(listing: "Listing", job: SweepRun) -> list[str]:
    """Lines about the files of a folder. UserError: its classes tell nothing."""
    root = Path(job.dataset["root"])
    copies.check_classes(str(root / "train"), listing.classes, listing.train)
    lines = [
        str(listing),
        unreadable.line(listing.unreadable),
        copies.deeper_line(listing.train, root / "train"),
    ]
    lines += copies.lines(listing)
    lines.append(alpha.line(listing.paths(), job.dataset["background"]))
    return [line for line in lines if line]


def _lines_of_sources(jobs: Sequence[SweepRun]) -> list[str]:
    """Lines about the images of streams by date. UserError: their classes tell nothing."""
    from vision.image_sizes import resized_lines

    lines = []
    for source in dict.fromkeys(job.source for job in jobs if job.source):
        periods, about_files = listed(source)
        check_some_classes(source, periods)
        lines += [*map(str, periods), about_files]
        alpha_line = alpha.line(paths_of(periods), source.background)
        if alpha_line:
            lines.append(alpha_line)
    keeping_size = [job.source for job in jobs if job.source and not job.dataset["image_size"]]
    for source in dict.fromkeys(keeping_size):
        lines += resized_lines(source)
    return lines
