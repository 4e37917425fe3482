"""Experiments: YAML files with the options of runs.

learner: gmoe              # any option of `alma train` or `alma images`, without dashes
waiting-time: [1, 10]      # a list: a run for each value, in a folder of its own
flags:                     # language models: flags of fairseq-train
  dropout: [0, 0.1]
runs:                      # several runs or sweeps by name, or a list; each overrides the above
  copy: {grow-router: copy}
  tree: {grow-router: tree, flags: {lr: 1e-3}}
size: base                 # one of the sizes: options that all the above override
sizes:                     # or a file that has them; without it, sizes.yaml beside this file
  base: {stream: stream, flags: {arch: switch_gmoe_base}}

On the command line of `alma train`, `seed=3` or `dropout=0.2` overrides the files, `dropout=0,0.1`
is a list, and `runs=copy` picks runs. On that of `alma images`, a flag overrides them.
"""

import argparse
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, hint
from alma.schema import is_plain

_ONE_VALUE: tuple[str, ...] = ("stream", "size", "out", "name", "seed", "seeds", "stages")
"""Options that cannot be a list of values to try."""

Section = tuple[str, str | None, dict[str, Any], dict[str, Any]]
"""One of the `runs` of an experiment, or all of it.

Name or "", size, options, flags of fairseq-train.
"""


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. UserError: there is no such file, or it is not a mapping."""
    import yaml

    from alma.yaml_text import load

    if not path.exists() and path.parts[0] == "experiments":  # use the installed files
        path = Path(__file__).parents[1] / path
    try:
        record = load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        names = (file.name for file in path.parent.glob("*.yaml"))
        raise UserError(f"{path}: no such experiment; {hint(path.name, names)}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, no such date
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}: give options as `name: value`, such as `learner: sm`")
    if not is_plain(record, depth=6):  # sizes, their flags, lists of values
        raise UserError(f"{path}: give each option a number, a text, on, off, or a list of these")
    return record


def read(path: Path, size: str | None = None, names: Collection[str] = ()) -> list[Section]:
    """The sections of an experiment at `size` (None: the file's own), or those with these names.

    UserError: a missing or malformed file, an unknown size or name.
    """
    record = read_settings(path)
    own_size, sizes, runs = (record.pop(key, None) for key in ("size", "sizes", "runs"))
    parts, size = [record], size or own_size
    if size:
        if not isinstance(sizes, dict):
            file = path.parent / str(sizes or "sizes.yaml")
            sizes = read_settings(file).get("sizes") if sizes or file.is_file() else None
        sizes = sizes if isinstance(sizes, dict) else {}
        if str(size) not in sizes:
            raise UserError(
                f"{path}: {size}: no such size; there are: {', '.join(sorted(sizes)) or 'none'}"
            )
        parts.insert(0, sizes[str(size)])
    if not isinstance(runs, dict | list):
        runs = [{} if runs is None else runs]
    named = list(runs.items()) if isinstance(runs, dict) else [("", run) for run in runs]
    names_of_file = [name for name, _ in named]
    for name in names:
        if name not in names_of_file:
            raise UserError(f"{path}: no run {name}; there are: {', '.join(names_of_file)}")
    sections = []
    for name, run in named:
        options: dict[str, Any] = {}
        flags: dict[str, Any] = {}
        for part in (*parts, run):
            if not isinstance(part, dict) or not isinstance(part.get("flags", {}), dict):
                raise UserError(
                    f"{path}: give options, flags and runs as `name: value`, such as `seed: 3`"
                )
            flags |= part.get("flags", {})
            options |= {key: value for key, value in part.items() if key != "flags"}
        if not names or name in names:
            sections.append((name, size, options, flags))
    return sections


def values_of(name: str, value: Any) -> list[Any]:
    """The values of a setting to try: the elements of its list, or the single value.

    Raises UserError for an empty list.
    """
    values = value if isinstance(value, list) else [value]
    if not values or any(one is None or isinstance(one, list | dict) for one in values):
        raise UserError(f"{name}: give a value, or a list of values, such as [2e-4, 1e-3]")
    return values


def setting_text(value: Any) -> str:
    """A setting as on a command line: `on` and `off`, numbers without loss."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and float(short := f"{value:.12g}") == value:
        return short
    return str(value)


def folder_part(name: str, value: Any) -> str:
    """A setting in the name of a run's folder: `lr-0.3`, `replay-on`, `grow-experts-2-2-4`."""
    # Keep only characters that need no quotes in a shell. fairseq splits paths at colons.
    text = re.sub(r"[^\w.+-]+", "-", setting_text(value).strip("()"))
    return f"{name.replace('_', '-')}-{text}"


def check_nesting(out: Path, sweep: bool) -> None:
    """Raise a UserError if a sweep and a single run would share the folder `out`."""
    is_run = (out / "run.json").exists()
    if sweep and is_run:
        raise UserError(f"{out} is a single run: give a sweep another --out")
    if not sweep and not is_run and any(out.glob("*/run.json")):
        raise UserError(
            f"{out} has runs in folders of their own: give --out {out}/NAME to a single run"
        )


def read_overrides(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into paths and `key=value` overrides; an existing path may contain "=".

    `key=a,b` and `key=[a,b]` are lists; for keys in _ONE_VALUE and grow-experts, `a,b` is a single
    value. Raises UserError if a value is not YAML.
    """
    paths: list[str] = []
    overrides: dict[str, Any] = {}
    for word in words:
        # A path may be A:B, a corpus in shards; it is a path if its first folder exists.
        if not re.match(r"[A-Za-z][\w-]*=", word) or os.path.exists(word.partition(":")[0]):
            paths.append(word)
            continue
        key, _, text = word.partition("=")
        if key in ("stream", "size", "out", "name") and text[:1] not in ("'", '"', "["):
            overrides[key] = text or None  # not parsed as YAML, where 2024_05 is a number
            continue
        if "," in text and key not in (*_ONE_VALUE, "grow-experts") and text[0] not in "[('\"":
            text = f"[{text}]"
        import yaml

        from alma.yaml_text import load

        try:
            # Parsed as the files are, by PyYAML, which keeps 1e-3 as text: run.json then records
            # it as written. OmegaConf would make it 0.001, which differs from an earlier launch.
            overrides[key] = load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: no such date
            raise UserError(f"{word}: the value is not YAML: quote it, as in a file") from None
    _check_lists("key=value", overrides)
    return paths, overrides


def _check_lists(where: object, settings: Mapping[str, Any]) -> None:
    """Raise UserError unless each value of a list can have a run of its own."""
    for name, value in settings.items():
        if isinstance(value, list) and name in _ONE_VALUE:
            raise UserError(
                f"{where}: {name} takes one value, not a list; several seeds are `seeds: 0-2`"
            )
        values = [] if value is None else values_of(f"{where}: {name}", value)  # None: not set
        folders = [folder_part(name, one) for one in values]
        if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
            quotes = "a value with commas needs quotes, such as '2,2,4'"
            raise UserError(f"{where}: two values of the list have the folder {twice}; {quotes}")


def read_experiment(
    path: Path, size: str | None, overrides: Mapping[str, Any]
) -> Iterator[tuple[Collection[str], str, list[str], list[str]]]:
    """Read an experiment of language models: each combination of the values in its lists.

    Yields the settings that are lists, the folder of the run in --out, such as lr-2e-4_replay-on
    (empty without lists), and the words of `alma train` and of fairseq-train. An override sets the
    flag of that name if the experiment has it, else an option; `runs` picks sections. The default
    --out is runs/FOLDER/NAME_SIZE of the file, or runs/NAME/SECTION_SIZE.
    """
    changes = dict(overrides)
    size, runs = size or changes.pop("size", None), changes.pop("runs", None) or []
    for section, own_size, options, flags in read(
        path, size, runs if isinstance(runs, list) else [runs]
    ):
        folder, name = (path.stem, section) if section else (path.resolve().parent.name, path.stem)
        options = {
            "out": Path("runs", folder, name + (f"_{own_size}" if own_size else "")),
            **options,
        }
        _check_lists(path, options | flags)
        for key, value in changes.items():
            place = flags if key in flags else options
            # A single value that overrides a list stays a list of one, so that its run gets the
            # same folder as in the whole sweep.
            joins = isinstance(place.get(key), list) and not isinstance(value, list | None)
            place[key] = [value] if joins else value
        lists = {
            name: value for name, value in (options | flags).items() if isinstance(value, list)
        }
        for values in itertools.product(*lists.values()):
            swept = dict(zip(lists, values, strict=True))
            # The launcher has no `--replay=false`: an option that is off is left out.
            chosen = {key: swept.get(key, value) for key, value in options.items()}
            on = {key: value for key, value in chosen.items() if value is not False}
            own_flags = {key: swept.get(key, value) for key, value in flags.items()}
            combined = "_".join(folder_part(key, value) for key, value in swept.items())
            yield lists, combined, _words(on), _words(own_flags)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as on a command line, without those that have no value."""
    texts = {name: "false" if value is False else value for name, value in options.items()}
    words = []
    for name, text in texts.items():
        if text is True:
            words.append(f"--{name}")
        elif text is not None:
            words.append(f"--{name}={text}")
    return words


def read_sections(
    parser: Parser, words: Sequence[str], of_the_command: Collection[str]
) -> list[argparse.Namespace]:
    """Parse a command line together with the experiment file that it names, if any.

    Returns the parsed options of each section of the file, overridden by the command line.
    `of_the_command`: options that only the command line may have.
    UserError: a file is missing or malformed, or has an unknown setting or a wrong value.
    """
    options = parser.parse_args(words)
    if options.experiment is None:
        if options.size:
            raise UserError(
                "--size is for experiments: give a file, such as experiments/figure7.yaml"
            )
        return [options]
    path = options.experiment
    out = Path("runs", path.stem + (f"_{options.size}" if options.size else ""))
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions |= {text.removeprefix("--"): action for text in action.option_strings}
    sections = []
    for _, _, own_options, flags in read(path, options.size):
        own_words = []
        for name, value in (own_options | ({"flags": flags} if flags else {})).items():
            if name in of_the_command:
                raise UserError(
                    f"{path}: {name} says how to run: give --{name} on the command line"
                )
            if name not in actions:
                raise UserError(f"{path}: {name} is not a setting ({hint(str(name), actions)})")
            values = values_of(f"{path}: {name}", value)
            if isinstance(value, bool) and actions[name].nargs == 0:
                own_words.append(f"--{name}" if value else f"--no-{name}")
            else:  # a list becomes a comma list
                own_words.append(f"--{name}={','.join(map(setting_text, values))}")
        try:
            parsed = parser.parse_args([*own_words, *words])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        parsed.out = parsed.out or out
        sections.append(parsed)
    return sections
