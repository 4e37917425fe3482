"""The paper's figures of image runs: their contents, on runs with known numbers."""

import itertools
import math
import re

import pytest

from alma.learners import colour_of
from alma.report import figures, style
from alma.report.results import Result, non_dominated
from alma.report.style import WAIT_RAMP, wait_colours
from alma.report.vision import costs, over_time, select
from alma.report.vision.select import Missing

from .synthetic import averaged, image_run, legend_of, rename_metric, report, results_of


def panels(figure):
    """The axes with data."""
    return [axes for axes in figure.axes if axes.lines]


def drawn(axes, colour):
    """Points of the lines with this colour, except dotted ones (untrained)."""
    lines = [
        line for line in axes.lines if line.get_color() == colour and line.get_linestyle() != ":"
    ]
    return [list(map(tuple, line.get_xydata())) for line in lines]


def test_the_front_joins_what_nothing_else_beats_in_both(tmp_path):
    image_run(tmp_path / "sm1", [0.5, 0.4, 0.3, 0.3])
    image_run(tmp_path / "sm4", [0, 0, 0, 0.1], w=4)
    image_run(tmp_path / "ens", [0.3, 0.2, 0.2, 0.1], learner="ens", members=2, replay=True)
    figure = costs.front(results_of(tmp_path))[""]
    (axes,) = panels(figure)
    line = axes.lines[0]
    assert list(line.get_xdata()) == [4, 10]  # sm with w = 4 costs as much as with w = 1
    assert list(line.get_ydata()) == pytest.approx([37.5, 20])
    assert [text.get_text() for text in axes.texts] == ["w = 1"]  # the same for both
    assert legend_of(figure)[:3] == ["learner", "sm", "ens"]


def test_the_front_leaves_out_raw_weights_but_those_of_the_paper_s_learners(tmp_path):
    averaged(image_run(tmp_path / "sm", [0.4] * 4, average="poly:8", epochs=100), 0.5)
    averaged(
        image_run(tmp_path / "new", [0.2] * 4, average="poly:8", replay_share=0.9, epochs=10), 0.5
    )
    (axes,) = panels(costs.front(results_of(tmp_path))[""])
    drawn_errors = sorted(y for bars in axes.containers for y in bars.lines[0].get_ydata())
    assert drawn_errors == pytest.approx([10, 20, 40])  # without 20 of raw weights with replay
    assert [text.get_text() for text in axes.texts] == ["w = 1"]


def test_several_configurations_of_one_learner_have_a_colour_each():
    def colours(*waits):
        results = [Result({"learner": "sm", "waiting_time": wait}, ()) for wait in waits]
        return [look["color"] for look in figures.looks(results)]

    assert len(set(colours(*[1] * 5))) == 5
    assert colours(1, 1) == [colour_of("sm"), style.variant(colour_of("sm"), 1)["color"]]
    assert colours(1, 10) == colours(1, 1)  # a learner has one colour everywhere


@pytest.mark.parametrize("high", [0.007, 0.04, 0.1, 2, 40, 3e4, 6e9])
def test_the_labels_of_a_logarithmic_axis_reach_its_ends_and_do_not_touch(high):
    for low in (high / 100, high / 3e5, high / 3e7):
        with style.drawing():
            figure, ((axes,),) = style.subplots(1, 1, (2.5, 2.2))
            axes.plot([low, high], [0, 1])
            style.number_axis(axes, "x", [low, high])
            figure.draw_without_rendering()
        ticks = [
            tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high * 1.001
        ]
        ticks.sort(key=lambda tick: tick.get_loc())
        boxes = [tick.label1.get_window_extent() for tick in ticks]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes)), low
        assert len(ticks) > 1, low
        gaps = math.log(high / ticks[-1].get_loc()), math.log(ticks[0].get_loc() / low)
        assert max(gaps) < 0.3 * math.log(high / low), low


def test_non_dominated_points():
    assert non_dominated([(2, 1), (1, 2), (3, 1), (2, 3), (1, 2)]) == [1, 0]
    assert non_dominated([(1, float("nan")), (2, 3)]) == [1]


def test_trade_off_figure_draws_the_curves_with_error_bars_and_both_axes(grid):
    results = results_of(grid)
    figure = costs.against_costs(results)[""]
    left, right = panels(figure)
    blue = colour_of("sm")
    assert drawn(right, blue)[0] == [(200, pytest.approx(1.45)), (400, pytest.approx(1.45))]
    assert len(left.containers) == len({(r.method, r.waiting_time) for r in results})
    (second,) = right.child_axes
    assert second.get_ylabel() == "mean error, CER / B (%)"
    assert second._functions[0](1.0) == pytest.approx(25)  # B = 4
    assert {"sm", "ens", "gmoe", "moe", "w = 1", "w = 2", "w = 4"} <= set(legend_of(figure))


