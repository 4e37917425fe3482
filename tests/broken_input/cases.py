"""Broken input, and whether each command survives it.

A case takes sound inputs, which the product has made, damages one file and runs a command on them.
Right is a result, or one line `error: ...` that names the file, and exit code 2, within limits of
memory, disk and time; damage that a check sum shows gives no other result. Input is never executed,
and no other file changes.
"""

import fnmatch
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from hypothesis import strategies as st

from tests.broken_input import judge, sound
from tests.broken_input.damage import KINDS, MARKER, OWN_SUMS, SEEN_BY_SUMS, Draw
from tests.machine_fields import without_machine_fields


class Scenario(NamedTuple):
    """A command line on sound inputs; the keys are explained in scenarios.yaml."""

    words: str
    needs: Sequence[str]
    broken: str
    result: str = ""
    checked: Sequence[str] = ()
    writes: Sequence[str] = ()
    codes: Sequence[int] = ()
    several: bool = False
    content: bool = False
    stdin: str = ""

    @property
    def command(self) -> str:
        """The first word."""
        return self.words.split()[0]

    def made(self, folder: Path, ended: judge.Ended) -> object:
        """The result without the machine's measurements; None: nothing to compare."""
        kind, *names = self.result.split() or [""]
        paths = [folder / name for name in names]
        if kind == "printed":
            return ended.out
        if kind == "stream":
            record = json.loads((paths[0] / "stream.json").read_bytes())
            return [
                part["files"]
                for part in (*record["megabatches"], record["valid"], record["test"], record)
            ]
        if kind == "rows":
            rows = map(json.loads, (paths[0] / "results.jsonl").read_bytes().splitlines())
            return without_machine_fields(rows, "extra")
        return None


def read_scenarios() -> list[Scenario]:
    """Those of scenarios.yaml."""
    names = {name: getattr(sound, name) for name in ("TINY", "SIZES", "GPT2", "DIGITS")}
    entries = yaml.safe_load(Path(__file__).with_name("scenarios.yaml").read_text("utf-8"))
    return [Scenario(**{**entry, "words": entry["words"].format(**names)}) for entry in entries]


class Case(NamedTuple):
    """One case, and how it ended; `problem` is empty if that was right."""

    words: str
    damage: str
    file: str
    code: int
    problem: str


class Cases:
    """Draws and runs cases in `folder`; its sound inputs are kept."""

    def __init__(self, folder: Path, scenarios: Sequence[Scenario]) -> None:
        self.scenarios = scenarios
        self.inputs = sound.Sound(folder / "sound")
        self.place = folder / "case"
        self.work = self.place / "work"
        self.baselines: dict[str, tuple[judge.Ended, object]] = {}
        judge.preload([scenario.command for scenario in scenarios])

    def run(self, draw: Draw) -> Case:
        """A case whose command, file and damage are drawn."""
        scenario = draw(st.sampled_from(self.scenarios))
        self.baseline(scenario)
        self._prepare(scenario)
        files = sorted(path for path in self.work.glob(scenario.broken) if path.is_file())
        choices = [(kind, file) for kind in KINDS for file in files]
        applies: bool | None = False
        while applies is False:
            kind, file = choices.pop(draw(st.integers(0, len(choices) - 1)))
            applies = KINDS[kind](draw, file, self.place)
        before = judge.hashes(self.place)
        ended = self._call(scenario)
        path = file.relative_to(self.work)
        problem = self._problem(scenario, kind, path, ended) or self._harm(scenario, before)
        return Case(scenario.words, kind, str(path), ended.code, problem)

    def baseline(self, scenario: Scenario) -> tuple[judge.Ended, object]:
        """The end and the result with sound inputs. RuntimeError: the command fails."""
        if scenario.words not in self.baselines:
            self._prepare(scenario)
            ended = self._call(scenario)
            if ended.code not in (0, *scenario.codes):
                raise RuntimeError(
                    f"{scenario.words}: exit code {ended.code}\n{ended.out}\n{ended.err}"
                )
            self.baselines[scenario.words] = ended, scenario.made(self.work, ended)
        return self.baselines[scenario.words]

    def _prepare(self, scenario: Scenario) -> None:
        """A new folder with copies of the inputs in work/, and a file that no command may touch."""
        shutil.rmtree(self.place, ignore_errors=True)
        (self.place / "precious").mkdir(parents=True)
        (self.place / "precious/file").write_text("untouched\n")
        self.inputs.copy(scenario.needs, self.work)

    def _call(self, scenario: Scenario) -> judge.Ended:
        def main() -> None:  # it imports in the child, too
            judge.main_of(scenario.words.split())()

        stdin = str(self.work / scenario.stdin)
        if not Path(stdin).is_file():
            stdin = os.devnull
        return judge.run(main, self.work, self.place / "log", stdin)

    def _problem(self, scenario: Scenario, kind: str, path: Path, ended: judge.Ended) -> str:
        """What is wrong with the end of a command, or with its result from a damaged file;
        "": nothing."""
        undamaged, expected = self.baselines[scenario.words]
        names = [
            path.name,
            *(str(folder) for folder in path.parents if len(folder.parts) > 1),
            path.parent.name,
        ]
        if scenario.content:
            names.append("")
        if kind == "not a file":
            names.append(path.parts[0])
        problem = judge.problem(ended, undamaged, names, scenario.codes, scenario.several)
        if problem and not (
            kind == "value" and ended.code == -signal.SIGALRM
        ):  # perhaps 10^9 epochs
            return problem
        checked = kind in SEEN_BY_SUMS and any(
            fnmatch.fnmatch(str(path), pattern) for pattern in scenario.checked
        )
        checked = checked and not (kind == "file swapped" and path.suffix in OWN_SUMS)
        if not ended.code and checked and scenario.made(self.work, ended) != expected:
            return "another result from a damaged file, without an error"
        return ""

    def _harm(self, scenario: Scenario, before: Mapping[str, str]) -> str:
        """What the command has executed, changed or left outside its folder; "": nothing."""
        if (self.place / MARKER).exists():
            return "EXECUTED the input"
        after = judge.hashes(self.place)
        for name, digest in before.items():
            may = any(fnmatch.fnmatch(name, f"work/{pattern}") for pattern in scenario.writes)
            if after.get(name) != digest and not may:
                return f"{'changed' if name in after else 'removed'} {name}"
        strange = [name for name in after if name not in before and not name.startswith("work/")]
        return f"left {strange[0]}" if strange else ""
