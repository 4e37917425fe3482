"""Command lines with settings drawn at random, and what their results must equal."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from alma.files import LOCK
from tests.broken_input.judge import hashes
from tests.broken_input.sound import TINY
from tests.machine_fields import without_machine_fields


class Difference(Exception):
    """A run that faults have changed, or an end that is not right."""


@dataclass
class Report:
    """A run: the faults that it met, and what was wrong; empty: nothing."""

    settings: str = ""
    faults: list[str] = field(default_factory=list)
    problem: str = ""


class Workload(NamedTuple):
    """Commands of `alma`, run one after another in one folder."""

    commands: tuple[str, ...]
    needs: tuple[str, ...]
    """Inputs of `broken_input.sound.MAKERS`, copied to the same names."""
    result: Callable[[Path], Mapping[str, object]]
    """What must not depend on faults, by file;
    a file that matters by its name alone has the value None."""


def data_prep(rng: Random) -> Workload:
    """A stream, shuffled, ordered or dated, and often one more mega-batch."""
    sizes = (
        f"--valid-words 300 --workers {rng.randint(1, 3)} --seed {rng.randrange(100)} "
        "--vocab-size 300"
    )
    corpus = "a=corpus/help.txt b=corpus/notes.md.gz c=corpus/books.txt.zst"
    texts = (
        "text=corpus/help.txt text=corpus/notes.md.gz text=corpus/AA --mega-batches 2 --words 2000"
    )
    by_date = "e=corpus/dated.jsonl --by year --until 2021 --eval-words 200"
    texts_of_kind, addition = rng.choice(
        [
            (texts, "d=corpus/web.jsonl --mega-batches 1 --words 500"),
            (f"{corpus} --ordered --eval-words 200", "d=corpus/web.jsonl"),
            (by_date, "e=corpus/dated.jsonl"),
        ]
    )
    first = f"data {texts_of_kind} {sizes} --out stream"
    appended = f"data {addition} --append --out stream --workers 2"
    commands = (first, appended) if rng.random() < 0.6 else (first,)
    return Workload(commands, ("corpus",), streams)


def images(rng: Random) -> Workload:
    """A run on digits."""
    learner = rng.choice(["sm", "ens", "umix", "gens", "gmoe", "ff", "moe"])
    words = (
        f"images --learner {learner} --megabatches {rng.randint(2, 5)} --epochs {rng.randint(1, 4)}"
    )
    words += f" --hidden {rng.choice([4, 8])} --seed {rng.randrange(100)}"
    words += f" --save-interval {rng.choice([0, 1])}"
    if rng.random() < 0.5:
        words += f" --waiting-time {rng.choice(['1', '2', 'all'])}"
    if learner not in ("ff", "gens") and rng.random() < 0.5:
        words += " --average .9"
    if rng.random() < 0.3:
        words += " --replay-share .5"
    words += rng.choice([" --save-stages", " --scenario rotated", ""])
    words += rng.choice([" --part 1/1", " --part 1/1", ""])  # figures take longer than the rest
    return Workload((f"{words} --out run",), (), runs)


def language(rng: Random) -> Workload:
    """A run of all stages on this machine, trained by fairseq."""
    learner = rng.choice(["sm", "sm", "ens --members 2", "umix", "gens", "gmoe"])
    words = f"train stream --learner {learner} --out run --seed {rng.randrange(100)}"
    if learner != "gens" and rng.random() < 0.5:
        words += " --schedule continuous"
    if rng.random() < 0.5:
        words += f" --average {rng.choice(['.9', 'last:2'])}"
    if learner != "umix" and rng.random() < 0.3:
        words += " --replay-share .5"
    flags = TINY.replace(
        "--max-update 4", f"--max-update {rng.choice([6, 10])} --save-interval-updates 2"
    )
    return Workload((f"{words} -- {flags}",), ("stream",), runs)


def month(rng: Random) -> Workload:
    """A run on a stream that grows from one year to three: test the models, then train."""
    learner = rng.choice(["sm", "ens --members 2", "gens", "gmoe --grow-experts 1"])
    train = f"train stream --learner {learner} --out run --seed {rng.randrange(100)}"
    train += rng.choice(["", " --jobs 2", " --average .9"])
    train += f" -- {TINY} --max-update 3 --save-interval-updates 1"
    corpus = "data e=corpus/dated.jsonl --out stream"
    sizes = "--eval-words 200 --valid-words 300 --vocab-size 300 --workers 1"
    commands = [f"{corpus} --by year --until 2020 {sizes}", train]
    for year in (2021, 2022):
        commands.append(f"{corpus} --append --until {year}")
        commands += rng.choice([["test run"], []])
        commands.append(train)
    return Workload(tuple(commands), ("corpus",), growing_runs)


def transformers(rng: Random) -> Workload:
    """A run of three stages of a model with dropout, trained by transformers' Trainer."""
    learner = rng.choice(["sm", "sm", "ens --members 2", "gens"])
    words = f"train own --init qwen --learner {learner} --out run --seed {rng.randrange(100)}"
    if rng.random() < 0.7:
        words += " --average poly:8"
    if rng.random() < 0.7:
        words += " --replay-share .5"
    flags = (
        f"--max_steps {rng.choice([8, 12])} --save_steps {rng.randint(1, 4)} "
        f"--dataloader_num_workers {rng.choice([0, 2, 2])} --gradient_accumulation_steps "
        f"{rng.randint(1, 2)} --per_device_train_batch_size 4 --learning_rate 3e-3 --use_cpu"
    )
    return Workload((f"{words} -- {flags}",), ("qwen", "own"), runs_with_weights)