def test_error_over_time_is_dotted_while_untrained_and_has_a_band(tmp_path):
    for seed, last in enumerate((0.2, 0.3)):
        image_run(tmp_path / str(seed), [0, 0.5, 0.5, last], w=2, seed=seed)
    image_run(tmp_path / "w4", [0, 0, 0, 0.1], w=4)
    results = results_of(tmp_path)
    curve = figures.over_time(results[0])
    assert curve.y == pytest.approx([90, 90, 50, 50, 25])
    assert curve.deviation == pytest.approx([0, 0, 0, 0, 50**0.5])
    figure = over_time.learning_curves(results)[""]
    (axes,) = panels(figure)
    assert drawn(axes, WAIT_RAMP[0]) == [[(2, 50), (3, 50), (4, pytest.approx(25))]]
    assert drawn(axes, WAIT_RAMP[-1]) == [[(4, pytest.approx(10))]]
    waiting = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in waiting] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((25 - 50**0.5, 50))
    assert all(line.get_drawstyle() == "steps-post" for line in axes.lines)
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0  # the area below a line is its CER
    assert 90 < axes.get_ylim()[1] < 100  # the untrained part is shown
    assert legend_of(figure) == ["w = 2", "w = 4"]
    assert axes.get_ylabel() == "test error (%)"


def test_two_learners_share_a_panel_that_marks_where_waiting_wins(tmp_path):
    """Figure 3: at t = 2 w = 2 has the lowest error, at t = 4 w = 4;
    at t = 1 and 3 nothing beats w = 1."""
    for size in (4, 16):
        for learner in ("sm", "ens", "gens"):
            for w, errors in (
                (1, [0.5, 0.4, 0.2, 0.3]),
                (2, [0, 0.3, 0.3, 0.3]),
                (4, [0, 0, 0, 0.2]),
            ):
                image_run(tmp_path / f"{learner}{size}{w}", errors, w, size, learner=learner)
    results = results_of(tmp_path)
    members = [r for r in results if (r.learner, r.config["hidden"]) == ("sm", 4)]
    assert select.waiting_wins(members) == {2: 2, 4: 4}
    small, large = panels(over_time.two_learners(results)[""])
    assert [axes.get_title() for axes in (small, large)] == ["4 hidden units", "16 hidden units"]
    marks = [line for line in small.lines if line.get_ydata()[0] > 1 and line.get_linewidth() == 3]
    orange, pink, purple = wait_colours((1, 2, 4)).values()
    # One row of marks for each learner.
    assert [(line.get_xdata()[0], line.get_color()) for line in marks] == [
        (2, pink),
        (4, purple),
    ] * 2
    assert len({line.get_ydata()[0] for line in marks}) == 2
    assert [line.get_linestyle() for line in small.lines if line.get_color() == orange][-1] == "-"
    assert {line.get_linestyle() for line in small.lines if line.get_color() == orange} == {
        "-",
        "--",
        ":",
    }
    with pytest.raises(Missing, match="both sm and ens"):
        over_time.two_learners([r for r in results if r.learner != "ens"])


def test_the_first_figure_of_the_draft_has_four_curves(tmp_path):
    for learner in ("sm", "gmoe"):
        for w in (1, 2, 4, 10):
            for size in (4, 16):
                image_run(tmp_path / f"{learner}{w}{size}", [0.5] * 10, w, size, learner=learner)
    results = results_of(tmp_path)
    names = ["sm, 4, w = 1", "sm, 4, w = 4", "gmoe, 4, w = 4", "sm, 16, w = 10"]
    assert list(select.update_rates(results)) == names
    (axes,) = panels(over_time.update_rates(results)[""])
    solid = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_xdata()[0] for line in solid] == [1, 4, 4, 10]
    with pytest.raises(Missing, match="no run of sm, 16, w = 10"):
        select.update_rates([r for r in results if r.waiting_time < 10])


