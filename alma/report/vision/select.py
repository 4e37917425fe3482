"""Selections of image runs for the paper's figures, and the looks of their lines.

Runs are selected by data set, method, size and waiting time. A method is a learner with its
settings, except size (`hidden`), waiting time, replay and seed. The decay of an average of weights
belongs to the waiting time: it makes another method only if it differs at one of them.
"""

import json
import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from alma import metrics
from alma.configs import canonical, differing, flatten
from alma.learners import colour_of
from alma.records import Run
from alma.report import style
from alma.report.figures import Curve
from alma.report.labels import ALWAYS_SHOWN, as_setting, variants
from alma.report.results import Measure, Result, Rows, column, compute, group, memory, slug
from alma.report.style import LegendEntries

_NOT_METHOD = ALWAYS_SHOWN | {"hidden", "dataset", "data"}
_CONTROLLED = ("hidden", "waiting_time", "replay", "epochs", "arch")
"""Settings that all results of an ablation must share."""

Pair = tuple[Result, Result]
wait = operator.attrgetter("waiting_time")


class Missing(Exception):
    """A figure cannot be drawn from these runs; the message gives the reason."""


def is_image(run: Run) -> bool:
    """Whether this is an image run: with a data set, a backbone and errors."""
    return {"dataset", "arch"} <= run.config.keys() and all(
        row["metric"] == "error" for row in run.rows
    )


