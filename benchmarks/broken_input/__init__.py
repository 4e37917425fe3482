"""`python -m benchmarks broken_input`: broken input, and whether each command survives it.

A case takes sound inputs, which the product has made, breaks one file and runs a command on them. Right is a
result, or one line `error: ...` that names the file, and exit code 2, within limits of memory, disk and time;
damage that a check sum shows gives no other result. Input is never executed, and no other file changes.
"""

import contextlib
import fnmatch
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alma.errors import Parser, UserError, hint
from alma.tables import as_text
from benchmarks.broken_input import judge
from benchmarks.broken_input.breakages import DAMAGE, OTHER_MODELS, OWN_SUMS, WAYS
from benchmarks.broken_input.scenarios import SCENARIOS, Scenario
from benchmarks.broken_input.sound import Sound


@dataclass(frozen=True)
class Case:
    """One case, and how it ended."""

    number: int
    scenario: Scenario
    way: str
    file: str
    kind: str
    """`result`, `error` or `failure`."""
    problem: str = ""
    seconds: float = 0.0


class Cases:
    """Draws and runs cases in `folder`; its sound inputs are kept."""

    def __init__(self, folder: Path, seed: int, scenarios: Sequence[Scenario], ways: Sequence[str]) -> None:
        self.folder, self.seed = folder, seed
        self.scenarios, self.ways = scenarios, ways
        self.sound = Sound(folder / "sound")
        self.place = folder / f"case_{os.getpid()}"  # two benchmarks may have the sound inputs in common
        self._baselines: dict[Scenario, tuple[judge.Ended, object]] = {}
        judge.preload([each.command for each in scenarios])

    def run(self, number: int) -> Case:
        """Case `number` of the seed: the same command, file and damage whenever it runs."""
        rng = random.Random(f"{self.seed} {number}")
        scenario = rng.choice(self.scenarios)
        sound, expected = self._baseline(scenario)
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
        if not problem and not ended.code and checked and scenario.result(place / "work", ended) != expected:
            problem = "another result from a damaged file, without an error"
        kind = "failure" if problem else "error" if ended.code == 2 else "result"
        return Case(number, scenario, way, name, kind, problem or "", ended.seconds)

    def _baseline(self, scenario: Scenario) -> tuple[judge.Ended, object]:
        """The end and the result with sound inputs. RuntimeError: the command fails."""
        if scenario not in self._baselines:
            models = [Path(name).parent for name in OTHER_MODELS] if "*.pt" in scenario.checked else []
            for name in (*scenario.needs, *map(str, models)):
                self.sound.get(name)
            place = self._place(scenario)
            ended = self._call(scenario, place)
            refused = "cifar" in scenario.words  # made here, so not the files that torchvision knows
            if ended.code not in (2 if refused else 0, *scenario.codes):
                raise RuntimeError(f"{scenario.words}: exit code {ended.code}\n{ended.out}\n{ended.err}")
            self._baselines[scenario] = ended, scenario.result(place / "work", ended)
        return self._baselines[scenario]

    def _place(self, scenario: Scenario) -> Path:
        """A new folder with copies of the inputs in work/, and a file that no command may touch."""
        place = self.place
        shutil.rmtree(place, ignore_errors=True)
        (place / "precious").mkdir(parents=True)
        (place / "precious/file").write_text("untouched\n")
        (place / "work").mkdir()
        for name in scenario.needs:
            source, target = self.sound.folder / name, place / "work" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
        return place

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
        if strange := [name for name in after if name not in before and not name.startswith("work/")]:
            return f"left {strange[0]}"
        return ""


def table(outcomes: Sequence[Case]) -> str:
    """Cases by way and command: results, errors, failures."""
    commands = list(dict.fromkeys(each.command for each in SCENARIOS))
    commands = [name for name in commands if any(each.scenario.command == name for each in outcomes)]
    lines = [["", *commands, "cases", "results", "errors", "failures"]]
    for way in [*WAYS, "all"]:
        own = [each for each in outcomes if way in (each.way, "all")]
        counts = Counter(each.scenario.command for each in own)
        kinds = Counter(each.kind for each in own)
        numbers = [counts[name] for name in commands] + [len(own)]
        lines.append([way, *map(str, [*numbers, kinds["result"], kinds["error"], kinds["failure"]])])
    return as_text(lines)


def main(words: Sequence[str]) -> None:
    """Run cases and print failures and the table; exit with 1 if there is a failure."""
    parser = Parser(prog="python -m benchmarks broken_input", description=__doc__)
    add = parser.add_argument
    add("--cases", type=int, default=200, metavar="N", help="cases to run (default: 200)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the cases (default: 0)")
    add("--case", type=int, metavar="K", help="run case K of the seed alone, and keep its folder")
    add("--first", type=int, default=0, metavar="K", help="number of the first case (default: 0)")
    add("--only", metavar="COMMAND,...", help="commands to run, such as data,inspect (default: all)")
    add("--ways", metavar="WAY,...", help="ways to break files, such as bomb,NaN (default: all)")
    add("--folder", type=Path, metavar="DIR", help="keeps the sound inputs (default: a temporary one)")
    options = parser.parse_args(words)
    known = list(dict.fromkeys(each.command for each in SCENARIOS))
    commands = options.only.split(",") if options.only else known
    ways = options.ways.split(",") if options.ways else list(WAYS)
    for given, names in ((commands, known), (ways, list(WAYS))):
        for name in given:
            if name not in names:
                raise UserError(f"{name}: unknown; {hint(name, names)}")
    chosen = [each for each in SCENARIOS if each.command in commands]
    with tempfile.TemporaryDirectory() as temporary:
        cases = Cases((options.folder or Path(temporary)).resolve(), options.seed, chosen, ways)
        numbers = range(options.first, options.first + options.cases)
        outcomes: list[Case] = []
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):  # the table has the cases so far
            for number in [options.case] if options.case is not None else numbers:
                outcome = cases.run(number)
                outcomes.append(outcome)
                if outcome.problem or options.case is not None:
                    print(f"case {number}: {outcome.file}: {outcome.way}: {outcome.problem or outcome.kind}")
                    print(f"    {outcome.scenario.words}", flush=True)
        if options.case is None:
            shutil.rmtree(cases.place, ignore_errors=True)
        print(f"\n{table(outcomes)}\n{len(outcomes)} cases in {time.monotonic() - began:.0f} s")
    if any(each.problem for each in outcomes):
        sys.exit(1)
