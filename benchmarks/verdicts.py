"""Verdicts on the findings of the paper, computed from committed numbers.

`python -m benchmarks.verdicts` fails if docs/results/findings.md differs from what
docs/results/findings.csv and findings.yaml give; `--write` writes its tables anew.

findings.csv has a row for each configuration, measure and seed, as the tables of docs/results
print it, or one for the mean over several seeds with its standard deviation.
findings.yaml has a claim of the paper per entry, and the comparisons that decide it (`paper`) or
only stand beside it (`also`):

    saturated sm 8 < saturated sm 4 @ t = 4           the first is lower, says the paper
    a ~5% b @ CER                                     both are within 5% of each other
    a / b < c / d @ CER                               of excesses of a over b, and c over d, in %
    a @ t = 50 < b @ last                             each with a measure of its own
"""

import csv
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from alma.errors import Parser, UserError, command
from alma.files import atomic_write

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
VERDICTS = ("shown", "in part", "no evidence", "contradicted", "not tried")
FAVOURABLE = ("as claimed", "as claimed in every seed", "few seeds, as claimed")
SEEDS = 3
"""Seeds without which nothing is shown or contradicted."""
_COMPARISON = re.compile(r"(?P<first>.+?) (?P<relation><|~[\d.]+%) (?P<second>.+)")
_SEEDS = re.compile(r"(?:mean of )?(\d+)-(\d+)")


