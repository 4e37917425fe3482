"""The models of a matrix: folders of Hugging Face, stages of runs, or names for a command."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alma.errors import UserError, hint
from alma.files import sha256_file, walk
from alma.hub_files import INDEX, TOKENIZER, TRAINING_STATE, WEIGHTS, matching
from alma.markers import deployed_by
from alma.records import Run
from alma.stages import stages
from slurm.matrix.cutoffs import Cutoff, cutoff_of, divide, latest, remedy

_RUN = "run.json"
_ADAPTER = "adapter_config.json"
_EXTENSIONS = re.compile(r"(\.[A-Za-z]\w{0,9})+$")  # such as .json, .tar.gz
_FEWEST = 3  # models of a group, for `alma advise --matrix`


@dataclass(frozen=True)
class TestedModel:
    """A model that exists, and until when it was trained."""

    name: str  # as typed; of a stage RUN/stage_NN
    members: tuple[str, ...]  # what an evaluation gets: paths of an ensemble, or the name
    cutoff: Cutoff
    group: str  # of models that differ by their dates alone
    sha256: str = ""  # of its files; "" until it is computed

    def later(self, periods: Sequence[str]) -> list[str]:
        """The periods after its training; names of periods of one kind sort as their dates do."""
        return [period for period in periods if period > self.cutoff.period]

    def with_checksum(self, of_all_files: bool) -> "TestedModel":
        """The model with the SHA-256 of its files, or of its name if it has none.

        of_all_files: else, in a folder of Hugging Face, of those alone that decide its losses.
        """
        checksums = [_checksum(member, of_all_files) for member in self.members]
        return replace(self, sha256=hashlib.sha256("".join(checksums).encode()).hexdigest())


@dataclass(frozen=True)
class ModelOptions:
    """What the options say about the models."""

    by: str
    cutoffs: Mapping[str, str]  # of --cutoff, by model
    groups: Mapping[str, str]  # of --group
    by_command: bool  # whether a program of the user's tests them


def find_models(names: Sequence[str], options: ModelOptions) -> list[TestedModel]:
    """The models, in the order of the words; of a run those of all its finished stages.

    UserError: no such model, one without a date, two of a group with one date, a group with one
    date only, or an option for another model.
    """
    models: list[TestedModel] = []
    for name in names:
        _check_name(name, "MODEL")
        models += _models_of(name.rstrip("/") or name, options)
    for group in options.groups.values():
        _check_name(group, "--group")
    _check_options(models, options)
    _check_dates(models)
    return models


def _check_name(name: str, place: str) -> None:
    """UserError: a name that would break lines of the matrix, or of a terminal."""
    if not name.isprintable():
        raise UserError(f"{place} {name!r}: a name of printable characters alone: rename it")


def _models_of(name: str, options: ModelOptions) -> Iterator[TestedModel]:
    """The models that a word names."""
    place = Path(name)
    if (place / _RUN).is_file():
        yield from _stages_of(name, place, options)
        return
    run = _run_above(place)
    if run is not None:
        stage = place.resolve().relative_to(run.resolve()).parts[0]
        of_run = [
            model
            for model in _stages_of(str(run), run, options)
            if model.name.endswith(f"/{stage}")
        ]
        for model in of_run:
            yield replace(model, name=name)
        if of_run:
            return
    if not options.by_command:
        _check_folder(place)
    member = str(place.resolve()) if place.exists() else name
    date = options.cutoffs.get(name)
    group = options.groups.get(name)
    if group is None:
        group = _group_of(place, options.by)
    yield TestedModel(name, (member,), cutoff_of(name, date, options.by), group)


def _run_above(place: Path) -> Path | None:
    """The run of which a folder is a stage, or the model of a stage; None: of none."""
    for folder in place.resolve().parents:
        if (folder / _RUN).is_file():
            stage = place.resolve().relative_to(folder).parts[0]
            return folder if stage.startswith("stage_") else None
    return None


def _group_of(place: Path, by: str) -> str:
    """The name of a model without its date, and of a file without its extensions.

    "" if the date is the only difference that it shows.
    """
    name = place.name
    try:
        dated_name = divide(name, by)
        if place.is_file():
            dated_name = divide(_EXTENSIONS.sub("", name), by)
    except UserError:  # several dates, and --cutoff says which one
        return name
    return dated_name.rest if dated_name.date else ""


def _stages_of(name: str, place: Path, options: ModelOptions) -> Iterator[TestedModel]:
    """The deployed models of the finished stages of a run. UserError: it has none."""
    run = Run.read(place)
    if "dataset" in run.config:
        problem = "a run of images, whose matrix `alma test` and `alma advise` have"
        raise UserError(f"{name}: {problem}: leave it out")
    schedule = stages(run.config["megabatches"], run.config["waiting_time"])
    rows = {row["t"]: row for row in run.rows}
    for stage in schedule:
        if not (place / f"stage_{stage.index:02}" / "result.json").exists():
            continue
        deployed = deployed_by(place, stage.last)
        if deployed.models != len(deployed.checkpoints):
            problem = f"stage {stage.index} deploys an ensemble of models of several stages"
            raise UserError(f"{name}: {problem}: give the folders of single models")
        name_of_stage = f"{name}/stage_{stage.index:02}"
        members = tuple(str(checkpoint.resolve()) for checkpoint in deployed.checkpoints)
        if not options.by_command:
            for member in members:
                _check_checkpoint(Path(member), name, stage.last)
        yield TestedModel(
            name=name_of_stage,
            members=members,
            cutoff=_cutoff_of_stage(name_of_stage, run, rows.get(stage.last), options),
            group=options.groups.get(name_of_stage, options.groups.get(name, place.resolve().name)),
        )


def _cutoff_of_stage(
    name: str, run: Run, row: Mapping[str, Any] | None, options: ModelOptions
) -> Cutoff:
    """Until when the model after a stage was trained; `row`: of its last mega-batch."""
    date = options.cutoffs.get(name)
    periods = row["extra"].get("matrix_periods", ()) if row else ()
    if date is not None or row is None or not periods:
        if date is None:
            raise UserError(f"{name}: its stream has no periods: {remedy(name)}")
        return cutoff_of(name, date, options.by)
    last = periods[max(row["trained_on"]) - 1]
    dates = [last.rpartition("..")[2], *filter(None, [run.config.get("cutoff")])]
    return latest(dates, options.by, "its run")


def _check_checkpoint(checkpoint: Path, run: str, t: int) -> None:
    """UserError: transformers cannot load the checkpoint of a run as it is."""
    is_folder = (checkpoint / "config.json").is_file()
    if not is_folder or (checkpoint / _ADAPTER).is_file():
        words = f"alma export {run} --t {t} --out DIR"
        problem = f"the checkpoint of mega-batch {t} is no folder of Hugging Face"
        remedies = f"write one by `{words}` for each T, and test these folders, or give --command"
        raise UserError(f"{run}: {problem}: {remedies}")
    _check_folder(checkpoint)


def _check_folder(place: Path) -> None:
    """UserError: no folder of a model of Hugging Face with its tokenizer."""
    other = "give a folder of save_pretrained, or --command with your own program"
    if not place.exists():
        raise UserError(f"{place}: no such folder: {other}")
    if not (place / "config.json").is_file():
        lacking = (
            "adapters without their model" if (place / _ADAPTER).is_file() else "no config.json"
        )
        raise UserError(f"{place}: {lacking}: {other}")
    if not matching(place, WEIGHTS):
        raise UserError(
            f"{place}: no weights (*.safetensors or pytorch_model*.bin): copy them there"
        )
    if not matching(place, TOKENIZER):
        remedy_of_tokenizer = "copy it there, from the model with which its training began"
        raise UserError(f"{place}: no tokenizer: {remedy_of_tokenizer}")


def _check_options(models: Sequence[TestedModel], options: ModelOptions) -> None:
    """UserError: --cutoff or --group names no model, or a model is given twice."""
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: given twice: leave out one")
    runs = {str(Path(name).parent) for name in names if Path(name).name.startswith("stage_")}
    for flag, values, targets in (
        ("--cutoff", options.cutoffs, names),
        ("--group", options.groups, [*names, *runs]),
    ):
        for name in values:
            if name not in targets:
                raise UserError(
                    f"{flag} {name}={values[name]}: no such model; {hint(name, targets)}"
                )


def _check_dates(models: Sequence[TestedModel]) -> None:
    """UserError: two models of a group have one date, or a group has one date only."""
    first: dict[tuple[str, str], TestedModel] = {}
    for model in models:
        other = first.setdefault((model.group, model.cutoff.period), model)
        if other is not model:
            problem = f"{other.name} and {model.name} are both trained until {model.cutoff.period}"
            remedies = f"leave out one, correct --cutoff, or give --group {model.name}=NAME"
            raise UserError(f"{problem}: {remedies}")
    for model in models:
        periods = {other.cutoff.period for other in models if other.group == model.group}
        if len(periods) < 2:
            problem = f"the only model of its group, {model.group or 'without a name'}"
            remedies = "give models of several dates; --group MODEL=NAME says which belong together"
            raise UserError(f"{model.name}: {problem}: {remedies}")


def remarks_on_dates(models: Sequence[TestedModel], periods: Sequence[str]) -> list[str]:
    """A line for each group whose matrix would be too small for `alma advise`.

    UserError: no model is tested on a period after its training.
    """
    if not any(model.later(periods) for model in models):
        first = min(models, key=lambda model: model.cutoff.period)
        problem = f"no period of the data is after {first.cutoff.period}, until which the first"
        remedies = "give newer data or older models, or correct --cutoff"
        raise UserError(f"{problem} model was trained, {first.name}: {remedies}")
    remarks = []
    for group in dict.fromkeys(model.group for model in models):
        of_group = [model for model in models if model.group == group]
        tested_later = [model for model in of_group if model.later(periods)]
        if len(of_group) < _FEWEST or not tested_later:
            counts = f"{len(of_group)} models, {len(tested_later)} of them tested on later periods"
            needs = f"`alma advise` needs {_FEWEST} models, and tests on later periods"
            remarks.append(f"{group or 'the models'}: {counts}: {needs}")
    return remarks


def _checksum(member: str, of_all_files: bool) -> str:
    """The SHA-256 of a file, of the files of a folder, or of a name."""
    place = Path(member)
    if place.is_file():
        return sha256_file(place)
    if not place.is_dir():
        return hashlib.sha256(member.encode()).hexdigest()
    lines = []
    for file in _files_of(place, of_all_files):
        lines.append(f"{file.relative_to(place)} {sha256_file(file)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _files_of(place: Path, of_all_files: bool) -> Iterator[Path]:
    """The files of a model in a folder, in order."""
    if of_all_files:
        for folder, _, names in walk(place):
            for name in names:
                yield Path(folder, name)
        return
    patterns = ("config.json", *WEIGHTS, *INDEX, *TOKENIZER)
    for name in sorted(matching(place, patterns) - matching(place, TRAINING_STATE)):
        yield place / name