def test_small_and_large_have_a_panel_per_learner(tmp_path):
    for size in (4, 8, 16):
        for learner in ("sm", "ens"):
            image_run(tmp_path / f"{learner}{size}", [0.5, size / 100], size=size, learner=learner)
    shown = panels(over_time.small_and_large(results_of(tmp_path))[""])
    assert [axes.get_title() for axes in shown] == ["sm, 4", "ens, 4", "sm, 16", "ens, 16"]
    assert [drawn(axes, WAIT_RAMP[0])[0][-1] for axes in shown] == [
        (2, 4),
        (2, 4),
        (2, 16),
        (2, 16),
    ]
    assert [axes.title.get_color() for axes in shown[:2]] == [colour_of("sm"), colour_of("ens")]


def test_replay_pairs_differ_in_nothing_else(grid, tmp_path):
    pairs = select.replay_pairs(results_of(grid))
    assert [(p.config["hidden"], p.config["waiting_time"]) for p, _ in pairs] == [(4, 2), (8, 2)]
    assert all(not plain.config["replay"] and again.config["replay"] for plain, again in pairs)
    figure = costs.replay_at_one_wait(results_of(grid))[""]
    (axes,) = panels(figure)
    # Stages train on 2 and 2 mega-batches without replay, on 2 and 4 with it.
    # The error at t = 1 is .9.
    line = [(4, pytest.approx(0.9 + 0.4 + 0.3 + 0.25)), (6, pytest.approx(0.9 + 0.2 + 0.2 + 0.1))]
    assert drawn(axes, colour_of("sm"))[0] == line
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    faces = [(mark.get_xdata()[0], mark.get_markerfacecolor()) for mark in marks]
    assert faces == [(4, "white"), (6, colour_of("sm"))]
    image_run(tmp_path / "a", [0.5, 0.4])
    image_run(tmp_path / "b", [0.5, 0.4], size=4, replay=True)
    with pytest.raises(Missing, match="no two runs that differ only in --replay"):
        select.replay_pairs(results_of(tmp_path))


def test_replay_over_all_waits_has_a_panel_per_learner(tmp_path):
    for learner in ("sm", "gens"):
        for w in (1, 2):
            for replay in (False, True):
                name = tmp_path / f"{learner}{w}{replay}"
                image_run(
                    name, [0.5, 0.4, 0.3, 0.2 - 0.1 * replay], w, learner=learner, replay=replay
                )
        image_run(tmp_path / f"{learner}4", [0, 0, 0, 0.05], 4, learner=learner)
    results = results_of(tmp_path)
    pairs, curves = (
        panels(paint(results)[""])
        for paint in (costs.replay_at_all_waits, over_time.replay_over_time)
    )
    assert [axes.get_title() for axes in pairs] == ["sm", "gens"]
    first, second, third = wait_colours((1, 2, 4)).values()
    assert [x for x, _ in drawn(pairs[0], first)[0]] == [4, 10]
    assert [x for x, _ in drawn(pairs[0], second)[0]] == [4, 6]
    assert [len(drawn(curves[1], colour)) for colour in (first, second, third)] == [2, 2, 1]
    dashed = [line for line in curves[0].lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[-1] for line in dashed] == pytest.approx([10, 10])


def test_a_radar_plot_per_size_and_a_polygon_per_learner_and_wait(grid):
    radars = costs.radars(results_of(grid))
    assert list(radars) == ["_h4", "_h8"]
    sm, ens = panels(radars["_h4"])
    assert [len(axes.lines) for axes in (sm, ens)] == [3, 3]
    corners = sm.lines[0].get_ydata()
    highest = max(2.8, 0.9 * 3 + 0.25)
    assert corners == pytest.approx([1.45 / highest, 1, 1, 1, 1.45 / highest])
    assert "CER: 0 to 3.0" in legend_of(radars["_h4"])


def test_ablation_compares_routers_that_differ_in_nothing_else(grid, tmp_path):
    shown = select.ablation(results_of(grid))
    assert list(shown) == ["gmoe, tree", "gmoe, flat", "moe, 2 experts"]
    assert shown["gmoe, flat"].config["router"] == "flat"
    assert {(r.config["hidden"], r.config["waiting_time"]) for r in shown.values()} == {(8, 1)}
    (axes,) = panels(over_time.growth_ablation(results_of(grid))[""])
    assert drawn(axes, colour_of("gmoe"))[0][-1] == (4, pytest.approx(30))
    image_run(tmp_path / "a", [0.5, 0.4], learner="gmoe", router="tree", experts=1)
    image_run(tmp_path / "b", [0.5, 0.4], learner="gmoe", router="flat", experts=2)
    with pytest.raises(Missing, match="router"):
        select.ablation(results_of(tmp_path))


