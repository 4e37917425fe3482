"""The front of language models: average perplexity against training compute.

`python -m alma.report --figures lm` draws it beside Figure 5.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from alma.report import style
from alma.report.front import Point, draw_front
from alma.report.labels import data_name, listed
from alma.report.lm.entries import Entry
from alma.report.results import average_trained, compute, trained
from alma.report.style import Picture

_CAPTION = (
    "Average {metric} over the stream against training compute. The grey line joins the configurations that "
    "no other beats in both; labels are their experts, such as 4@2 for 2 members with 4 experts each. All "
    "have one waiting time, so that their averages start at the same mega-batch."
)
_LEFT_OUT = "not in the front (one waiting time, whole stream)"


def write_front(
    found: Mapping[str, Sequence[Entry]], out: Path, per_word: bool
) -> tuple[list[Picture], list[str]]:
    """Write the front for each B of `find_entries` to `out`; returns pictures and remarks."""
    metric = "perplexity per word" if per_word else "perplexity"
    pictures, remarks = [], []
    with style.drawing():
        for suffix, entries in found.items():
            shown = complete(entries)
            left_out = [f"{entry.setting} of {entry.size}" for entry in entries if entry not in shown]
            if left_out:
                remarks.append(f"{_LEFT_OUT}: {listed(left_out)}")
            if len(shown) < 2:
                remarks.append("front: only one configuration" if shown else "front: no configuration")
                continue
            megabatches = shown[0].result.config["megabatches"]
            title = f"{data_name(shown[0].result.config)}B = {megabatches}: {metric} against compute"
            label = f"average {metric} over t = {trained(shown[0].result.repeats[0])[0]}..{megabatches}"
            path = out / f"front{suffix}.png"
            points = list(map(_point, shown))
            figure = draw_front(points, title, label)
            style.save(figure, path)
            pictures.append(Picture(path, _CAPTION.format(metric=metric)))
    return pictures, remarks


def complete(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of the whole stream with the smallest w.

    Averages then start at the same t. The perplexity of the untrained model, about the vocabulary size, does
    not count: it would hide all differences.
    """
    done = [e for e in entries if e.result.progress == e.result.config["megabatches"]]
    least = min((entry.result.waiting_time for entry in done), default=0)
    return [entry for entry in done if entry.result.waiting_time == least]


def _point(entry: Entry) -> Point:
    result, end = entry.result, entry.result.times[-1]
    mean, deviation = result.over_seeds(lambda rows: average_trained(rows, end))
    return Point(result, result.over_seeds(compute)[0], mean, deviation, _experts(entry), entry.size)


def _experts(entry: Entry) -> str:
    structure = entry.structure(entry.result.times[-1])
    return structure + " experts" * (structure != "dense")
