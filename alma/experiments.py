"""Experiments: YAML files with the options of runs, and the sizes in the folder `sizes` beside them.

learner: gmoe              # any option of `alma train` or `alma images`, without dashes
grow-experts: 2,2,4
size: base                 # sizes/base.yaml beside this file: options of that size
waiting-time: [1, 10]      # a list: a run for each value, in a folder of its own
flags:                     # language models: flags of fairseq-train; they override those of the size
  dropout: [0, 0.1]
runs:                      # images: sections, each with options of its own
  - {replay: on}
  - {learner: gmoe, router: flat}

On the command line of `alma train`, `seed=3` or `dropout=0.2` overrides the files; `dropout=0,0.1` is a list.
On that of `alma images`, a flag does.
"""

import argparse
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.errors import Parser, UserError, closest
from alma.schema import is_plain
from alma.stream import is_stream

_DEPTH = 4  # of a file: sections, their settings, lists of values
_ONE_VALUE: tuple[str, ...] = ("stream", "size", "out", "name", "seed", "seeds", "stages")
"""Options that cannot be a list of values to try."""
_WITH_COMMAS = (*_ONE_VALUE, "grow-experts")
"""Options in whose key=value a comma is part of the value."""
_TEXTS = ("stream", "size", "out", "name")
"""Options whose key=value is text as it stands: 2024_05 is no number."""


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. UserError: there is no such file, or it is not a mapping."""
    import yaml

    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        near = closest(path.name, (each.name for each in path.parent.glob("*.yaml")))
        hint = f"; did you mean {path.with_name(near)}?" if near else ""
        raise UserError(f"{path}: no such experiment{hint}") from None
    except RecursionError:
        raise UserError(f"{path}: not YAML (nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a date or number that is none
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    if not is_plain(record, _DEPTH):
        raise UserError(f"{path}: give each option a number, a text, on, off, or a list of these")
    return record


def size_file(path: Path, size: str) -> Path:
    """The file of a size of the experiment `path`. UserError: there is none."""
    folder = path.parent / "sizes"
    file = folder / f"{size}.yaml"
    if not file.is_file():
        there = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise UserError(f"{file}: no such size; there are: {there}")
    return file


def setting_text(value: Any) -> str:
    """A setting as on a command line: `on` and `off`, numbers without loss."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and float(short := f"{value:.12g}") == value:
        return short
    return str(value)


def folder_part(name: str, value: Any) -> str:
    """A setting in the name of a run's folder: `lr-0.3`, `replay-on`, `grow-experts-2-2-4`."""
    # Only what needs no quotes in a shell; fairseq splits paths at colons.
    text = re.sub(r"[^\w.+-]+", "-", setting_text(value).strip("()"))
    return f"{name.replace('_', '-')}-{text}"


def check_nesting(out: Path, sweep: bool) -> None:
    """UserError: a single run would write among the folders of a sweep in `out`, or a sweep into a run."""
    is_run = (out / "run.json").exists()
    if sweep and is_run:
        raise UserError(f"{out} is a single run: give a sweep another --out")
    if not sweep and not is_run and any(out.glob("*/run.json")):
        raise UserError(f"{out} has runs in folders of their own: give --out {out}/NAME to a single run")


class Combination(NamedTuple):
    """One combination of the values in an experiment's lists: `swept` has its value of each list.

    `words` are of the launcher's command line, `flags` of fairseq-train's.
    """

    swept: dict[str, Any]
    words: list[str]
    flags: list[str]

    @property
    def folder(self) -> str:
        """Folder of its run, such as lr-2e-4_replay-on, in that of the experiment; empty without lists."""
        return "_".join(folder_part(*each) for each in self.swept.items())


def is_experiment(path: Path) -> bool:
    """Whether `path` is an experiment, or a folder of experiments."""
    return path.suffix == ".yaml" or (any(path.glob("*.yaml")) and not is_stream(path))