def test_ablation_has_an_ensemble_of_mixtures_and_never_a_single_network(tmp_path):
    """Section 5.2 of the draft: "an ensemble of fixed MoEs ... trained independently on each
    mega-batch"."""
    for router in ("tree", "flat"):
        image_run(tmp_path / router, [0.3, 0.3], learner="gmoe", router=router, experts=2)
    image_run(tmp_path / "sm", [0.5, 0.4])
    image_run(tmp_path / "gens", [0.5, 0.4], learner="gens", experts=1)
    image_run(tmp_path / "old", [0.5, 0.4], learner="gens")
    image_run(tmp_path / "ens", [0.5, 0.4], learner="ens", experts=2, members=5)
    assert list(select.ablation(results_of(tmp_path))) == ["gmoe, tree", "gmoe, flat"]
    image_run(tmp_path / "other", [0.1, 0.1], learner="gens", experts=2, router="flat")
    image_run(tmp_path / "alike", [0.6, 0.5], learner="gens", experts=2, router="tree")
    image_run(tmp_path / "more", [0.1, 0.1], learner="gens", experts=4, router="tree")
    shown = select.ablation(results_of(tmp_path))
    assert list(shown) == ["gmoe, tree", "gmoe, flat", "ensemble of moe, 2 experts"]
    figure = over_time.growth_ablation(results_of(tmp_path))[""]
    ends = {line.get_color(): line.get_ydata()[-1] for line in panels(figure)[0].lines}
    assert ends[colour_of("gens")] == pytest.approx(50)
    assert legend_of(figure) == list(shown)


def test_methods_show_unusual_settings(tmp_path):
    for size in (4, 8):
        image_run(
            tmp_path / f"tree{size}",
            [0.5, 0.4],
            size=size,
            learner="gmoe",
            router="tree",
            experts=1,
        )
    image_run(tmp_path / "flat", [0.5, 0.4], learner="gmoe", router="flat", experts=2)
    image_run(tmp_path / "sm", [0.5, 0.4])
    results = results_of(tmp_path)
    assert [r.method for r in results] == ["sm", "gmoe", "gmoe", "gmoe router=flat experts=2"]
    looks = {tuple(select.look(result, results).items()) for result in results}
    assert len(looks) == 3


def test_command_draws_all_figures_and_names_them_in_the_report(grid, tmp_path):
    done = report(grid, "--figures", "vision", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = "front learning_curves trade_offs over_time two_learners replay replay_waits"
    names += " replay_over_time radar_h4 radar_h8 ablation"
    pictures = [f"digits_B4_{name}.png" for name in names.split()]
    expected = [str(tmp_path / "out" / name) for name in ("report.md", "report.csv", *pictures)]
    assert done.stdout.splitlines()[-len(expected) :] == expected
    markdown = (tmp_path / "out/report.md").read_text()
    assert re.findall(r"!\[.*\]\((.*)\)", markdown) == pictures
    assert "Figure 4: CER and compute" in markdown
    tables = report(grid).stdout
    assert done.stdout.startswith(tables)


def test_missing_figures_have_remarks_and_out_has_a_default(tmp_path):
    image_run(tmp_path / "runs/a", [0.5, 0.4])
    image_run(tmp_path / "runs/half", [0.5, 0.4], rows=2, learner="ens")
    rename_metric(image_run(tmp_path / "runs/lm", [0.5, 0.4], learner="moe"), "perplexity")
    done = report("runs", "--figures", "vision", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {
        "not finished (t=1/2), left out of the figures: runs/half",
        "not an image run, left out of the figures: runs/lm",
        *(f"digits_B2 replay{name}: no run with --replay" for name in ("", "_waits", "_over_time")),
        "digits_B2 ablation: no two runs of gmoe that differ only in --router tree and flat",
    } < set(lines)
    assert lines[-3:] == [
        f"report/{name}" for name in ("report.md", "report.csv", "digits_B2_over_time.png")
    ]


def test_draw_names_the_figures_and_keeps_silent_about_others(tmp_path):
    for wait in (1, 2):
        image_run(tmp_path / f"runs/sm{wait}", [0.4, 0.3, 0.2, 0.2], w=wait)
    out = tmp_path / "report"
    words = (tmp_path / "runs", "--figures", "vision", "--out", out)
    assert " replay: no run with --replay" in report(*words).stdout
    for path in out.iterdir():
        path.unlink()
    done = report(*words, "--draw", "over_time")
    assert " replay: " not in done.stdout
    assert {path.stem.partition("_over")[0] for path in out.glob("*.png")} == {"digits_B4"}
    wrong = report(tmp_path / "runs", "--draw", "over_time")
    assert "--draw needs --figures vision" in wrong.stderr
