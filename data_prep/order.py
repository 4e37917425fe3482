"""The plan of an ordered stream, whose mega-batches are sources in a given order, for example by year.

A mega-batch takes the documents of its sources that no mega-batch before it has taken, in hash order:

    test_00        the first `eval_words` words
    valid_00       the next `valid_words`
    megabatch_00   the next `words`, or the rest

`test` and `valid` of a new stream mix the mega-batches: the first 1/B of the words of each test_00, ... and
of each valid_00, ....

The splits of a mega-batch depend on its own documents and on those taken before, never on what follows. So
documents of the future change no part of the past but `test` and `valid`, and an addition makes the parts
that a new stream of all mega-batches would have.

The mega-batches of a dated stream are periods, found by the stage dates before the scan. Their sources are
named NUMBER/SOURCE, with the number of the period: later stages are those of any ordered stream.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from alma.dates import LeftOut, label
from alma.errors import UserError
from alma.files import write_json_atomic
from data_prep.compressed import Document, Skipped
from data_prep.cut import SortedCorpus, Wanted
from data_prep.documents import Shard, count_words, normalise
from data_prep.pools import Pool, Span, sizes_of, spans_of
from data_prep.work import Work, Workspace, read_json

MOST = 1000  # mega-batches of a stream; each has three parts, and a row in tables
_UNUSABLE = {
    LeftOut.UNDATED: "without a date",
    LeftOut.UNREADABLE: "with an unreadable date",
    LeftOut.IMPRECISE: "whose date is not within one period",
}
_SHOWN = 20  # mega-batches in a message
_ROLES = ("megabatch", "test", "test", "valid", "valid")
"""Parts of the splits. The split of mega-batch t in role r has number r * B + t. Roles 1 and 3 are the
documents that `test` and `valid` have too, 2 and 4 the rest of the held-out parts."""
_MIXED = {"test": 1, "valid": 3}  # roles of the mixed parts


@dataclass(frozen=True)
class Ordered(Wanted):
    """Requested sizes of each mega-batch in words, with `words` 0: all that is left."""

    order: list[list[str]] = field(default_factory=list)  # the sources of each mega-batch
    remedy: ClassVar[str] = "add text or ask for fewer words"  # against mega-batches that are too small

    @property
    def names(self) -> list[str]:
        """The part of each split in the order of their numbers."""
        return [f"{role}_{self.first + t:02d}" for role in _ROLES for t in range(self.mega_batches)]

    @property
    def parts(self) -> dict[str, list[int]]:
        """The parts, with the numbers of their splits; additions have no mixed parts."""
        count, parts = self.mega_batches, super().parts
        if not self.first:
            parts |= {name: list(range(role * count, (role + 1) * count)) for name, role in _MIXED.items()}
        return parts

    def rank(self, source: str) -> tuple[int, str]:
        """Sorts the sources by mega-batch, then by name."""
        return self._batches[source], source

    @cached_property
    def _batches(self) -> dict[str, int]:
        return {name: t for t, names in enumerate(self.order) for name in names}

    @property
    def pools(self) -> list[int]:
        """The pool of each split: that of its mega-batch."""
        return [number % self.mega_batches for number in range(len(self.names))]

    @property
    def pool_count(self) -> int:
        """Number of pools: one for each mega-batch."""
        return self.mega_batches

    def cut(self, corpus: SortedCorpus) -> tuple[list[Pool], list[Span]]:
        """Make the pools and cut them, one mega-batch after another.

        A document that a mega-batch left out whole may be in a later one. UserError: too few words, or an
        empty part, for all mega-batches at once.
        """
        pools: list[Pool] = []
        spans: list[Span] = []
        small: list[str] = []
        problems: list[str] = []
        for t in range(self.mega_batches):
            pool = corpus.pool(t)
            pools.append(pool)
            if pool.words < self.needed:
                name = self.names[t]
                small.append(f"{name} ({self.period(name) or ', '.join(self.order[t])}) has {pool.words:,}")
                continue
            try:
                spans += self._spans(pool, t, corpus)
                corpus.taken[t] = pool.at(spans[-1].end).last
            except UserError as error:
                problems.append(str(error))
        if small:
            parts = f"{self.eval_words:,} test + {self.valid_words:,} validation"
            parts += f" + {self.words or 1:,} training"
            listed = ", ".join(small[:_SHOWN]) + ", ..." * (len(small) > _SHOWN)
            few = f"{len(small):,} of {self.mega_batches:,} mega-batches have fewer than"
            asked = f"the {self.needed:,} words of their parts ({parts}) after dropping duplicates"
            problems.insert(0, f"{few} {asked}: {listed}; {self.remedy}")
        if problems:
            raise UserError("; ".join(problems))
        return pools, spans

    @property
    def needed(self) -> int:
        """Words that a mega-batch must have."""
        return self.eval_words + self.valid_words + (self.words or 1)

    def _spans(self, pool: Pool, t: int, corpus: SortedCorpus) -> list[Span]:
        """The splits of mega-batch t: roles 1, 2, 3, 4 and 0."""
        sizes = [self.eval_words, self.valid_words, self.words or pool.words]
        held_out = [role * self.mega_batches + t for role in (2, 4)]
        spans = spans_of(t, [*held_out, t], pool.cuts(sizes, pool.words - self.needed))
        counts = sizes_of(spans)
        if min(counts) <= 0:
            part = ("test", "valid", "megabatch")[int(np.argmin(counts))]
            raise corpus.empty(f"{part}_{self.first + t:02d}")
        # The beginnings of the held-out parts are in the mixed parts too: at least one document of each.
        for split, size in zip(held_out, (self.eval_words, self.valid_words), strict=True):
            at = next(number for number, span in enumerate(spans) if span.split == split)
            start = spans[at - 1].end if at else 0
            end = pool.nearest(size // self.mega_batches + pool.at(start).words)
            spans.insert(at, Span(t, split - self.mega_batches, min(max(end, start + 1), spans[at].end)))
        return spans


def from_corpus(corpus: list[tuple[str, bool]]) -> list[list[str]]:
    """The order given by the CORPUS arguments: (source, whether it joins the mega-batch before).

    UserError: all sources that repeat or have nothing to join.
    """
    order: list[list[str]] = []
    problems = []
    for name, joins in corpus:
        known = [names for names in order if name in names]
        if joins and not order:
            problems.append(f"{name}+=: the first source begins a mega-batch; write {name}=")
        elif known and not (joins and known == order[-1:]):
            problems.append(f"{name}: in two mega-batches; give each a name of its own, or join them by +=")
        elif not joins:
            order.append([name])
        elif not known:
            order[-1].append(name)
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))
    return order


@dataclass(frozen=True)
class Dated(Ordered):
    """Sizes of each period in words. `order` and `periods` are empty until the dates are read."""

    merge_small: bool = False
    """Merge a period that is too small with the next one, and the last with the one before."""
    periods: list[str] = field(default_factory=list)  # of each mega-batch; merged ones as FIRST..LAST
    remedy: ClassVar[str] = "merge periods with --merge-small, choose longer ones or ask for fewer words"

    def record(self) -> dict[str, Any]:
        """The fields that are known before any text is read."""
        late = ("mega_batches", "valid_source", "order", "periods")
        return {name: value for name, value in super().record().items() if name not in late}

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The sources of all periods; before the dates are read those of the files."""
        if not self.order:
            return tuple(sorted(set(names)))
        return super().sources(name for own in self.order for name in own)

    def period(self, part: str) -> str:
        """The period of a part; that of mixed parts is empty."""
        number = part.rpartition("_")[2]
        return self.periods[int(number) - self.first] if number.isdecimal() else ""

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
            most = f"--by {by}: {len(groups):,} periods, of which a stream has at most {MOST:,}"
            raise UserError(f"{most}; choose longer ones, or fewer by --from and --until")
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
    unusable = [why for why in _UNUSABLE if counts[why]]
    if unusable and dates.undated == "error":
        found = [f"{counts[why]:,} documents {_UNUSABLE[why]} (first: {first[why]})" for why in unusable]
        remedy = "give --date-format (seconds, %Y%m%d, ...), fix them, name another field, or --undated skip"
        raise UserError(f"--by {dates.by}, --date-key {dates.key}: {'; '.join(found)}; {remedy}")
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
