"""The splits of an ordered stream, whose mega-batches are sources in a given order.

A mega-batch takes the documents of its sources that no earlier mega-batch has taken. In hash order,
its documents become

    test_00        the first `eval_words` words
    valid_00       the next `valid_words` words
    megabatch_00   the next `words` words, or all others

`test` and `valid` of a new stream mix the mega-batches: `test` has the first 1/B of the words of
test_00, test_01, ..., `valid` those of valid_00, valid_01, ....

The splits of a mega-batch depend on its own documents and on those taken before, never on later
mega-batches. So additional mega-batches change no part but `test` and `valid`, and --append makes
the same parts that a new stream of all mega-batches would have.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from alma.errors import UserError
from data_prep.cut import SortedCorpus, Splits
from data_prep.pools import Pool, Span, sizes_of, spans_of

_SHOWN = 20  # most mega-batches that a message lists
_ROLES = ("megabatch", "test", "test", "valid", "valid")
"""Part of each role. Mega-batch t is divided into five splits, one for each role r, numbered
r * B + t. Role 0 is the training part. Roles 1 and 3 are the documents of its test and validation
part that are also in the mixed `test` and `valid`; 2 and 4 are the rest of these two parts."""
_MIXED = {"test": 1, "valid": 3}  # roles of the mixed parts


@dataclass(frozen=True)
class Ordered(Splits):
    """Requested sizes of each mega-batch in words; `words` 0: all that is left."""

    order: list[list[str]] = field(default_factory=list)  # the sources of each mega-batch

    @property
    def remedy(self) -> str:
        """What to do about mega-batches that are too small."""
        return "add text or ask for fewer words"

    @property
    def names(self) -> list[str]:
        """The part of each split in the order of their numbers."""
        batches = range(self.first, self.first + self.mega_batches)
        return [f"{role}_{batch:02d}" for role in _ROLES for batch in batches]

    @property
    def parts(self) -> dict[str, list[int]]:
        """The parts, with the numbers of their splits; additions have no mixed parts."""
        parts = super().parts
        if not self.first:
            for name, role in _MIXED.items():
                start = role * self.mega_batches
                parts[name] = list(range(start, start + self.mega_batches))
        return parts

    def rank(self, source: str) -> tuple[int, str]:
        """Sort key of the sources: by mega-batch, then by name."""
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

        A document that no part of a mega-batch takes may be taken by a later mega-batch. Raises one
        UserError for all mega-batches with too few words or an empty part.
        """
        pools: list[Pool] = []
        spans: list[Span] = []
        too_small: list[str] = []
        problems: list[str] = []
        for t in range(self.mega_batches):
            pool = corpus.pool(t)
            pools.append(pool)
            if pool.words < self.needed:
                name = self.names[t]
                contents = self.period(name) or ", ".join(self.order[t])
                too_small.append(f"{name} ({contents}) has {pool.words:,}")
                continue
            try:
                spans += self._spans(pool, t, corpus)
                corpus.taken[t] = pool.at(spans[-1].end).last
            except UserError as error:
                problems.append(str(error))
        if too_small:
            problems.insert(0, self._too_few_words(too_small))
        if problems:
            raise UserError("; ".join(problems))
        return pools, spans

    def _too_few_words(self, too_small: list[str]) -> str:
        """The message about mega-batches that have fewer words than their parts need."""
        parts = f"{self.eval_words:,} test + {self.valid_words:,} validation"
        parts += f" + {self.words or 1:,} training"
        listed = ", ".join(too_small[:_SHOWN])
        if len(too_small) > _SHOWN:
            listed += ", ..."
        few = f"{len(too_small):,} of {self.mega_batches:,} mega-batches have fewer than"
        needs = f"the {self.needed:,} words of their parts ({parts}) after dropping duplicates"
        return f"{few} {needs}: {listed}; {self.remedy}"

    @property
    def needed(self) -> int:
        """Words that a mega-batch must have."""
        return self.eval_words + self.valid_words + (self.words or 1)

    def _spans(self, pool: Pool, t: int, corpus: SortedCorpus) -> list[Span]:
        """The splits of mega-batch t: roles 1, 2, 3, 4 and 0."""
        sizes = [self.eval_words, self.valid_words, self.words or pool.words]
        test = 2 * self.mega_batches + t
        valid = 4 * self.mega_batches + t
        spans = spans_of(t, [test, valid, t], pool.cuts(sizes, pool.words - self.needed))
        counts = sizes_of(spans)
        if min(counts) <= 0:
            part = ("test", "valid", "megabatch")[int(np.argmin(counts))]
            raise corpus.empty(f"{part}_{self.first + t:02d}")
        self._insert_mixed(spans, pool, test, self.eval_words)
        self._insert_mixed(spans, pool, valid, self.valid_words)
        return spans

    def _insert_mixed(self, spans: list[Span], pool: Pool, split: int, size: int) -> None:
        """Insert, before a held-out split, the split of its documents that the mixed part has too.

        It has 1/B of the `size` words, and at least one document.
        """
        at = next(number for number, span in enumerate(spans) if span.split == split)
        start = spans[at - 1].end if at else 0
        end = pool.nearest(size // self.mega_batches + pool.at(start).words)
        end = min(max(end, start + 1), spans[at].end)
        spans.insert(at, Span(spans[at].pool, split - self.mega_batches, end))


def from_corpus(corpus: list[tuple[str, bool]]) -> list[list[str]]:
    """The order given by the CORPUS arguments: (source, whether it joins the mega-batch before).

    UserError: all sources that repeat or have nothing to join.
    """
    order: list[list[str]] = []
    problems = []
    for name, joins in corpus:
        batches = [names for names in order if name in names]
        if joins and not order:
            problems.append(f"{name}+=: the first source begins a mega-batch; write {name}=")
        elif batches and not (joins and batches == order[-1:]):
            remedy = "give each a name of its own, or join them by +="
            problems.append(f"{name}: in two mega-batches; {remedy}")
        elif not joins:
            order.append([name])
        elif not batches:
            order[-1].append(name)
    if problems:
        raise UserError("; ".join(dict.fromkeys(problems)))
    return order
