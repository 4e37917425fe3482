"""Folders of data sets as the Hub of Hugging Face and `datasets.save_to_disk` lay them out.

Such a folder has several splits, such as train and test, of which a stream reads one.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from alma.errors import UserError, hint
from alma.files import walk
from alma.schema import parse_json, require
from data_prep.columns import SUFFIXES
from data_prep.formats import kind

TRAIN = "train"  # the split that is read by default
_NAMES = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_SHARD = re.compile(r"(?:.*-)?([A-Za-z_][\w.]*)-(\d{5,})-of-(\d{5,})(?:-[0-9a-f]+)?")
"""The name of a file of the Hub without suffix: train-00000-of-00003, also with a hash after it."""
_NAMED = re.compile(rf"(?:.*[-_.])?({_NAMES})(?:[-_.]?\d+)*")
_STATE = "state.json"  # beside the Arrow files of a split that datasets.save_to_disk wrote
_SPLITS = "dataset_dict.json"  # beside the folders of several such splits
_CARDS = ("readme.md", "license.md", "license.txt")
_LISTED = 4  # most files left out that a message lists


class _DataFile(NamedTuple):
    """A file with documents."""

    path: Path
    split: str  # "": its name has none
    config: str  # the folder of its configuration, relative to that of the data set; "": none
    shard: tuple[int, int] | None  # (number, of how many) in its name


def files_of(root: str, split: str | None) -> list[Path] | None:
    """The files of a split of a data set in a folder; None: the folder is no such data set.

    Says on stderr which split is read, and what is left out. `split`: that of --split, by default
    train, or the only one. UserError: no such split, several configurations, or a missing shard.
    """
    files, unread = _scan(Path(root))
    splits = sorted({file.split for file in files if file.split})
    if not splits or any(_is_corpus_file(path) for path in unread):
        return None
    chosen = _choose(root, splits, split)
    of_split = [file for file in files if file.split == chosen]
    _check_config(root, of_split)
    _check_shards(root, of_split)
    counts = Counter(file.split for file in files if file.split != chosen)
    left_out = []
    for name, number in sorted(counts.items()):
        left_out.append(f"split {name} ({_files(number)})" if name else f"{_files(number)}")
    left_out += sorted(str(path.relative_to(root)) for path in unread)[:_LISTED]
    if len(unread) > _LISTED:
        left_out.append(f"{len(unread) - _LISTED:,} more")
    message = f"{root}: split {chosen} ({_files(len(of_split))})"
    if left_out:
        message += f"; left out: {', '.join(left_out)}"
    print(message, file=sys.stderr)
    return [file.path for file in of_split]


def _files(number: int) -> str:
    return f"{number:,} file{'' if number == 1 else 's'}"


def _scan(root: Path) -> tuple[list[_DataFile], list[Path]]:
    """The files with documents below a folder, and the other ones."""
    files: list[_DataFile] = []
    unread: list[Path] = []
    for name, subfolders, names in walk(str(root)):
        folder = Path(name)
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "_"))]
        visible = [folder / name for name in names if not name.startswith((".", "_"))]
        if {_STATE, "dataset_info.json"} <= set(names):
            saved = _saved(root, folder)
            files += saved
            listed = {file.path for file in saved}
            unread += [path for path in visible if path.suffix in SUFFIXES and path not in listed]
            continue
        for path in visible:
            if path.suffix in SUFFIXES:
                files.append(_data_file(root, path))
            elif path.name != _SPLITS:
                unread.append(path)
    return sorted(files), unread


def _data_file(root: Path, path: Path) -> _DataFile:
    """A file whose split is in its name, or in that of a folder between it and `root`."""
    folders = list(path.relative_to(root).parts[:-1])
    match = _SHARD.fullmatch(path.stem)
    keyword = _NAMED.fullmatch(path.stem)
    shard = None
    split = ""
    if match:
        split = match[1]
        shard = (int(match[2]), int(match[3]))
    elif keyword:
        split = keyword[1]
    else:
        named = [name for name in folders if re.fullmatch(_NAMES, name)]
        if named:
            split = named[-1]
            folders.remove(split)
    config = "/".join(name for name in folders if name != "data")
    return _DataFile(path, split, config, shard)


def _saved(root: Path, folder: Path) -> list[_DataFile]:
    """The files that datasets.save_to_disk wrote into a folder. UserError: damaged."""
    state = _json_of(folder / _STATE)
    try:
        names = [record["filename"] for record in state["_data_files"]]
    except (LookupError, TypeError):
        names = []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        problem = "lists no data files of its folder"
        raise UserError(f"{folder / _STATE}: {problem}; save the data set again by save_to_disk")
    if state.get("_indices_data_files"):
        problem = "has the order of its rows in another file"
        remedy = "save it again by a newer version of datasets"
        raise UserError(f"{folder / _STATE}: {problem}; {remedy}")
    for name in names:
        if not (folder / name).is_file():
            remedy = "copy the folder again"
            raise UserError(f"{folder / name}: missing, though {_STATE} lists it; {remedy}")
    split = str(state.get("_split") or TRAIN)
    place = folder.relative_to(root)
    if _is_split_of_dictionary(folder):
        split = folder.name
        place = place.parent
    config = place.as_posix() if place.parts else ""
    return [_DataFile(folder / name, split, config, None) for name in names]


def _is_split_of_dictionary(folder: Path) -> bool:
    """Whether the folder above is that of a DatasetDict, with this one as a split."""
    path = folder.parent / _SPLITS
    if not path.is_file():
        return False
    splits = _json_of(path).get("splits")
    return isinstance(splits, list) and folder.name in splits


def _json_of(path: Path) -> dict[str, Any]:
    """The object in a file. UserError: damaged."""
    try:
        record = parse_json(path.read_bytes())
        require(record, {})
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); copy it again") from None
    return record


def _is_corpus_file(path: Path) -> bool:
    """Whether a file beside those of a data set may hold documents, too."""
    of_data_set = ("", ".json", *SUFFIXES)
    return kind(str(path)) not in of_data_set and path.name.lower() not in _CARDS


def _choose(root: str, splits: list[str], split: str | None) -> str:
    """The split to read. UserError: there is none of this name, or none by default."""
    if split is None and len(splits) == 1:
        return splits[0]
    chosen = split or TRAIN
    if chosen in splits:
        return chosen
    if split is None:
        raise UserError(f"{root}: no split {TRAIN}; give --split: {', '.join(splits)}")
    raise UserError(f"{root}: no split {chosen}; {hint(chosen, splits)}")


def _check_config(root: str, files: Iterable[_DataFile]) -> None:
    configs = sorted({file.config for file in files})
    if len(configs) > 1:
        names = ", ".join(name or "." for name in configs)
        remedy = f"name one: {root}/{next(filter(None, configs))}"
        raise UserError(f"{root}: several configurations ({names}); {remedy}")


def _check_shards(root: str, files: Iterable[_DataFile]) -> None:
    """Raise a UserError if a number is missing among the names of the files."""
    numbers = {file.shard[0] for file in files if file.shard}
    for file in files:
        if file.shard and len(numbers) < file.shard[1]:
            missing = min(set(range(file.shard[1])) - numbers)
            name = f"{missing:05}-of-{file.shard[1]:05}"
            problem = f"the split {file.split} lacks its shard {name}"
            pattern = f"{root}/**/*{file.split}-*{file.path.suffix}"
            remedy = f"download it, or read those that are here by '{pattern}'"
            raise UserError(f"{root}: {problem}; {remedy}")
