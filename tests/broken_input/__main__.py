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
from dataclasses import dataclass
from pathlib import Path

from tests.broken_input import judge
from tests.broken_input.breakages import DAMAGE, OTHER_MODELS, OWN_SUMS, WAYS
from tests.broken_input.scenarios import SCENARIOS, Scenario
from tests.broken_input.sound import Sound


@dataclass(frozen=True)
class Case:
    """One case, and how it ended: a "result", an "error" in one line, or a "failure"."""

    scenario: Scenario
    way: str
    file: str
    kind: str
    problem: str = ""


class Cases:
    """Draws and runs cases in `folder`; its sound inputs are kept."""

    def __init__(self, folder: Path, seed: int, scenarios: Sequence[Scenario], ways: Sequence[str]) -> None:
        self.folder, self.seed = folder, seed
        self.scenarios, self.ways = scenarios, ways
        self.sound = Sound(folder / "sound")
        self.place = folder / "case"
        self.baselines: dict[Scenario, tuple[judge.Ended, object]] = {}
        judge.preload([each.command for each in scenarios])

    def run(self, number: int) -> Case:
        """Case `number` of the seed: the same command, file and damage whenever it runs."""
        rng = random.Random(f"{self.seed} {number}")
        scenario = rng.choice(self.scenarios)
        sound, expected = self.baseline(scenario)
        place = self._place(scenario)
        files = sorted(each for each in (place / "work").glob(scenario.broken) if each.is_file())
        while True:  # until one applies; those of bytes always do
            way, file = rng.choice(self.ways), rng.choice(files)
            if WAYS[way](file, rng, place) is not False:
                break
        name = str(file.relative_to(place / "work"))
        before = judge.hashes(place)
        ended = self._call(scenario, place)
        parents = [str(each) for each in Path(name).parents if len(each.parts) > 1]
        names = [file.name, file.parent.name, *parents, *([""] if scenario.content else [])]
        names += [Path(name).parts[0]] if way == "not a file" else []
        problem = judge.problem(ended, sound, names, scenario.codes, scenario.several)
        if way == "huge number" and ended.code == -signal.SIGALRM:
            problem = None  # so many epochs take their time
        problem = problem or self._harm(scenario, place, before)
        checked = way in DAMAGE and any(fnmatch.fnmatch(name, each) for each in scenario.checked)
        checked = checked and not (way == "file swapped" and name.endswith(OWN_SUMS))
        if not problem and not ended.code and checked and scenario.made(place / "work", ended) != expected:
            problem = "another result from a damaged file, without an error"
        kind = "failure" if problem else "error" if ended.code == 2 else "result"
        return Case(scenario, way, name, kind, problem or "")

    def baseline(self, scenario: Scenario) -> tuple[judge.Ended, object]:
        """The end and the result with sound inputs. RuntimeError: the command fails."""
        if scenario not in self.baselines:
            models = [str(Path(name).parent) for name in OTHER_MODELS] if "*.pt" in scenario.checked else []
            for name in (*scenario.needs, *models):
                self.sound.get(name)
            place = self._place(scenario)
            ended = self._call(scenario, place)
            refused = "cifar" in scenario.words  # made here, so not the files that torchvision knows
            if ended.code not in (2 if refused else 0, *scenario.codes):
                raise RuntimeError(f"{scenario.words}: exit code {ended.code}\n{ended.out}\n{ended.err}")
            self.baselines[scenario] = ended, scenario.made(place / "work", ended)
        return self.baselines[scenario]

    def _place(self, scenario: Scenario) -> Path:
        """A new folder with copies of the inputs in work/, and a file that no command may touch."""
        shutil.rmtree(self.place, ignore_errors=True)
        (self.place / "precious").mkdir(parents=True)
        (self.place / "precious/file").write_text("untouched\n")
        self.sound.copy(scenario.needs, self.place / "work")
        return self.place

    def _call(self, scenario: Scenario, place: Path) -> judge.Ended:
        work = place / "work"
        main = lambda: judge.main_of(scenario.words.split())()  # noqa: E731  imports in the child too
        stdin = work / scenario.stdin
        return judge.run(main, work, place / "log", str(stdin) if stdin.is_file() else os.devnull)

    def _harm(self, scenario: Scenario, place: Path, before: dict[str, str]) -> str:
        """What the command has executed, changed or left outside its folder; empty: nothing."""
        if (place / judge.MARKER).exists():
            return "EXECUTED the input"
        after = judge.hashes(place)
        may = [f"work/{pattern}" for pattern in scenario.writes]
        for name, digest in before.items():
            if after.get(name) != digest and not any(fnmatch.fnmatch(name, each) for each in may):
                return f"{'changed' if name in after else 'removed'} {name}"
        strange = [name for name in after if name not in before and not name.startswith("work/")]
        return f"left {strange[0]}" if strange else ""


def main() -> None:
    """Run cases; print failures and a line for each way; exit with 1 if there is a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.broken_input", description=__doc__)
    add = parser.add_argument
    add("--cases", type=int, default=200, metavar="N", help="cases to run (default: 200)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the cases (default: 0)")
    add("--case", type=int, metavar="K", help="run case K of the seed alone, and keep its folder")
    commands = list(dict.fromkeys(each.command for each in SCENARIOS))
    add(
        "--only",
        nargs="+",
        choices=[*commands, *WAYS],
        default=[],
        help="commands to run, ways to break files",
    )
    add("--folder", type=Path, metavar="DIR", help="keeps the sound inputs (default: a temporary one)")
    options = parser.parse_args()
    chosen = [each for each in SCENARIOS if each.command in options.only]
    ways = [way for way in WAYS if way in options.only]
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        cases = Cases(folder, options.seed, chosen or SCENARIOS, ways or list(WAYS))
        for number in range(options.cases) if options.case is None else [options.case]:
            case = cases.run(number)
            counts.setdefault(case.way, Counter())[case.kind] += 1
            if case.problem or options.case is not None:
                print(f"case {number}: {case.file}: {case.way}: {case.problem or case.kind}")
                print(f"    {case.scenario.words}", flush=True)
    for way, kinds in counts.items():
        print(f"{way:16}" + "".join(f"{kinds[kind]:6} {kind}s" for kind in ("result", "error", "failure")))
    sys.exit(any(kinds["failure"] for kinds in counts.values()))


if __name__ == "__main__":
    main()
