"""The stages of the pipeline; STAGES, at the end, lists them in the order in which they run."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from alma.stream import Part
from data_prep import cut, dated, encode, finalise, plan, ranges, scan, shuffle, tokenizer
from data_prep.build import Build, PipelineStage
from data_prep.dated import Dated
from data_prep.near_duplicates import find_range, write_bands
from data_prep.work import Task, read_arrays, read_json


class FindPeriods(PipelineStage):
    """Find the periods of a dated stream."""

    name = "dates"
    needs = ()
    writes = ("dates.json",)
    unit = "B"

    def is_needed(self, build: Build) -> bool:
        return isinstance(build.splits, Dated)

    def tasks(self, build: Build) -> list[Task]:
        # Near duplicates depend on the mega-batches: where they are dropped, small periods are
        # merged after this stage, by words that include duplicates.
        words = build.settings.near_duplicates
        return self.per_shard(build, dated.count_dates, words=words)

    def finish(self, build: Build) -> None:
        splits = build.splits
        dates = build.space.reader.dates
        assert isinstance(splits, Dated)
        assert dates
        counts = dated.read_dates(build.space, dates, len(build.shards))
        merge = splits.merge_small and build.settings.near_duplicates
        build.splits = splits.with_periods(dates.by, counts.words, merge)
        build.space = replace(build.space, sources=build.splits.sources(()))
        build.without_period = counts.left_out


class ScanDocuments(PipelineStage):
    """Read the text: a record of each document, and its MinHashes to drop near duplicates."""

    name = "scan"
    needs = ()
    writes = ("entries.bin", "skipped.json", "scan.bin")
    unit = "B"

    def tasks(self, build: Build) -> list[Task]:
        arrivals = build.arrivals if build.settings.near_duplicates else None
        return self.per_shard(build, scan.scan_shard, arrivals=arrivals)


class SortBands(PipelineStage):
    """Sort the MinHashes by band."""

    name = "bands"
    needs = ("scan",)
    writes = ("bands.bin",)
    unit = "B"

    def is_needed(self, build: Build) -> bool:
        return build.settings.near_duplicates

    def tasks(self, build: Build) -> list[Task]:
        return self.per_file(build, build.entries, write_bands)


class FindNearDuplicates(PipelineStage):
    """Compare the documents that share a band."""

    name = "near"
    needs = ("scan", "bands")
    writes = ("near.bin",)
    unit = "range"

    def is_needed(self, build: Build) -> bool:
        return build.settings.near_duplicates

    def tasks(self, build: Build) -> list[Task]:
        return self.per_range(
            build,
            build.near_ranges,
            find_range,
            ranges=build.near_ranges,
            shards=len(build.shards),
            past=build.past_entries,
            first=build.splits.first,
        )


class ReadPastKeys(PipelineStage):
    """Read the content keys of the stream that grows."""

    name = "keys"
    needs = ()
    writes = ("keys.bin",)
    unit = "B"

    def is_needed(self, build: Build) -> bool:
        return bool(build.past_keys)

    def tasks(self, build: Build) -> list[Task]:
        return self.per_file(build, build.past_keys, scan.scan_keys)


class SortRecords(PipelineStage):
    """Sort the records by content key, in ranges, and find the duplicates."""

    name = "sort"
    needs = ("scan", "near", "keys")
    writes = ("similar.bin", "range.bin", "again.bin", "valid.bin", "sums.npz")
    unit = "range"

    def tasks(self, build: Build) -> list[Task]:
        splits = build.splits
        sources = build.space.sources
        return self.per_range(
            build,
            build.ranges,
            ranges.sort_range,
            ranges=build.ranges,
            shards=len(build.shards),
            past=len(build.past_keys),
            arrivals=splits.arrivals(sources),
            valid=sources.index(splits.valid_source) if splits.valid_source else None,
            near=build.near_ranges if build.settings.near_duplicates else None,
            first_batch=splits.first,
        )

    def finish(self, build: Build) -> None:
        """Merge small periods by their words without duplicates, which are known now."""
        splits = build.splits
        dates = build.space.reader.dates
        if not dates or not isinstance(splits, Dated) or not splits.merge_small:
            return
        if build.settings.near_duplicates:  # merged after the stage dates
            return
        words = np.zeros(len(build.space.sources), np.int64)
        for number in range(build.ranges):
            sums = read_arrays(build.space.file("sums", number, "npz"), "first")
            words += sums["first"][1]  # a duplicate counts in its first period
        by_source = dict(zip(build.space.sources, words.tolist(), strict=True))
        build.splits = splits.with_periods(dates.by, by_source, True)


class CutSplits(PipelineStage):
    """Find where the splits end in the order of content keys."""

    name = "cut"
    needs = ("sort",)
    writes = (cut.CUT,)
    unit = "corpus"

    def tasks(self, build: Build) -> list[Task]:
        task = Task(
            done=build.space.directory / cut.CUT,
            weight=1,
            function=cut.cut_corpus,
            arguments={"space": build.space, "splits": build.splits, "ranges": build.ranges},
        )
        return [task]


class PlanBuckets(PipelineStage):
    """Cut the splits into buckets."""

    name = "plan"
    needs = ("sort", "cut")
    writes = ("dropped.bin", "parts.npz")
    unit = "range"

    def tasks(self, build: Build) -> list[Task]:
        return self.per_range(build, build.ranges, plan.plan_range, splits=build.splits)

    def finish(self, build: Build) -> None:
        build.plan = plan.collect_plan(build.space, build.splits, build.ranges)


class KeepHashes(PipelineStage):
    """Choose the MinHashes that the stream keeps, to drop near duplicates from its additions."""

    name = "hashes"
    needs = ("scan", "sort", "cut")
    writes = ("past.bin",)
    unit = "range"

    def is_needed(self, build: Build) -> bool:
        return build.settings.near_duplicates

    def tasks(self, build: Build) -> list[Task]:
        return self.per_range(
            build,
            build.ranges,
            plan.keep_entries,
            ranges=build.ranges,
            shards=len(build.shards),
            splits=build.splits,
        )


class ListCopies(PipelineStage):
    """List the documents that were dropped as duplicates."""

    name = "copies"
    needs = ("scan", "sort", "cut")
    writes = ("copies.jsonl",)
    unit = "range"

    def is_needed(self, build: Build) -> bool:
        return build.settings.write_dropped

    def tasks(self, build: Build) -> list[Task]:
        return self.per_range(
            build,
            build.ranges,
            plan.write_copies,
            ranges=build.ranges,
            shards=len(build.shards),
            splits=build.splits,
        )


class ShuffleTexts(PipelineStage):
    """Read the text again, and sort it by bucket."""

    name = "shuffle"
    needs = ("scan", "plan")
    writes = ("spill.bin", "spill.index", "spill.npy")
    unit = "B"

    def tasks(self, build: Build) -> list[Task]:
        return self.per_shard(
            build, shuffle.shuffle_shard, splits=build.splits, ranges=build.ranges
        )


class TrainTokenizer(PipelineStage):
    """Train the tokenizer, unless one is given.

    Only on the first mega-batch: the others have not arrived when the model is first trained.
    """

    name = "tokenizer"
    needs = ("shuffle",)
    writes = (tokenizer.MODEL,)
    unit = "model"

    def is_needed(self, build: Build) -> bool:
        return build.settings.vocab_size is not None

    def tasks(self, build: Build) -> list[Task]:
        task = Task(
            done=build.space.directory / tokenizer.MODEL,
            weight=1,
            function=tokenizer.train_tokenizer,
            arguments={
                "space": build.space,
                "buckets": build.plan.buckets(0),
                "shards": len(build.shards),
                "vocab_size": build.settings.vocab_size,
            },
        )
        return [task]


class EncodeBuckets(PipelineStage):
    """Encode the text of each bucket in the order of content keys."""

    name = "encode"
    needs = ("shuffle", "tokenizer")
    writes = ("bucket.bin", "bucket.jsonl", "bucket.npz")
    unit = "word"

    def tasks(self, build: Build) -> list[Task]:
        names = build.splits.names
        tasks = []
        for number, split in enumerate(build.plan.bucket_split.tolist()):
            task = self.task(
                build,
                number,
                weight=int(build.plan.bucket_words[number]),
                function=encode.encode_bucket,
                period=build.splits.period(names[split]),
                shards=len(build.shards),
                write=build.settings.write,
                end_token=build.settings.end_token,
            )
            tasks.append(task)
        return tasks

    def finish(self, build: Build) -> None:
        encode.check_encode(build.space, build.plan)


class FinaliseParts(PipelineStage):
    """Concatenate the buckets of each part of the stream."""

    name = "finalise"
    needs = ("plan", "hashes", "copies", "encode")
    writes = ("PART.json",)
    unit = "word"

    def tasks(self, build: Build) -> list[Task]:
        code = encode.load_encoder(build.space.directory).dtype_code
        tasks = []
        for number, (name, splits) in enumerate(build.splits.parts.items()):
            words = build.plan.source_words[splits].sum(0).tolist()
            buckets: list[int] = []
            for split in splits:
                buckets += build.plan.buckets(split)
            batch = build.splits.first + number  # mega-batches are the first parts
            keeps_entries = build.settings.near_duplicates and batch in build.arrivals
            task = Task(
                done=self._record(build, name),
                weight=sum(words),
                function=finalise.finalise_part,
                arguments={
                    "space": build.space,
                    "name": name,
                    "buckets": buckets,
                    "sources": build.space.by_name(words),
                    "code": code,
                    "ranges": build.ranges,
                    "arrival": batch if keeps_entries else None,
                    "write": build.settings.write,
                },
            )
            tasks.append(task)
        return tasks

    def finish(self, build: Build) -> None:
        for name in build.splits.parts:
            part = msgspec.convert(read_json(self._record(build, name)), Part)
            build.parts.append(replace(part, period=build.splits.period(name)))
        if build.settings.write_dropped:
            plan.add_copies(build.space, build.parts[0], build.ranges, build.splits.first)

    def _record(self, build: Build, name: str) -> Path:
        return build.space.directory / f"{name}.json"


STAGES: tuple[PipelineStage, ...] = (
    FindPeriods(),  # of a dated stream
    ScanDocuments(),
    SortBands(),  # to drop near duplicates
    FindNearDuplicates(),  # to drop near duplicates
    ReadPastKeys(),  # of a stream that grows
    SortRecords(),
    CutSplits(),
    PlanBuckets(),
    KeepHashes(),  # to drop near duplicates
    ListCopies(),  # with --write-dropped
    ShuffleTexts(),
    TrainTokenizer(),  # unless one is given
    EncodeBuckets(),
    FinaliseParts(),
)