@dataclass(frozen=True)
class Measured:
    """A measure of a configuration: values by seed, or only their mean and deviation."""

    values: Mapping[int, float]
    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class Comparison:
    """Two numbers and their difference, first less second, with the half of its 95% interval.

    Fields:
        relation: what the paper says of the first and the second: "<", or "~5%".
        by_seed, percent_by_seed: differences of the seeds that both have, and in % of the second;
            empty if one has only a mean.
        interval: nan with fewer than two seeds, or without a standard deviation.
    """

    text: str
    relation: str
    first: float
    second: float
    difference: float
    interval: float
    count: int
    by_seed: tuple[float, ...]
    percent_by_seed: tuple[float, ...]

    @property
    def outcome(self) -> str:
        """What the comparison says of the claim."""
        if self.relation == "<":
            return self._outcome_of_order()
        margin = float(self.relation.strip("~%")) / 100 * abs(self.second)
        if self.count < SEEDS or math.isnan(self.interval):
            close = abs(self.difference) <= margin
            return "few seeds, as claimed" if close else "few seeds, against"
        if abs(self.difference) + self.interval <= margin:
            return "as claimed"
        return "against" if abs(self.difference) > self.interval else "open"

    def _outcome_of_order(self) -> str:
        if self.count < SEEDS or math.isnan(self.interval):
            return "few seeds, as claimed" if self.difference < 0 else "few seeds, against"
        if abs(self.difference) > self.interval:
            return "as claimed" if self.difference < 0 else "against"
        if self.by_seed and max(self.by_seed) < 0:
            return "as claimed in every seed"
        return "open"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper with its verdict."""

    number: int
    verdict: str
    text: str
    where: str
    seen: str
    comparisons: tuple[Comparison, ...]
    deciding: int


def read_numbers(path: Path) -> dict[tuple[str, str], Measured]:
    """Numbers of findings.csv by configuration and measure.

    Raises UserError if a configuration has a measure twice for a seed, or both by seed and as a
    mean.
    """
    values: dict[tuple[str, str], dict[int, float]] = {}
    numbers: dict[tuple[str, str], Measured] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["configuration"], row["measure"])
            seeds_of_mean = _SEEDS.fullmatch(row["seed"])
            if key in numbers or (seeds_of_mean and key in values):
                raise UserError(f"{path}: {key[0]!r} has {key[1]!r} twice: leave one row")
            if seeds_of_mean is None:
                seeds = values.setdefault(key, {})
                if int(row["seed"]) in seeds:
                    raise UserError(f"{path}: {key[0]!r} has {key[1]!r} twice for a seed")
                seeds[int(row["seed"])] = float(row["value"])
                continue
            count = int(seeds_of_mean[2]) - int(seeds_of_mean[1]) + 1
            deviation = float(row["deviation"] or math.nan)
            numbers[key] = Measured({}, float(row["value"]), deviation, count)
    for key, seeds in values.items():
        numbers[key] = _of_seeds(seeds)
    _add_averages(numbers)
    return numbers


def _of_seeds(values: Mapping[int, float]) -> Measured:
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Measured(dict(values), statistics.fmean(numbers), deviation, len(numbers))


def _add_averages(numbers: dict[tuple[str, str], Measured]) -> None:
    """Add the average over the stream where each of its four times has its seeds."""
    times = [f"t = {t}" for t in (1, 2, 3, 4)]
    for configuration in {name for name, _ in numbers}:
        stages = [numbers.get((configuration, time)) for time in times]
        if (configuration, "average") in numbers or not all(stages):
            continue
        by_time = [stage.values for stage in stages if stage is not None]
        averages = {}
        for seed in by_time[-1]:
            if all(seed in values for values in by_time):
                averages[seed] = statistics.fmean(values[seed] for values in by_time)
        if averages:
            numbers[configuration, "average"] = _of_seeds(averages)


def _look_up(numbers: Mapping[tuple[str, str], Measured], name: str, measure: str) -> Measured:
    """A number, or the excess in % of `A / B`."""
    upper, _, lower = name.partition(" / ")
    for configuration in filter(None, (upper, lower)):
        if (configuration, measure) not in numbers:
            raise UserError(f"findings.csv has no {measure!r} of {configuration!r}: add its rows")
    over = numbers[upper, measure]
    if not lower:
        return over
    under = numbers[lower, measure]
    seeds = sorted(over.values.keys() & under.values.keys())
    if seeds:
        return _of_seeds({s: 100 * (over.values[s] / under.values[s] - 1) for s in seeds})
    return Measured({}, 100 * (over.mean / under.mean - 1), math.nan, 1)


def compare(numbers: Mapping[tuple[str, str], Measured], text: str) -> Comparison:
    """Compute a comparison of findings.yaml. Raises UserError for names without numbers."""
    parts = _COMPARISON.fullmatch(text)
    if parts is None:
        raise UserError(f"findings.yaml: {text!r} is no comparison such as 'a < b @ CER'")
    second_name, _, second_measure = parts["second"].partition(" @ ")
    first_name, _, first_measure = parts["first"].partition(" @ ")
    first = _look_up(numbers, first_name, first_measure or second_measure)
    second = _look_up(numbers, second_name, second_measure)
    common = sorted(first.values.keys() & second.values.keys())
    by_seed = tuple(first.values[seed] - second.values[seed] for seed in common)
    percent_by_seed = tuple(100 * (first.values[s] / second.values[s] - 1) for s in common)
    if by_seed:
        paired = _of_seeds(dict(enumerate(by_seed)))
        first = _of_seeds({seed: first.values[seed] for seed in common})
        second = _of_seeds({seed: second.values[seed] for seed in common})
        difference = paired.mean
        interval = _half_interval(paired.deviation**2 / paired.count, paired.count - 1)
        count = paired.count
    else:
        difference = first.mean - second.mean
        interval = _welch(first, second)
        count = min(first.count, second.count)
    return Comparison(
        text,
        parts["relation"],
        first.mean,
        second.mean,
        difference,
        interval,
        count,
        by_seed,
        percent_by_seed,
    )


def _half_interval(variance: float, freedom: float) -> float:
    if math.isnan(variance) or freedom < 1:
        return math.nan
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)


def _welch(first: Measured, second: Measured) -> float:
    """Half of the 95% interval of a difference of means without common seeds."""
    variances = [number.deviation**2 / number.count for number in (first, second)]
    total = sum(variances)
    if min(first.count, second.count) < 2 or math.isnan(total) or total == 0:
        return math.nan
    freedom = total**2 / (
        variances[0] ** 2 / (first.count - 1) + variances[1] ** 2 / (second.count - 1)
    )
    return _half_interval(total, freedom)


def judge(entry: Mapping[str, Any], comparisons: Sequence[Comparison]) -> str:
    """The verdict of the rules that the page states, from the deciding comparisons."""
    if entry.get("exact"):
        return "shown"
    if entry.get("untried") or not comparisons:
        return "not tried"
    outcomes = [comparison.outcome for comparison in comparisons]
    favourable = [outcome for outcome in outcomes if outcome in FAVOURABLE]
    if entry.get("other_data"):
        return "in part" if favourable else "not tried"
    decisive = "as claimed" in outcomes and "few seeds, as claimed" not in outcomes
    if len(favourable) == len(outcomes) and decisive and not entry.get("some_of_the_claim"):
        return "shown"
    if favourable:
        return "in part"
    return "contradicted" if "against" in outcomes else "no evidence"


def read_findings(folder: Path) -> list[Finding]:
    """All findings of a folder with findings.csv and findings.yaml, in their order."""
    numbers = read_numbers(folder / "findings.csv")
    entries = yaml.safe_load((folder / "findings.yaml").read_text("utf-8"))
    findings = []
    for number, entry in entries.items():
        deciding = [compare(numbers, text) for text in entry.get("paper", [])]
        beside = [compare(numbers, text) for text in entry.get("also", [])]
        comparisons = (*deciding, *beside)
        seen = entry["seen"].format_map(_fields(comparisons)).strip()
        findings.append(
            Finding(
                number,
                judge(entry, deciding),
                entry["text"],
                entry["where"],
                seen,
                comparisons,
                len(deciding),
            )
        )
    return findings


class _Printed(float):
    """A number that `{a1}` prints as tables do, and `{a1:.0f}` as it says."""

    def __format__(self, form: str) -> str:
        return super().__format__(form) if form else _number(self)


def _fields(comparisons: Sequence[Comparison]) -> dict[str, _Printed | str]:
    """What `seen` may name: a1 and b1 of the first comparison, its difference d1, in % p1,
    and in % for each seed r1; a2 and so on of the second."""
    fields: dict[str, _Printed | str] = {}
    for index, comparison in enumerate(comparisons, 1):
        fields[f"a{index}"] = _Printed(comparison.first)
        fields[f"b{index}"] = _Printed(comparison.second)
        fields[f"d{index}"] = _difference(comparison)
        fields[f"p{index}"] = f"{100 * comparison.difference / comparison.second:.1f}%"
        percentages = [f"{percent:.1f}" for percent in comparison.percent_by_seed]
        fields[f"r{index}"] = ", ".join(percentages) + "%"
    return fields


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 20 else f"{value:.1f}"


def _difference(comparison: Comparison) -> str:
    text = _number(comparison.difference)
    if not math.isnan(comparison.interval):
        text += f" ±{_number(comparison.interval)}"
    return text


def render(findings: Sequence[Finding]) -> dict[str, str]:
    """The parts of the page that are computed, by the name of their markers."""
    counts = Counter(finding.verdict for finding in findings)
    listed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = {"count": f"**Of {len(findings)} findings: {listed}.**"}
    lines = ["| | the paper says | where | verdict | seen |", "|---|---|---|---|---|"]
    for finding in findings:
        cells = (str(finding.number), finding.text, finding.where, finding.verdict, finding.seen)
        lines.append(f"| {' | '.join(cells)} |")
    parts["findings"] = "\n".join(lines)
    lines = ["| | the paper says | first | second | difference | seeds | outcome |"]
    lines.append("|---|---|---|---|---|---|---|")
    for finding in findings:
        lines += _rows_of_numbers(finding)
    parts["numbers"] = "\n".join(lines)
    return parts


def _rows_of_numbers(finding: Finding) -> Iterator[str]:
    for index, comparison in enumerate(finding.comparisons):
        numbers = f"{_number(comparison.first)} | {_number(comparison.second)}"
        outcome = comparison.outcome
        if index >= finding.deciding:
            outcome += ", beside the claim"
        yield (
            f"| {finding.number} | {comparison.text} | {numbers} | {_difference(comparison)} "
            f"| {comparison.count} | {outcome} |"
        )


def written(page: str, parts: Mapping[str, str]) -> str:
    """The page with its computed parts. Raises UserError if it lacks their markers."""
    for name, text in parts.items():
        begin = f"<!-- {name} -->\n\n"
        end = "\n\n<!-- end -->"
        if page.count(begin) != 1 or end not in page.partition(begin)[2]:
            raise UserError(f"findings.md has no part between '{begin.strip()}' and '<!-- end -->'")
        before, _, after = page.partition(begin)
        _, _, rest = after.partition(end)
        page = before + begin + text + end + rest
    return page


def unfounded(folder: Path) -> list[str]:
    """Rows of findings.csv whose number is not in the section that their source names."""
    missing = []
    sections: dict[str, str] = {}
    with (folder / "findings.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            source = row["source"]
            if source not in sections:
                sections[source] = _section(folder, source)
            printed = row["value"]
            if row["deviation"]:
                printed += f" ±{row['deviation']}"
            if not re.search(rf"(?<![\d.]){re.escape(printed)}(?!\.?\d)", sections[source]):
                missing.append(f"{row['configuration']}, {row['measure']}: {printed} in {source}")
    return missing


def _section(folder: Path, source: str) -> str:
    page, _, anchor = source.partition("#")
    for section in (folder / page).read_text("utf-8").split("\n## ")[1:]:
        title = section.partition("\n")[0].lower()
        if re.sub(r"[^\w -]", "", title).replace(" ", "-") == anchor:
            return section
    raise UserError(f"findings.csv: {source} is no section")


@command
def main() -> None:
    """Compare the page with its numbers, or write it."""
    parser = Parser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    options = parser.parse_args()
    missing = unfounded(RESULTS)
    if missing:
        raise UserError("no page has these numbers of findings.csv:\n" + "\n".join(missing))
    path = RESULTS / "findings.md"
    page = path.read_text("utf-8")
    computed = written(page, render(read_findings(RESULTS)))
    if options.write:
        with atomic_write(path) as file:
            file.write(computed)
    elif page != computed:
        raise UserError(f"{path} differs: run python -m benchmarks.verdicts --write")


if __name__ == "__main__":
    main()
