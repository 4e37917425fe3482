"""`python -m tests.broken_input`: broken input, and whether each command survives it.

A case takes sound inputs, which the product has made, breaks one file and runs a command on them. Right is a
result, or one line `error: ...` that names the file, and exit code 2, within limits of memory, disk and time;
damage that a check sum shows gives no other result. Input is never executed, and no other file changes.
"""

import argparse
import fnmatch
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.broken_input import judge
from tests.broken_input.breakages import DAMAGE, OTHER_MODELS, OWN_SUMS, WAYS
from tests.broken_input.scenarios import SCENARIOS, Scenario
from tests.broken_input.sound import Sound

KINDS = ("result", "error", "failure")
"""The ends of a case; an "error" is one line."""


class Case(NamedTuple):
    """One case, and how it ended."""

    scenario: Scenario
    way: str
    file: str
    kind: str
    problem: str


class Cases:
    """Draws and runs cases in `folder`; its sound inputs are kept."""

    def __init__(self, folder: Path, seed: int, scenarios: Sequence[Scenario], ways: Sequence[str]) -> None:
        self.seed, self.scenarios, self.ways = seed, scenarios, ways
        self.sound = Sound(folder / "sound")
        self.place = folder / "case"
        self.work = self.place / "work"
        self.baselines: dict[Scenario, tuple[judge.Ended, object]] = {}
        judge.preload([each.command for each in scenarios])

    def run(self, number: int) -> Case:
        """Case `number` of the seed: the same command, file and damage whenever it runs."""
        rng = random.Random(f"{self.seed} {number}")
        scenario = rng.choice(self.scenarios)
        self.baseline(scenario)
        self._prepare(scenario)
        files = sorted(each for each in self.work.glob(scenario.broken) if each.is_file())
        applies: bool | None = False
        while applies is False:  # until one applies; those of bytes always do
            way, file = rng.choice(self.ways), rng.choice(files)
            applies = WAYS[way](file, rng, self.place)
        before = judge.hashes(self.place)
        ended = self._call(scenario)
        path = file.relative_to(self.work)
        problem = self._problem(scenario, way, path, ended) or self._harm(scenario, before) or ""
        kind = "failure" if problem else "error" if ended.code == 2 else "result"
        return Case(scenario, way, str(path), kind, problem)

    def baseline(self, scenario: Scenario) -> tuple[judge.Ended, object]:
        """The end and the result with sound inputs. RuntimeError: the command fails."""
        if scenario not in self.baselines:
            for name in OTHER_MODELS if "*.pt" in scenario.checked else ():
                self.sound.get(str(Path(name).parent))
            self._prepare(scenario)
            ended = self._call(scenario)
            refused = "cifar" in scenario.words  # made here, so not the files that torchvision knows
            if ended.code not in (2 if refused else 0, *scenario.codes):
                raise RuntimeError(f"{scenario.words}: exit code {ended.code}\n{ended.out}\n{ended.err}")
            self.baselines[scenario] = ended, scenario.made(self.work, ended)
        return self.baselines[scenario]

    def _prepare(self, scenario: Scenario) -> None:
        """A new folder with copies of the inputs in work/, and a file that no command may touch."""
        shutil.rmtree(self.place, ignore_errors=True)
        (self.place / "precious").mkdir(parents=True)
        (self.place / "precious/file").write_text("untouched\n")
        self.sound.copy(scenario.needs, self.work)

    def _call(self, scenario: Scenario) -> judge.Ended:
        main = lambda: judge.main_of(scenario.words.split())()  # noqa: E731  imports in the child too
        stdin = self.work / scenario.stdin
        return judge.run(main, self.work, self.place / "log", str(stdin) if stdin.is_file() else os.devnull)

    def _problem(self, scenario: Scenario, way: str, path: Path, ended: judge.Ended) -> str | None:
        """What is wrong with the end of a command, or with its result from a damaged file; None: nothing."""
        sound, expected = self.baselines[scenario]
        names = [path.name, *(str(each) for each in path.parents if len(each.parts) > 1), path.parent.name]
        names += [""] * scenario.content + [path.parts[0]] * (way == "not a file")
        problem = judge.problem(ended, sound, names, scenario.codes, scenario.several)
        if problem and not (way == "huge number" and ended.code == -signal.SIGALRM):  # so many epochs
            return problem
        checked = way in DAMAGE and any(fnmatch.fnmatch(str(path), each) for each in scenario.checked)
        checked = checked and not (way == "file swapped" and path.suffix in OWN_SUMS)
        if not ended.code and checked and scenario.made(self.work, ended) != expected:
            return "another result from a damaged file, without an error"
        return None

    def _harm(self, scenario: Scenario, before: dict[str, str]) -> str | None:
        """What the command has executed, changed or left outside its folder; None: nothing."""
        if (self.place / judge.MARKER).exists():
            return "EXECUTED the input"
        after = judge.hashes(self.place)
        for name, digest in before.items():
            may = any(fnmatch.fnmatch(name, f"work/{each}") for each in scenario.writes)
            if after.get(name) != digest and not may:
                return f"{'changed' if name in after else 'removed'} {name}"
        strange = [name for name in after if name not in before and not name.startswith("work/")]
        return f"left {strange[0]}" if strange else None


def main() -> None:
    """Run cases; print failures and a line for each way; exit with 1 if there is a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.broken_input", description=__doc__)
    add = parser.add_argument
    add("--cases", type=int, default=200, metavar="N", help="cases to run (default: 200)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the cases (default: 0)")
    add("--case", type=int, metavar="K", help="run case K of the seed alone, and keep its folder")
    names = [*dict.fromkeys(each.command for each in SCENARIOS), *WAYS]
    add("--only", nargs="+", choices=names, default=[], help="commands to run, ways to break files")
    add("--folder", type=Path, metavar="DIR", help="keeps the sound inputs (default: a temporary one)")
    options = parser.parse_args()
    chosen = [each for each in SCENARIOS if each.command in options.only]
    ways = [way for way in WAYS if way in options.only]
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        cases = Cases(folder, options.seed, chosen or SCENARIOS, ways or list(WAYS))
        for number in range(options.cases) if options.case is None else [options.case]:
            case = cases.run(number)
            counts[case.way, case.kind] += 1
            if case.problem or options.case is not None:
                print(f"case {number}: {case.file}: {case.way}: {case.problem or case.kind}")
                print(f"    {case.scenario.words}", flush=True)
    for way in dict.fromkeys(way for way, _ in counts):
        print(f"{way:16}" + "".join(f"{counts[way, kind]:6} {kind}s" for kind in KINDS))
    sys.exit(any(kind == "failure" for _, kind in counts))


if __name__ == "__main__":
    main()
