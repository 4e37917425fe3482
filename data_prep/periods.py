"""Dated streams: ordered streams whose mega-batches are periods, found by the stage dates before the scan.

The sources of a period are named NUMBER/SOURCE, with the number of the period, and are those of its
mega-batch; so all later stages are those of an ordered stream.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from alma.dates import LeftOut, label
from alma.errors import UserError
from alma.files import write_json_atomic
from data_prep.compressed import Document, Skipped
from data_prep.documents import Shard, count_words, normalise
from data_prep.order import Ordered
from data_prep.work import Work, Workspace, read_json

MOST = 1000
"""Mega-batches of a stream; each has three parts, and a row in tables."""
_UNUSABLE = {
    LeftOut.UNDATED: "without a date",
    LeftOut.UNREADABLE: "with an unreadable date",
    LeftOut.IMPRECISE: "whose date is not within one period",
}


@dataclass(frozen=True)
class Dated(Ordered):
    """Sizes of each period in words. `order` and `periods` are empty until the dates are read."""

    merge_small: bool = False
    """Merge a period that is too small with the next one, and the last with the one before."""
    periods: list[str] = field(default_factory=list)
    """The period of each mega-batch; merged ones as FIRST..LAST."""
    remedy: ClassVar[str] = "merge periods with --merge-small, choose longer ones or ask for fewer words"

    def record(self) -> dict[str, Any]:
        """The fields that are known before any text is read."""
        record = super().record()
        for name in ("mega_batches", "valid_source", "order", "periods"):
            del record[name]
        return record

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The sources of all periods; before the dates are read those of the files."""
        if not self.order:
            return tuple(sorted(set(names)))
        return super().sources(name for own in self.order for name in own)

    def period(self, part: str) -> str:
        """The period of a part; that of mixed parts is empty."""
        number = part.rpartition("_")[2]
        return self.periods[int(number) - self.first] if number.isdecimal() else ""

    def title(self, t: int) -> str:
        """What a message calls mega-batch t."""
        return f"megabatch_{self.first + t:02d} ({self.periods[t]})"

    def with_periods(self, by: str, words: Mapping[str, int], merge: bool) -> "Dated":
        """With a mega-batch for each period, or for several with `merge`. `words`: of the sources.

        UserError: too many.
        """
        sources: dict[int, list[str]] = {}
        for source in sorted(words):
            sources.setdefault(int(source.partition("/")[0]), []).append(source)
        sizes = {number: sum(words[source] for source in sources[number]) for number in sorted(sources)}
        groups = merged(sizes, self.needed) if merge else [[number] for number in sizes]
        if len(groups) > MOST and merge == self.merge_small:
            raise UserError(
                f"--by {by}: {len(groups):,} periods, of which a stream has at most {MOST:,}; choose longer "
                "ones, or fewer by --from and --until"
            )
        names = [[label(by, number) for number in group] for group in groups]
        return replace(
            self,
            mega_batches=len(groups),
            order=[[source for number in group for source in sources[number]] for group in groups],
            periods=[own[0] if len(own) == 1 else f"{own[0]}..{own[-1]}" for own in names],
        )


def count_dates(space: Workspace, number: int, shard: Shard, words: bool) -> None:
    """Write dates-NNNNN.json: sources of all periods in a shard, with their words; what has no period.

    Memory: a number for each period. Without `words` they are 0.
    """
    found: Counter[str] = Counter()
    left_out: dict[LeftOut, list[Any]] = {}  # documents, and the first of them

    def leave(why: LeftOut, path: str, document: Document) -> None:
        if why not in left_out:
            date = "no date" if document.date is None else repr(document.date)[:60]
            left_out[why] = [0, str(Skipped(path, document.offset, date))]
        left_out[why][0] += 1

    for source, raw in space.reader.raw(shard, None, leave):
        text = normalise(raw) if words else ""
        found[source] += count_words(text) if text else 0
    write_json_atomic(space.file("dates", number, "json"), {"words": found, "left_out": left_out})


def find_periods(
    space: Workspace, wanted: Dated, work: Work, shards: Sequence[tuple[int, Shard]], early: bool
) -> tuple[Dated, dict[str, Any]]:
    """Run the stage dates; the mega-batches, and for stream.json what has no period.

    `early`: merge small periods now, by words with duplicates; else the caller does. UserError: documents
    without a usable date, or no document, or too many periods.
    """
    dates = space.reader.dates
    assert dates
    work.each("dates", count_dates, space, "dates.json", shards, "B", early)
    words: Counter[str] = Counter()
    counts: Counter[str] = Counter()  # of what is left out
    first: dict[str, str] = {}
    for number in range(len(shards)):
        record = read_json(space.file("dates", number, "json"))
        words.update(record["words"])
        for why, (count, example) in record["left_out"].items():
            counts[why] += count
            first.setdefault(why, example)
    unusable = [
        f"{counts[why]:,} documents {what} (first: {first[why]})"
        for why, what in _UNUSABLE.items()
        if counts[why]
    ]
    if unusable and dates.undated == "error":
        raise UserError(
            f"--by {dates.by}, --date-key {dates.key}: {'; '.join(unusable)}; say how dates are written "
            "with --date-format (seconds, %Y%m%d, ...), fix them, name another field, or leave them out with "
            "--undated skip"
        )
    if not words:
        listed = ", ".join(f"{count:,} {why}" for why, count in counts.items())
        raise UserError(f"no document is in a period of the stream: left out {listed or 'none'}")
    made = wanted.with_periods(dates.by, words, wanted.merge_small and early)
    return made, {"left_out": {why: counts[why] for why in LeftOut if counts[why]}}


def merged(sizes: Mapping[int, int], needed: int) -> list[list[int]]:
    """Periods in runs of `needed` words or more; what is left at the end joins the last run.

    `sizes`: words by period, in their order.
    """
    groups: list[list[int]] = []
    own: list[int] = []
    for number in sizes:
        own.append(number)
        if sum(sizes[each] for each in own) >= needed:
            groups.append(own)
            own = []
    if not groups:
        return [own]
    if own:
        groups[-1] += own
    return groups