def finished(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The complete image runs, and a line for each other run.

    The CER of a partial stream is meaningless.
    """
    done = []
    remarks = []
    for run in runs:
        t = len(run.rows) - 1
        end = run.config["megabatches"]
        if not is_image(run):
            remarks.append(f"not an image run, left out of the figures: {run.directory}")
        elif t < end:
            remarks.append(
                f"not finished (t={max(t, 0)}/{end}), left out of the figures: {run.directory}"
            )
        else:
            done.append(run)
    # A run with an average and its raw weights have the same remarks: keep each once.
    return done, list(dict.fromkeys(remarks))


def data_sets(runs: Sequence[Run]) -> dict[str, list[Result]]:
    """Results by data set and B (such as mnist_B500), sorted by method, size and waiting time.

    `settings` of a result: what differs from the most frequent settings of its learner.
    """
    by_data_set = {}
    for results in group(runs):
        configs = [_method_settings(result) for result in results]
        usual: dict[str, dict[str, Any]] = {}
        for learner in {result.learner for result in results}:
            members = [
                pair for pair in zip(results, configs, strict=True) if pair[0].learner == learner
            ]
            growth = [
                (result.waiting_time, result.config.get("grow_every", 0)) for result, _ in members
            ]
            if _grow_together(growth):
                for _, config in members:
                    config.pop("grow_every", None)
            count = Counter(json.dumps(config) for _, config in members)
            usual[learner] = json.loads(count.most_common(1)[0][0])
        named = []
        names_of = variants(
            [result.config for result in results], within=("learner", "waiting_time")
        )
        for result, config, variant in zip(results, configs, names_of, strict=True):
            names = differing([usual[result.learner], config])
            text = " ".join(f"{name}={as_setting(config.get(name, 'none'))}" for name in names)
            named.append(replace(result, settings=text, variant=variant))
        named.sort(key=lambda r: (r.rank, r.method, size(r), r.waiting_time, r.config["replay"]))
        by_data_set[f"{slug(results[0].data)}_B{results[0].megabatches}"] = named
    return by_data_set


def _method_settings(result: Result) -> dict[str, Any]:
    """The settings of a result that belong to its method."""
    config = flatten(result.config)
    return {name: value for name, value in config.items() if name not in _NOT_METHOD}


def _grow_together(growth: Sequence[tuple[int, int]]) -> bool:
    """Whether all grow after the same number of mega-batches, rounded up to whole stages.

    `growth`: the waiting time and `grow_every` of each.
    """

    def after(megabatches: int) -> bool:
        return all(every == -(-megabatches // waited) for waited, every in growth)

    longest = max(waited * every for waited, every in growth)
    return any(map(after, range(1, longest + 1)))


def size(result: Result) -> int:
    """Size of the backbone: units of a hidden layer, or channels; 0 for a model of torchvision."""
    return result.config.get("hidden", 0)


def distinct(key: Callable[[Result], int], results: Iterable[Result]) -> list[int]:
    """The different values of `key`, ascending."""
    return sorted(set(map(key, results)))


def methods(results: Iterable[Result]) -> list[str]:
    """The different methods, in order of appearance."""
    return list(dict.fromkeys(result.method for result in results))


def cer(rows: Rows) -> float:
    """Cumulative error rate (eq. 1): the sum over t = 1..B of errors as fractions, so at most B."""
    return metrics.cumulative_error_rate(column(rows, "value"))


def without_replay(results: Iterable[Result]) -> list[Result]:
    """The results without replay. Missing: there are none."""
    plain = [result for result in results if not result.config["replay"]]
    if not plain:
        raise Missing("no run without --replay")
    return plain


def replay_pairs(results: Sequence[Result]) -> list[Pair]:
    """Pairs (without, with replay) that differ in nothing else. Missing: there are none."""
    pairs = _pairs(results, "replay", False, True)
    if not pairs:
        if any(result.config["replay"] for result in results):
            raise Missing("no two runs that differ only in --replay")
        raise Missing("no run with --replay")
    return pairs


def at_one_wait(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs at waiting time 10, as in Figure 4, or else at the most frequent one."""
    count = Counter(wait(plain) for plain, _ in pairs)
    chosen = min(count, key=lambda w: (w != 10, -count[w], w))
    return [pair for pair in pairs if wait(pair[0]) == chosen]


def _pairs(results: Sequence[Result], name: str, one: Any, other: Any) -> list[Pair]:
    """Pairs of results with `name` set to `one` and to `other`, else equal but for the seed."""
    first = {canonical(r.config, name, "seed"): r for r in results if r.config.get(name) == one}
    second = {canonical(r.config, name, "seed"): r for r in results if r.config.get(name) == other}
    return [(first[key], result) for key, result in second.items() if key in first]


def most_waits(results: Sequence[Result]) -> list[Result]:
    """Results of the method and size with the most waiting times (Figure 1).

    Ties go to sm, then to the largest.
    """
    kinds: dict[tuple[str, int], list[Result]] = {}
    for result in without_replay(results):
        kinds.setdefault((result.method, size(result)), []).append(result)
    chosen = max(
        kinds.values(), key=lambda members: (len(members), -members[0].rank, size(members[0]))
    )
    if len(chosen) < 2:
        raise Missing("no learner with two waiting times of one size")
    return chosen


def extreme_sizes(results: Sequence[Result]) -> list[Result]:
    """The smallest and the largest models, without replay, with their learner's usual settings."""
    usual = [result for result in without_replay(results) if not result.settings]
    if not usual:
        raise Missing("no run without --replay and with a learner's usual settings")
    return [r for r in usual if size(r) in (min(map(size, usual)), max(map(size, usual)))]


def waiting_wins(members: Sequence[Result]) -> dict[int, int]:
    """The waiting time with the lowest mean error, by t.

    A t at which it is the shortest waiting time is left out. `members` are complete results of one
    learner and size, at least one.
    """
    winners = {}
    for t in range(1, members[0].megabatches + 1):
        errors = {}
        for member in members:
            errors[wait(member)] = statistics.fmean(rows[t]["value"] for rows in member.repeats)
        best = min(errors, key=lambda w: (errors[w], w))
        if best > min(errors):
            winners[t] = best
    return winners


def update_rates(results: Sequence[Result]) -> dict[str, Result]:
    """The four curves of the first draft's Figure 1, by label, from its caption and section 1.

    Of the smallest size: sm that trains on each mega-batch, then sm and gmoe at an intermediate
    waiting time, the one nearest to 5 (section 5.1). Of the largest: sm that waits for the whole
    stream. Missing: one of them is missing.
    """
    usual = [r for r in without_replay(results) if not r.settings]
    by_kind = {(r.learner, size(r), wait(r)): r for r in usual}
    small = min(map(size, usual), default=0)
    large = max(map(size, usual), default=0)
    whole = results[0].megabatches
    between = [w for learner, _, w in by_kind if learner == "gmoe" and 1 < w < whole]
    if not between:
        raise Missing("no run of gmoe that waits for more than one mega-batch, and not for all")
    middle = min(between, key=lambda w: (abs(w - 5), w))
    kinds = [
        ("sm", small, 1),
        ("sm", small, middle),
        ("gmoe", small, middle),
        ("sm", large, whole),
    ]
    shown = {}
    for learner, hidden, waited in kinds:
        name = f"{learner}, {hidden}, w = {waited}"
        if (learner, hidden, waited) not in by_kind:
            raise Missing(f"no run of {name}")
        shown[name] = by_kind[learner, hidden, waited]
    return shown


def cer_against(results: Iterable[Result], cost: Measure) -> list[Curve]:
    """CER against a cost (Figure 2): a curve over ascending sizes by method and waiting time."""
    curves: dict[tuple[str, int], Curve] = {}
    for result in sorted(results, key=size):
        curve = curves.setdefault((result.method, wait(result)), Curve(result, [], [], []))
        point = result.over_seeds(cost)[0], *result.over_seeds(cer)
        for values, value in zip((curve.x, curve.y, curve.deviation), point, strict=True):
            values.append(value)
    order = dict.fromkeys((result.method, wait(result)) for result in results)
    return [curves[key] for key in order]


class Spoke(NamedTuple):
    """An axis of a radar plot: the values of the results, and their radii from 0 (centre) to 1."""

    values: list[float]
    radii: list[float]
    logarithmic: bool


SPOKES: dict[str, Measure] = {
    "CER": cer,
    "Mem": memory,
    "train FLOPs": lambda rows: 1e12 * compute(rows),
    # The first draft's compute at test time: FLOPs of one example, summed over t = 0..B.
    "test FLOPs": lambda rows: math.fsum(column(rows, "eval_flops_per_example").values()),
}


def spokes(results: Sequence[Result]) -> dict[str, Spoke]:
    """The axes of a radar plot by name.

    Radii are fractions of the largest value; logarithmic from 0.1 if the values span more than a
    decade.
    """
    by_name = {}
    for name, measure in SPOKES.items():
        values = [result.over_seeds(measure)[0] for result in results]
        low = min(values)
        high = max(values)
        radii = [value / high if high else 0.0 for value in values]
        logarithmic = 0 < 10 * low < high
        if logarithmic:
            radii = [0.1 + 0.9 * math.log(value / low) / math.log(high / low) for value in values]
        by_name[name] = Spoke(values, radii, logarithmic)
    return by_name


def ablation(results: Sequence[Result]) -> dict[str, Result]:
    """The first draft's Figure 5 left (section 5.2): gmoe with tree gates and with flat gates.

    The two agree in all other settings; of several pairs, the one with the most seeds, then the
    largest size and the smallest waiting time. If there are such runs, also moe, and an ensemble of
    mixtures, each trained on one stage's data (gens with several experts): each the run that shares
    most settings with the tree, never chosen by its error. Missing: there is no pair.
    """
    pairs = _pairs([r for r in results if r.learner == "gmoe"], "router", "tree", "flat")
    if not pairs:
        raise Missing("no two runs of gmoe that differ only in --router tree and flat")
    tree, flat = max(pairs, key=lambda pair: (len(pair[0].repeats), size(pair[0]), -wait(pair[0])))
    shown = {"gmoe, tree": tree, "gmoe, flat": flat}
    for name, learner in (("moe", "moe"), ("ensemble of moe", "gens")):
        mixtures = [r for r in results if r.learner == learner and r.config.get("experts", 1) > 1]
        candidates = [r for r in mixtures if _controlled(r) == _controlled(tree)]
        if candidates:
            nearest = max(
                candidates, key=lambda r: sum(v == tree.config.get(k) for k, v in r.config.items())
            )
            shown[f"{name}, {nearest.config['experts']} experts"] = nearest
    return shown


def _controlled(result: Result) -> list[Any]:
    """The settings of a result that must be equal to those of other results of an ablation."""
    return [result.config.get(name) for name in _CONTROLLED]


def units(result: Result) -> str:
    """The unit of `size`."""
    return "channels" if result.config.get("arch") == "vgg" else "hidden units"


def size_label(result: Result) -> str:
    """The size with its unit, such as "8 hidden units"; of a model of torchvision, its name."""
    return f"{size(result)} {units(result)}" if size(result) else result.config["arch"]


def look(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """Colour of the learner; lightness and line style of the method among the learner's methods."""
    peers = methods(r for r in results if r.learner == result.learner)
    return style.variant(colour_of(result.learner), peers.index(result.method))


def method_entries(shown: Sequence[Result], results: Sequence[Result]) -> LegendEntries:
    """Legend entries of the methods."""
    return list({result.method: look(result, results) for result in shown}.items())


def wait_entries(shown: Sequence[Result], results: Sequence[Result]) -> LegendEntries:
    """Legend entries of the waiting times of `shown`, in the colours of all `results`."""
    colours = style.wait_colours(map(wait, results))
    return [(f"w = {w}", {"color": colours[w], "linewidth": 2}) for w in distinct(wait, shown)]


def colour_titles(
    panels: dict[str, Any], shown: Sequence[Result], results: Sequence[Result]
) -> None:
    """Colour the title of each method's panel as its learner."""
    for result in shown:
        colour = look(result, results)["color"]
        panels[result.method].title.set(color=colour, fontweight="bold")
