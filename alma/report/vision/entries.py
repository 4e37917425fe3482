"""Image runs as the paper's figures need them: by data set, method, size and waiting time.

A method is a learner; where its runs differ in more than size (`hidden`), waiting time, replay and seed,
each choice is a method of its own.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from alma import metrics
from alma.records import Run, flatten
from alma.report.figures import Curve, curve
from alma.report.labels import as_text
from alma.report.results import Result, Rows, column, compute, group, memory

LEARNERS = ("sm", "ens", "umix", "gens", "gmoe", "moe", "ff")
"""In the order of legends and panels."""

_FREE = {"learner", "name", "hidden", "waiting_time", "replay", "seed", "megabatches", "dataset", "data"}

_ALIKE = ("hidden", "waiting_time", "replay", "epochs", "arch")
"""In what learners agree that an ablation compares."""

Pair = tuple[Result, Result]


class Missing(Exception):
    """Why a figure cannot be drawn from the runs at hand."""


def is_image(run: Run) -> bool:
    """Whether a run is one of `vision`, of a data set and with a size."""
    return {"dataset", "hidden"} <= run.config.keys() and all(row["metric"] == "error" for row in run.rows)


def finished(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The image runs that are complete, for the CER of half a stream means nothing; a line for each other."""
    done, remarks = [], []
    for run in runs:
        t, end = len(run.rows) - 1, run.config["megabatches"]
        if not is_image(run):
            remarks.append(f"not an image run, left out of the figures: {run.directory}")
        elif t < end:
            remarks.append(f"not finished (t={max(t, 0)}/{end}), left out of the figures: {run.directory}")
        else:
            done.append(run)
    return done, remarks


def data_sets(runs: Sequence[Run]) -> dict[str, list[Result]]:
    """Results by data set and B, named such as mnist_B500, sorted by method, size and waiting time. Their
    `settings` say only where a method differs from the most frequent one of its learner."""
    found: dict[tuple[str, int, str], list[Result]] = {}
    for result in (result for table in group(runs) for result in table):
        config = result.config
        key = config["dataset"], config["megabatches"], str(config.get("data", ""))
        found.setdefault(key, []).append(result)
    stems = Counter((name, megabatches) for name, megabatches, _ in found)
    return {
        f"{name}_B{megabatches}" + (f"_{data[:6]}" if stems[name, megabatches] > 1 else ""): _named(results)
        for (name, megabatches, data), results in sorted(found.items())
    }


def _named(results: Sequence[Result]) -> list[Result]:
    settings = [{k: v for k, v in flatten(r.config).items() if k not in _FREE} for r in results]
    usual: dict[str, dict[str, Any]] = {}
    for learner in {result.config["learner"] for result in results}:
        theirs = zip(results, settings, strict=True)
        count = Counter(json.dumps(own) for result, own in theirs if result.config["learner"] == learner)
        usual[learner] = json.loads(count.most_common(1)[0][0])
    named = []
    for result, own in zip(results, settings, strict=True):
        base = usual[result.config["learner"]]
        differing = [key for key in base | own if own.get(key) != base.get(key)]
        text = " ".join(f"{key}={as_text(own.get(key, 'none'))}" for key in differing)
        named.append(replace(result, settings=text))
    return sorted(named, key=lambda r: (place(r), method(r), size(r), wait(r), r.config["replay"]))


def at_most(most: int, results: Sequence[Result]) -> tuple[list[Result], list[int]]:
    """The results of at most so many waiting times, the ends among them; and the waiting times left out."""
    waits = distinct(wait, results)
    steps = [round(i * (len(waits) - 1) / (most - 1)) for i in range(most)]
    kept = waits if len(waits) <= most else [waits[step] for step in steps]
    return [r for r in results if wait(r) in kept], [w for w in waits if w not in kept]


def method(result: Result) -> str:
    """The learner, and in what it differs from the learner's usual settings."""
    return result.learner


def place(result: Result) -> int:
    """Of its learner in LEARNERS; unknown ones are last."""
    learner = result.config["learner"]
    return LEARNERS.index(learner) if learner in LEARNERS else len(LEARNERS)


def size(result: Result) -> int:
    """Of the backbone: units of a hidden layer, or channels."""
    return result.config["hidden"]


def wait(result: Result) -> int:
    """The waiting time w."""
    return result.config["waiting_time"]


def tardy(result: Result) -> bool:
    """Whether it waits for the whole stream: replay would change nothing."""
    return wait(result) == result.config["megabatches"] and not result.config["replay"]


def distinct(key: Callable[[Result], Any], results: Iterable[Result]) -> list[Any]:
    """Different values of the results: numbers rising, names in order of appearance."""
    found = list(dict.fromkeys(map(key, results)))
    return found if found and isinstance(found[0], str) else sorted(found)


def cer(rows: Rows) -> float:
    """Cumulative error rate (eq. 1): the sum over t = 1..B of the error as a fraction, so at most B."""
    return metrics.cumulative_error_rate(column(rows, "value"))


def testing(rows: Rows) -> float:
    """FLOPs of testing one example at each t = 0..B: the draft's compute at test time."""
    return math.fsum(column(rows, "eval_flops_per_example").values())


def over_time(result: Result) -> Curve:
    """Test error (%) at each t."""
    return curve(result, result.times, lambda rows, t: t, lambda rows, t: rows[t]["value"])


