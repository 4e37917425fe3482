"""Results of language models by the names of the paper's tables: SM_w3 (3x steps), 4@2 experts."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from alma.configs import differing, flatten
from alma.errors import UserError
from alma.learners import LEARNERS, label_of
from alma.records import Run
from alma.report.labels import ALWAYS_SHOWN, as_setting, describe, distinguishing
from alma.report.lm.reference import Reference
from alma.report.results import Result, group

TOLERANCE = 0.03
"""Relative difference up to which a size counts as the paper's.

The paper prints 65, 91 and 116M for its base model with 4, 8 and 12 experts; the architecture that
it describes has 63.8, 89.0 and 114.2M, about 1.6M fewer shared parameters. For its large model, the
paper's 210, 323 and 436M match.
"""
SHOWN = ALWAYS_SHOWN - {"name"} | {"update_multiplier", "from_scratch", "new_members"}
"""Settings that labels need not show: the title or the name of the setting includes them."""
_DIMENSIONS = ("--decoder-", "--moe-freq")
"""Prefixes of the flags of fairseq-train that change the size of an --arch."""


class Entry(NamedTuple):
    """A result and its names in the tables."""

    result: Result
    size: str  # such as base
    setting: str  # such as SM_w3 (3x steps)

    @property
    def method(self) -> str:
        """The paper's name of the learner with the variant, such as "SM, average"."""
        return ", ".join(filter(None, (label_of(self.result.learner), self.result.variant)))

    @property
    def multiplier(self) -> int:
        """Updates of a stage relative to the usual number (the paper's "3x steps")."""
        return self.result.config.get("update_multiplier", 1)

    @property
    def new_members(self) -> int:
        """Models that a stage of gens adds."""
        return self.result.config.get("new_members", 1)

    @property
    def plain(self) -> bool:
        """Whether the protocol is the paper's: no replay, each stage fine-tunes the last model."""
        return not self.result.config["replay"] and not self.result.config.get("from_scratch")

    def members(self, t: int) -> int | None:
        """Members of an ensemble at t; None for a single model."""
        spec = LEARNERS.get(self.result.learner)
        if not spec or (spec.members is None and spec.deployed == 1):
            return None
        return self.result.repeats[0][t]["extra"].get("members", self.result.config.get("members"))

    def experts(self, t: int) -> int | None:
        """Experts per Switch layer (of each member) at t; None for a dense model."""
        extra = self.result.repeats[0][t]["extra"]
        return extra.get("experts", self.result.config.get("moe_expert_count"))

    def structure(self, t: int) -> str:
        """Experts at t in the paper's notation: 4, or 4@2 for two members with 4 experts each."""
        experts = self.experts(t)
        members = self.members(t)
        return ("dense" if experts is None else str(experts)) + (f"@{members}" if members else "")

    def parameters(self, t: int) -> float:
        """Free parameters at t, averaged over seeds."""
        return self.result.over_seeds(lambda rows: rows[t]["parameters"])[0]

    def match(self, t: int, paper: Iterable[Reference]) -> Reference | None:
        """The paper's row for this setting and structure at t, of the same size (TOLERANCE)."""
        key = self.result.learner, self.result.waiting_time, self.multiplier, self.structure(t)
        if not self.plain or self.new_members > 1 or self.result.variant:
            return None
        for line in paper:
            close = abs(self.parameters(t) - line.parameters) <= TOLERANCE * line.parameters
            if close and line[:4] == key:
                return line
        return None


def find_entries(runs: Sequence[Run]) -> tuple[dict[str, list[Entry]], list[str]]:
    """The perplexity results, and a line for each run that is left out or not finished.

    Results are grouped by data and B; the key is a suffix for file names, "" of a single group.
    UserError: no run has perplexity.
    """
    groups = []
    for results in group(runs):
        groups.append([r for r in results if r.metric == "perplexity" and r.times[-1]])
    if not any(groups):
        raise UserError(
            "no perplexity after a first mega-batch in these runs: only language models have it"
        )
    remarks = []
    for run in runs:
        if any(row["metric"] != "perplexity" for row in run.rows):
            remarks.append(f"not a perplexity run, left out: {run.directory}")
    entries = {}
    for results in groups:
        if results:
            entries[results[0].stem.removeprefix("perplexity")] = _named(results)
    for entry in itertools.chain(*entries.values()):
        if entry.result.unfinished:
            done = f"t={entry.result.progress}/{entry.result.end}"
            remarks.append(f"not finished ({done}): {entry.setting} of {entry.size}")
    # A run with an average and its raw weights have the same remarks: keep each once.
    remarks = list(dict.fromkeys(remarks))
    if len(entries) == 1:
        return {"": next(iter(entries.values()))}, remarks
    return entries, remarks


def _named(results: Sequence[Result]) -> list[Entry]:
    """Entries in the order of the paper's Table 2; settings that differ follow equal names."""
    configs = [flatten(result.config) for result in results]
    dimensions = {name for config in configs for name in config if name.startswith(_DIMENSIONS)}
    different = dimensions.intersection(differing(configs))
    # Dimensions that all entries share are not needed to tell their sizes apart.
    shared = dimensions - different if different else ()
    same: dict[tuple[str, str, str], list[Entry]] = {}
    for result in results:
        entry = Entry(result, size_of(result, shared), "")
        key = entry.size, setting(entry), entry.structure(result.times[0])
        same.setdefault(key, []).append(entry)
    named = []
    for (_, name, _), entries in same.items():
        configs = [flatten(entry.result.config) for entry in entries]
        names = distinguishing(configs, SHOWN)
        for entry, config in zip(entries, configs, strict=True):
            named.append(entry._replace(setting=f"{name} {describe(config, names)}".strip()))
    return sorted(
        named, key=lambda entry: (entry.result.rank, entry.result.waiting_time, entry.setting)
    )


def size_of(result: Result, without: Collection[str] = ()) -> str:
    """The architecture and the dimensions that override it: `base`, or `tiny layers=2`."""
    arch = result.config.get("arch", "").removeprefix("switch_gmoe").removeprefix("_")
    dimensions = []
    for name, value in flatten(result.config).items():
        if name.startswith(_DIMENSIONS) and name not in without:
            dimensions.append(f"{name.removeprefix('--').removeprefix('decoder-')}={value}")
    return " ".join([arch or "base", *sorted(dimensions)])


def model_size(result: Result) -> str:
    """The size of any model: units of a hidden layer (images), or `size_of` a language model."""
    if "hidden" in result.config:
        return as_setting(result.config["hidden"])
    return size_of(result) if "arch" in result.config else ""


def setting(entry: Entry) -> str:
    """Learner and protocol as in the paper's tables, such as SM_w3 (3x steps), and the variant."""
    config = entry.result.config
    name = f"{label_of(entry.result.learner)}_w{entry.result.waiting_time}"
    if entry.multiplier != 1:
        name += f" ({entry.multiplier}x steps)"
    if config["replay"]:
        name += " (replay)"
    if config.get("from_scratch"):
        name += " (from scratch)"
    if entry.new_members > 1:
        name += f" ({entry.new_members} new members)"
    return ", ".join(filter(None, (name, entry.result.variant)))


def sizes(entries: Sequence[Entry]) -> list[str]:
    """The sizes in ascending order of parameters."""
    ascending = sorted(
        entries, key=lambda entry: (entry.parameters(entry.result.times[0]), entry.size)
    )
    return list(dict.fromkeys(entry.size for entry in ascending))