WORKLOADS = {
    "data_prep": data_prep,
    "images": images,
    "language": language,
    "month": month,
    "transformers": transformers,
}


def finished(folder: Path) -> dict[Path, bytes]:
    """The files that say what is done, without a half-written last line."""
    paths = [
        path
        for name in ("results.jsonl", "evaluations.jsonl", "trained.json", "result.json")
        for path in folder.rglob(name)
    ]
    return {path: path.read_bytes().rpartition(b"\n")[0] for path in paths}


def check_kept(done: Mapping[Path, bytes]) -> None:
    """Difference: what was `finished` before is gone or has changed; such files only grow."""
    for path, content in done.items():
        if not path.exists() or not path.read_bytes().startswith(content):
            raise Difference(
                f"{path.parent.name}/{path.name}: what was done was done again or lost"
            )


def compare(result: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Difference: the results of two runs differ."""
    if names := sorted(result.keys() ^ expected.keys()):
        raise Difference(f"files of one run only: {names}")
    if names := [name for name in result if result[name] != expected[name]]:
        raise Difference(f"other results: {names}")


def streams(folder: Path) -> dict[str, object]:
    """Hashes of all files; a lock names its last holder."""
    return {
        name: None if name.endswith(LOCK) else digest for name, digest in hashes(folder).items()
    }


def runs(folder: Path) -> dict[str, object]:
    """Rows and names of a run's files; measurements of the machine left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _rows(path) for path in files}


def growing_runs(folder: Path) -> dict[str, object]:
    """As `runs`, with late evaluations, in any order, and the losses of single documents."""
    result = runs(folder) | _hashes(folder, (folder / "run/held_out").iterdir())
    lines = (folder / "run/evaluations.jsonl").read_text().splitlines()
    result["run/evaluations.jsonl"] = sorted(lines)
    return result


def runs_with_weights(folder: Path) -> dict[str, object]:
    """As `runs`, with the losses of single documents and the weights of all models."""
    losses = _hashes(folder, (folder / "run/held_out").iterdir())
    return runs(folder) | losses | _hashes(folder, (folder / "run").rglob("*.safetensors"))


def _hashes(folder: Path, paths: Iterable[Path]) -> dict[str, object]:
    """The contents of files, by their names below `folder`."""
    result: dict[str, object] = {}
    for path in paths:
        result[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


def _rows(path: Path) -> list[dict] | None:
    if path.name != "results.jsonl":
        return None
    rows = map(json.loads, path.read_bytes().splitlines())
    return without_machine_fields(rows)
