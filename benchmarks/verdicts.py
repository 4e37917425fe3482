"""Verdicts on the findings of the paper, computed from committed numbers.

`python -m benchmarks.verdicts` fails if docs/results/findings.md differs from what
docs/results/findings.csv and findings.yaml give; `--write` writes its tables anew.

findings.yaml has a claim of the paper per entry, and the comparisons that decide it (`paper`) or
only stand beside it (`also`), as `benchmarks.finding_numbers` reads them.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alma.errors import Parser, UserError, command
from alma.files import atomic_write
from benchmarks.finding_numbers import FAVOURABLE, ClaimedDifference, compare, read_numbers

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
VERDICTS = ("shown", "in part", "no evidence", "contradicted", "not tried")


@dataclass(frozen=True)
class Finding:
    """A claim of the paper with its verdict."""

    number: int
    verdict: str
    text: str
    where: str
    seen: str
    comparisons: tuple[ClaimedDifference, ...]
    deciding: int


def judge(entry: Mapping[str, Any], comparisons: Sequence[ClaimedDifference]) -> str:
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


def _fields(comparisons: Sequence[ClaimedDifference]) -> dict[str, _Printed | str]:
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


def _difference(comparison: ClaimedDifference) -> str:
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


def compute_page(folder: Path) -> str:
    """The page of a folder as its numbers have it.

    Raises UserError if a number of findings.csv is not in the section that its row names.
    """
    missing = unfounded(folder)
    if missing:
        raise UserError("no page has these numbers of findings.csv:\n" + "\n".join(missing))
    page = (folder / "findings.md").read_text("utf-8")
    return written(page, render(read_findings(folder)))


@command
def main() -> None:
    """Compare the page with its numbers, or write it."""
    parser = Parser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    options = parser.parse_args()
    path = RESULTS / "findings.md"
    computed = compute_page(RESULTS)
    if options.write:
        with atomic_write(path, keep_same=True) as file:
            file.write(computed)
    elif path.read_text("utf-8") != computed:
        raise UserError(f"{path} differs: run python -m benchmarks.verdicts --write")


if __name__ == "__main__":
    main()
