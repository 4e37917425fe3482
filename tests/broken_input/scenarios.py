"""The commands of scenarios.yaml, and their results."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import yaml

from alma.records import MACHINE_FIELDS
from tests.broken_input import sound
from tests.broken_input.judge import Ended


class Scenario(NamedTuple):
    """A command line on sound inputs; the keys are explained in scenarios.yaml."""

    words: str
    needs: tuple[str, ...]
    broken: str
    result: str = ""
    checked: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    several: bool = False
    content: bool = False
    stdin: str = ""

    @property
    def command(self) -> str:
        """The first word."""
        return self.words.split()[0]

    def made(self, folder: Path, ended: Ended) -> object:
        """The result without the machine's measurements; None: nothing to compare."""
        kind, *names = self.result.split() or [""]
        paths = [folder / name for name in names]
        if kind == "printed":
            return ended.out
        if kind == "files":
            return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        if kind == "stream":
            record = json.loads((paths[0] / "stream.json").read_bytes())
            parts = (*record["megabatches"], record["valid"], record["test"], record)
            return [part["files"] for part in parts]
        if kind == "rows":
            rows = map(json.loads, (paths[0] / "results.jsonl").read_bytes().splitlines())
            return [{k: v for k, v in row.items() if k not in (*MACHINE_FIELDS, "extra")} for row in rows]
        if kind == "measured":
            record = json.loads((folder / "record.json").read_bytes())
            return record["nll"], record["tokens"]
        if kind == "model":
            import torch

            state = torch.load(paths[0], weights_only=True)["model"]
            return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}
        return None


def _read() -> list[Scenario]:
    names = {name: getattr(sound, name) for name in ("TINY", "SIZES", "GPT2", "LAUNCH", "DIGITS")}
    found = []
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")):
        lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
        found.append(Scenario(**{**entry, **lists, "words": entry["words"].format(**names)}))
    return found


SCENARIOS = _read()