def experiment_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and the experiments in its folders."""
    return [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into paths and `key=value` overrides; an existing path may contain "=".

    `key=a,b` and `key=[a,b]` are lists; see _WITH_COMMAS. Raises UserError for a value that is neither a
    scalar nor a list of scalars in YAML.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # A:B is a corpus in shards: its first folder must exist.
        if not re.match(r"[A-Za-z][\w-]*=", word) or os.path.exists(word.partition(":")[0]):
            paths.append(word)
            continue
        key, _, text = word.partition("=")
        if key in _TEXTS and text[:1] not in ("'", '"', "["):
            overrides[key] = text or None
            continue
        if "," in text and key not in _WITH_COMMAS and text[0] not in "[('\"":
            text = f"[{text}]"
        import yaml

        try:
            # As in the files: PyYAML keeps 1e-3 as text, so run.json records a number as it was written.
            # OmegaConf would make it 0.001, which differs from what the file or an earlier launch says.
            overrides[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no such date
            raise UserError(f"{word}: the value is not YAML: quote it, as in a file") from None
    return paths, _checked("key=value", overrides)


def read_experiment(path: Path, size: str | None, overrides: Mapping[str, Any]) -> list[Combination]:
    """Read an experiment as one or more command lines: every combination of the values in its lists.

    `size` replaces that of the file. An override sets the flag of that name if the experiment has it, else an
    option. The default --out is runs/FOLDER/NAME, with the size in NAME.

    Raises UserError for a missing or malformed file.
    """
    record = read_settings(path)
    own = record.pop("size", None)
    size = size or overrides.get("size") or own
    flags = _checked(path, record.pop("flags", {}))
    name = path.stem.removesuffix(f"_{own}") + (f"_{size}" if size else "")
    options: dict[str, Any] = {"out": Path("runs", path.resolve().parent.name, name)}
    if size:
        file = size_file(path, size)
        shared = read_settings(file)
        flags = _checked(file, shared.pop("flags", {})) | flags
        options |= _checked(file, shared)
    options |= _checked(path, record)
    for key, value in overrides.items():
        place = flags if key in flags else options
        # A single value in place of a list joins the runs of the others, in a folder of its own.
        joins = isinstance(place.get(key), list) and not isinstance(value, list | None)
        place[key] = [value] if joins else value
    return list(_combinations(options, flags))


def _combinations(options: dict[str, Any], flags: dict[str, Any]) -> Iterator[Combination]:
    lists = {name: value for name, value in (options | flags).items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        swept = dict(zip(lists, values, strict=True))
        chosen, own_flags = ({k: swept.get(k, v) for k, v in each.items()} for each in (options, flags))
        # The launcher has no `--replay=false`: an option that is off is left out.
        on = {name: value for name, value in chosen.items() if value is not False}
        yield Combination(swept, _words(on), _words(own_flags))


def _checked(where: object, options: Any) -> dict[str, Any]:
    """Raise UserError unless `options` maps names to scalars, or to lists of them."""
    if not isinstance(options, Mapping) or any(isinstance(each, dict) for each in options.values()):
        raise UserError(f"{where}: give flags as `name: value`, such as `max-update: 400`")
    for name, value in options.items():
        if isinstance(value, list):
            _check_list(f"{where}: {name}", name, value)
    return dict(options)


def _check_list(where: str, name: str, values: list[Any]) -> None:
    """Raise UserError unless each value of a list can have a run of its own."""
    if name in _ONE_VALUE:
        hint = "; several seeds are `seeds: 0-2`" if name in ("seed", "seeds") else ""
        raise UserError(f"{where} takes one value, not a list{hint}")
    if not _are_values(values):
        raise UserError(f"{where}: give a list of values, such as [2e-4, 1e-3]")
    folders = [folder_part(name, each) for each in values]
    if twice := next((each for each in folders if folders.count(each) > 1), None):
        hint = "; a value with commas needs quotes, such as '2,2,4'"
        raise UserError(f"{where}: two values of the list have the folder {twice}{hint}")


def _are_values(values: Sequence[Any]) -> bool:
    """Whether each is a value, and there is one."""
    return bool(values) and not any(each is None or isinstance(each, list | dict) for each in values)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as on a command line, without those that have no value."""
    texts = {False: "=false", True: ""}
    return [
        f"--{name}" + (texts[value] if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
        if value is not None
    ]


def read_sections(
    parser: Parser, words: Sequence[str], of_the_command: Collection[str]
) -> list[argparse.Namespace]:
    """Parse a command line; with an experiment, once for each of its sections, whose values it overrides.

    `of_the_command`: options that a file cannot have.
    UserError: a file is missing or malformed, or has an unknown setting or a wrong value.
    """
    options = parser.parse_args(words)
    if options.experiment is None:
        if options.size:
            raise UserError("--size is for experiments: give a file, such as experiments/figure7.yaml")
        return [options]
    path = options.experiment
    record = read_settings(path)
    size = options.size or record.get("size")
    shared = read_settings(size_file(path, size)) if size else {}
    parts = record.pop("runs", [{}])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path}: give sections as a list: `runs: [{{learner: sm}}, {{learner: ens}}]`")
    own = shared | record
    out = Path("runs", path.stem + (f"_{options.size}" if options.size else ""))
    sections = []
    for part in parts:
        own_words = _list_words(path, own | part, parser, of_the_command)
        try:
            section = parser.parse_args([*own_words, *words])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        section.out = section.out or out
        sections.append(section)
    return sections


def _list_words(
    path: Path, settings: Mapping[str, Any], parser: Parser, of_the_command: Collection[str]
) -> list[str]:
    """Settings of an experiment as words of the command line; a list becomes a comma list."""
    known = {text.removeprefix("--"): each for each in parser._actions for text in each.option_strings}
    words = []
    for name, value in settings.items():
        if name in of_the_command:
            raise UserError(f"{path}: {name} says how to run: give --{name} on the command line")
        if name not in known:
            near = closest(str(name), known)
            hint = f"did you mean {near}?" if near else f"see `{parser.prog} --help`"
            raise UserError(f"{path}: {name} is not a setting ({hint})")
        values = value if isinstance(value, list) else [value]
        if not _are_values(values):
            raise UserError(f"{path}: {name}: give a value, or a list such as [1, 10]")
        if isinstance(value, bool) and known[name].nargs == 0:
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={','.join(map(setting_text, values))}")
    return words