def without_replay(results: Iterable[Result]) -> list[Result]:
    """Those without; Missing where there are none."""
    found = [result for result in results if not result.config["replay"]]
    if not found:
        raise Missing("no run without --replay")
    return found


def replay_pairs(results: Sequence[Result]) -> list[Pair]:
    """Results (without, with replay) that differ in nothing else; Missing where there are none."""
    if not any(result.config["replay"] for result in results):
        raise Missing("no run with --replay")
    pairs = _pairs(results, "replay", False, True)
    if not pairs:
        raise Missing("no two runs that differ only in --replay")
    return pairs


def at_one_wait(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs at waiting time 10 as in Figure 4, or else at the one that most of them share."""
    count = Counter(wait(plain) for plain, _ in pairs)
    chosen = 10 if 10 in count else min(count, key=lambda w: (-count[w], w))
    return [pair for pair in pairs if wait(pair[0]) == chosen]


def _pairs(results: Sequence[Result], key: str, one: Any, other: Any) -> list[Pair]:
    """Results that have `one` and `other` as their setting `key` and agree in all else but the seed."""

    def rest(result: Result) -> str:
        config = {name: value for name, value in result.config.items() if name not in (key, "seed")}
        return json.dumps(config, sort_keys=True)

    first = {rest(result): result for result in results if result.config.get(key) == one}
    second = [result for result in results if result.config.get(key) == other]
    return [(first[rest(result)], result) for result in second if rest(result) in first]


def most_waits(results: Sequence[Result]) -> list[Result]:
    """Those of the method and size that have most waiting times (Figure 1): sm before others, large first."""
    kinds: dict[tuple[str, int], list[Result]] = {}
    for result in without_replay(results):
        kinds.setdefault((method(result), size(result)), []).append(result)
    chosen = max(kinds.values(), key=lambda members: (len(members), -place(members[0]), size(members[0])))
    if len(chosen) < 2:
        raise Missing("no learner with two waiting times of one size")
    return chosen


def trade_offs(results: Iterable[Result], cost: Callable[[Rows], float]) -> list[Curve]:
    """CER against a cost: for each method and waiting time a curve over rising sizes (Figure 2)."""
    families: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        families.setdefault((method(result), wait(result)), []).append(result)
    curves = []
    for members in families.values():
        members.sort(key=size)
        points = [(r.over_seeds(cost)[0], *r.over_seeds(cer)) for r in members]
        x, y, deviation = map(list, zip(*points, strict=True))
        curves.append(Curve(members[0], x, y, deviation))
    return curves


class Spoke(NamedTuple):
    """An axis of a radar plot: values of the results, and their places from 0 (centre) to 1."""

    values: list[float]
    places: list[float]
    logarithmic: bool


SPOKES: dict[str, Callable[[Rows], float]] = {
    "CER": cer,
    "Mem": memory,
    "train FLOPs": lambda rows: 1e12 * compute(rows),
    "test FLOPs": testing,
}


def spokes(results: Sequence[Result]) -> dict[str, Spoke]:
    """The axes of a radar plot. Places are shares of the largest value, or where the values span more than a
    decade, logarithmic with the smallest at 0.1."""
    found = {}
    for name, measure in SPOKES.items():
        values = [result.over_seeds(measure)[0] for result in results]
        low, high = min(values), max(values)
        logarithmic = 0 < 10 * low < high
        if logarithmic:
            places = [0.1 + 0.9 * math.log(value / low) / math.log(high / low) for value in values]
        else:
            places = [value / high if high else 0.0 for value in values]
        found[name] = Spoke(values, places, logarithmic)
    return found


def ablation(results: Sequence[Result]) -> dict[str, Result]:
    """The draft's Figure 5 left (section 5.2): gmoe with a tree of gates and with a flat one, alike in all
    else (the pair of most seeds, then of the largest size and smallest waiting time). Where there are any,
    moe, and an ensemble of mixtures, each trained on one stage's data (gens with several experts). Of several
    the run most like the tree: none is chosen by its error.
    """
    pairs = _pairs([r for r in results if r.config["learner"] == "gmoe"], "router", "tree", "flat")
    if not pairs:
        raise Missing("no two runs of gmoe that differ only in --router tree and flat")
    tree, flat = max(pairs, key=lambda pair: (len(pair[0].repeats), size(pair[0]), -wait(pair[0])))
    shown = {"gmoe, tree": tree, "gmoe, flat": flat}
    for name, learner in (("moe", "moe"), ("ensemble of moe", "gens")):
        mixtures = [r for r in results if r.config["learner"] == learner and r.config.get("experts", 1) > 1]
        alike = [r for r in mixtures if _agree(r.config, tree.config, _ALIKE)]
        if alike:
            nearest = min(alike, key=lambda r: _differences(r.config, tree.config))
            shown[f"{name}, {nearest.config['experts']} experts"] = nearest
    return shown


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], keys: Iterable[str]) -> bool:
    return all(one.get(key) == other.get(key) for key in keys)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether two learners have other numbers of experts, and in how many settings of both they differ."""
    both = one.keys() & other.keys() - {"learner", "seed"}
    return one["experts"] != other["experts"], sum(one[key] != other[key] for key in both)
