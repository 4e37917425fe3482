"""Stage dates, and the splits of a dated stream.

A dated stream is an ordered stream whose mega-batches are periods. The stage runs before the scan
and finds the periods. It renames the sources to NUMBER/SOURCE, where NUMBER is that of the period;
so later stages treat the stream as any ordered one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from alma.dates import Dates, LeftOut, label
from alma.errors import UserError
from alma.files import write_json_atomic
from data_prep.compressed import Document, Skipped
from data_prep.documents import Shard
from data_prep.order import Ordered
from data_prep.work import Workspace, read_json

MOST = 1000  # most mega-batches of a dated stream; each has three parts, and a row in tables
_UNUSABLE = {
    LeftOut.UNDATED: "without a date",
    LeftOut.UNREADABLE: "with an unreadable date",
    LeftOut.IMPRECISE: "whose date is not within one period",
}


@dataclass(frozen=True)
class Dated(Ordered):
    """Sizes of each period in words. `order` and `periods` are empty until the dates are read."""

    merge_small: bool = False
    """Merge a period that is too small with the next one; the last one with the one before it."""
    periods: list[str] = field(default_factory=list)
    """The period of each mega-batch; merged ones as FIRST..LAST."""

    @property
    def remedy(self) -> str:
        """What to do about periods that are too small."""
        if self.first == 0:
            return "merge periods with --merge-small, choose longer ones or ask for fewer words"
        if self.merge_small:
            return "append them together with the text of the next period, which they then join"
        return "leave their text out, or make the stream anew with --merge-small or fewer words"

    def record(self) -> dict[str, Any]:
        """The fields that stream.json records; known before any text is read."""
        record = super().record()
        for name in ("mega_batches", "valid_source", "order", "periods"):
            del record[name]
        return record

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The sources of all periods; before the dates are read those of the files."""
        if not self.order:
            return tuple(sorted(set(names)))
        return super().sources(name for batch in self.order for name in batch)

    def period(self, part: str) -> str:
        """The period of a part; "" for the mixed parts `test` and `valid`."""
        number = part.rpartition("_")[2]
        return self.periods[int(number) - self.first] if number.isdecimal() else ""

    def with_periods(self, by: str, words: Mapping[str, int], merge: bool) -> "Dated":
        """A copy of these splits with a mega-batch for each period that has documents.

        `by` is the kind of periods, `words` the number of words of each source NUMBER/SOURCE. With
        `merge`, small periods are merged. Raises UserError if there are too many mega-batches.
        """
        sources: dict[int, list[str]] = {}
        for source in sorted(words):
            number = int(source.partition("/")[0])
            sources.setdefault(number, []).append(source)
        if merge:
            sizes = {}
            for number in sorted(sources):
                sizes[number] = sum(words[source] for source in sources[number])
            groups = merged(sizes, self.needed)
        else:
            groups = [[number] for number in sorted(sources)]
        if len(groups) > MOST and merge == self.merge_small:
            most = f"--by {by}: {len(groups):,} periods, of which a stream has at most {MOST:,}"
            raise UserError(f"{most}; choose longer ones, or fewer by --from and --until")
        order = []
        periods = []
        for group in groups:
            order.append([source for number in group for source in sources[number]])
            name = label(by, group[0])
            if len(group) > 1:
                name += f"..{label(by, group[-1])}"
            periods.append(name)
        return replace(self, mega_batches=len(groups), order=order, periods=periods)


def count_dates(space: Workspace, number: int, shard: Shard, words: bool) -> None:
    """Write dates-NNNNN.json: words by source and period, and documents without a period.

    If `words` is False, texts are not counted, and all numbers of words are 0. Memory: a number for
    each source and period.
    """
    totals: Counter[str] = Counter()
    left_out: dict[LeftOut, list[Any]] = {}  # reason -> number of documents, and the first one

    def leave(why: LeftOut, path: str, document: Document) -> None:
        if why not in left_out:
            date = "no date" if document.date is None else repr(document.date)[:60]
            left_out[why] = [0, str(Skipped(path, document.offset, date))]
        left_out[why][0] += 1

    for source, raw in space.reader.raw(shard, None, leave):
        text = space.reader.normalised(raw) if words else ""
        totals[source] += space.reader.count_words(text) if text else 0
    record = {"words": totals, "left_out": left_out}
    write_json_atomic(space.file("dates", number, "json"), record)


class PeriodCounts(NamedTuple):
    """The results of the stage dates for all shards."""

    words: Mapping[str, int]  # by source, PERIOD/NAME
    left_out: dict[str, int]  # documents without a period, by LeftOut


def read_dates(space: Workspace, dates: Dates, shards: int) -> PeriodCounts:
    """Add up dates-NNNNN.json of all shards.

    UserError: documents without a usable date, or no document in a period.
    """
    words: Counter[str] = Counter()
    left_out: Counter[LeftOut] = Counter()
    first_examples: dict[LeftOut, str] = {}
    for number in range(shards):
        record = read_json(space.file("dates", number, "json"))
        words.update(record["words"])
        for name, (count, example) in record["left_out"].items():
            why = LeftOut(name)
            left_out[why] += count
            first_examples.setdefault(why, example)
    check_usable(dates, left_out, first_examples)
    if not words:
        listed = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        raise UserError(f"no document is in a period of the stream: left out {listed or 'none'}")
    return PeriodCounts(words, {why: left_out[why] for why in LeftOut if left_out[why]})


def check_usable(
    dates: Dates, left_out: Mapping[LeftOut, int], first_examples: Mapping[LeftOut, str]
) -> None:
    """UserError: documents without a usable date were left out, and that is no choice of the user.

    left_out: the number of documents by reason. first_examples: where the first of them is.
    """
    if dates.undated != "error":
        return
    unusable = [
        f"{left_out[why]:,} documents {meaning} (first: {first_examples[why]})"
        for why, meaning in _UNUSABLE.items()
        if left_out.get(why)
    ]
    if unusable:
        remedy = "give --date-format (seconds, %Y%m%d, ...), fix them, name another field, or "
        remedy += "--undated skip"
        flags = f"--by {dates.by}, --date-key {dates.key}"
        raise UserError(f"{flags}: {'; '.join(unusable)}; {remedy}")


def merged(sizes: Mapping[int, int], needed: int) -> list[list[int]]:
    """Merge consecutive periods into runs of at least `needed` words each.

    Periods that are left at the end join the last run. `sizes`: words by period, in order.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    group_words = 0
    for number, words in sizes.items():
        group.append(number)
        group_words += words
        if group_words >= needed:
            groups.append(group)
            group = []
            group_words = 0
    if not groups:
        return [group]
    if group:
        groups[-1] += group
    return groups
