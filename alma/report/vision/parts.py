"""Titles, looks and legends of the figures of image runs."""

from collections.abc import Sequence
from typing import Any

from alma.learners import colour_of
from alma.report import style
from alma.report.results import Result
from alma.report.style import LegendEntries
from alma.report.vision.select import distinct, methods, size, wait


def units(result: Result) -> str:
    """The unit of `size`."""
    return "channels" if result.config.get("arch") == "vgg" else "hidden units"


def size_label(result: Result) -> str:
    """The size with its unit, such as "8 hidden units"; of a model of torchvision, its name."""
    return f"{size(result)} {units(result)}" if size(result) else result.config["arch"]


def look(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """Colour of the learner, and lightness and line style of the method among the learner's methods."""
    peers = methods(r for r in results if r.learner == result.learner)
    return style.variant(colour_of(result.learner), peers.index(result.method))


def method_entries(shown: Sequence[Result], results: Sequence[Result]) -> LegendEntries:
    """Legend entries of the methods."""
    return list({result.method: look(result, results) for result in shown}.items())


def wait_entries(shown: Sequence[Result], results: Sequence[Result]) -> LegendEntries:
    """Legend entries of the waiting times of `shown`, in the colours of all `results`."""
    colours = style.wait_colours(map(wait, results))
    return [(f"w = {w}", {"color": colours[w], "linewidth": 2}) for w in distinct(wait, shown)]


def markers(values: Sequence[int]) -> dict[int, str]:
    """A marker for each value."""
    return {value: style.MARKERS[i % len(style.MARKERS)] for i, value in enumerate(values)}


def colour_titles(panels: dict[str, Any], shown: Sequence[Result], results: Sequence[Result]) -> None:
    """Give the titles of panels, which are by method, the colours of the learners."""
    for result in shown:
        colour = look(result, results)["color"]
        panels[result.method].title.set(color=colour, fontweight="bold")
