"""Figure 5: its contents, on runs with known numbers."""

import pytest
from matplotlib import colors

from alma.learners import colour_of
from alma.report import style
from alma.report.lm import figures as lm_figures
from alma.report.lm.entries import find_entries
from alma.report.lm.reference import reference
from alma.report.results import find_runs

from .synthetic import entries_of as entries
from .synthetic import legend_of, lm_run

PAPER = reference()
RED = colors.to_rgba("#CC0000")


def lines_of(axes, colour):
    """Points of the lines with this colour."""
    drawn = [
        line for line in axes.lines if colors.to_rgba(line.get_color()) == colors.to_rgba(colour)
    ]
    return [[tuple(map(float, point)) for point in line.get_xydata()] for line in drawn]


def test_a_trajectory_has_a_point_per_mega_batch_and_averages_since_the_first(tmp_path):
    for seed in (0, 1):
        lm_run(tmp_path / f"{seed}", [30.0 + seed, 20.0, 10.0], seed=seed)
    (entry,) = entries(tmp_path)
    line = lm_figures.trajectory(entry)
    assert line.x == ([1000, 2000, 3000], [64e6] * 3, [4, 4, 4])
    assert line.y == pytest.approx([30.5, 25.25, 20 + 1 / 6])
    assert line.deviation == pytest.approx([0.5**0.5, 0.5**0.5 / 2, 0.5**0.5 / 3])


def test_growth_increases_costs_and_experts_are_those_of_all_members(tmp_path):
    lm_run(tmp_path / "a", [30.0, 20.0, 16.0], "gens", millions=[64, 128, 192], members=[1, 2, 3])
    lm_run(tmp_path / "b", [30.0, 20.0, 16.0], "gmoe", millions=[64, 77, 90], experts=[4, 6, 8])
    lm_run(tmp_path / "c", [30.0, 20.0, 16.0], "ens", experts=None, members=5)
    ens, gens, gmoe = (lm_figures.trajectory(entry) for entry in entries(tmp_path))
    assert gens.x[1:] == ([64e6, 128e6, 192e6], [4, 8, 12])
    assert gmoe.x[1:] == ([64e6, 77e6, 90e6], [4, 6, 8])
    assert ens.x[2] == [5, 5, 5]
    assert gmoe.y == pytest.approx([30, 25, 22])


def test_the_papers_line_has_its_averages_and_sizes_and_derived_compute(tmp_path):
    lm_run(tmp_path / "a", [30.0] * 4)
    lm_run(tmp_path / "b", [30.0] * 4, "ens", millions=130, members=2)
    lm_run(tmp_path / "c", [30.0] * 4, "gens", millions=[64, 128, 192, 256], members=[1, 2, 3, 4])
    lm_run(tmp_path / "d", [30.0] * 4, "gmoe", millions=[210, 266, 999, 436], experts=[4, 6, 8, 12])
    lm_run(tmp_path / "e", [30.0] * 4, millions=500, arch="switch_gmoe_large")
    lm_run(tmp_path / "f", [30.0] * 4, "moe")
    figure_entries = entries(tmp_path)
    of = {(e.result.learner, round(e.parameters(1) / 1e6)): e for e in figure_entries}
    sm, ens, gens, gmoe = (
        lm_figures.paper_trajectory(of[key], PAPER)
        for key in (("sm", 64), ("ens", 130), ("gens", 64), ("gmoe", 210))
    )
    assert sm.y == pytest.approx([28.57, 28.01, 27.6433, 27.365], abs=1e-4)
    stage = 120_000 * 192 * 3 * 45.7e9 / 1e12  # the paper prints 42 GFLOPs
    assert sm.x[0] == pytest.approx([stage, 2 * stage, 3 * stage, 4 * stage], rel=1e-3)
    assert sm.x[1:] == ([65e6] * 4, [4] * 4)
    assert ens.x[0] == pytest.approx([2 * x for x in sm.x[0]])  # 4 experts each, like sm
    assert ens.x[2] == [8] * 4
    assert gens.x[0] == pytest.approx(sm.x[0])
    assert gens.x[1:] == ([65e6, 130e6, 195e6, 260e6], [4, 8, 12, 16])
    assert gens.y == pytest.approx([28.57, 27.42, 26.75, 26.315])
    large = 120_000 * 192 * 3 * 126.5e9 / 1e12
    # Up to the first size that is not the paper's.
    assert gmoe.x[0] == pytest.approx([large, 2 * large], rel=1e-3)
    assert gmoe.y == pytest.approx([22.47, 21.845])
    assert lm_figures.paper_trajectory(of["sm", 500], PAPER) is None
    assert lm_figures.paper_trajectory(of["moe", 64], PAPER) is None


def test_the_figure_draws_ours_in_colour_the_papers_in_grey_and_experts_in_red(tmp_path):
    lm_run(tmp_path / "sm4", [30.0, 29.0, 28.0, 27.0])
    lm_run(tmp_path / "sm8", [28.0, 27.0, 26.0, 25.0], millions=90, experts=8)
    lm_run(tmp_path / "own", [26.0, 25.0, 24.0, 23.0], millions=500, arch="switch_gmoe_large")
    lm_run(tmp_path / "ens", [27.0, 26.0, 25.0, 24.0], "ens", millions=128, members=2)
    lm_run(tmp_path / "umix", [27.5, 26.0, 25.0, 24.0], "umix", millions=128, members=2)
    figure, matched = lm_figures.figure5(entries(tmp_path), PAPER, "average perplexity")
    assert matched == 3
    compute, parameters, experts = figure.axes
    blue, vermilion, green = (colour_of(name) for name in ("sm", "ens", "umix"))
    assert sorted(lines_of(compute, blue)) == [
        [(1000, 26.0), (2000, 25.5), (3000, 25.0), (4000, 24.5)],
        [(1000, 28.0), (2000, 27.5), (3000, 27.0), (4000, 26.5)],
        [(1000, 30.0), (2000, 29.5), (3000, 29.0), (4000, 28.5)],
    ]
    assert lines_of(parameters, vermilion) == [[(128e6, y) for y in (27.0, 26.5, 26.0, 25.5)]]
    assert [len(lines_of(axes, "0.62")) for axes in figure.axes] == [3, 3, 3]
    starts = sorted(line[0] for line in lines_of(parameters, "0.62"))
    assert starts == [(65e6, 28.57), (91e6, 26.29), (130e6, 26.20)]
    (side,) = lines_of(experts, vermilion)
    (middle,) = lines_of(experts, green)
    assert 0 < middle[0][0] - side[0][0] < 1  # side by side, less than one expert apart
    assert middle[0][0] == pytest.approx(8)
    texts = [text for text in compute.texts if colors.to_rgba(text.get_color()) == RED]
    assert sorted((text.get_text(), text.xy[1]) for text in texts) == [
        ("4", 26.0),
        ("4", 30.0),
        ("8", 28.0),
    ]
    assert not parameters.texts
    assert legend_of(figure) == [
        *("learner", "SM", "Ens", "UMix"),
        *("size", "base", "large"),
        *("paper", "same setting and size"),
        *("red number", "experts per Switch layer of SM"),
    ]


def test_only_the_smallest_waiting_time_without_replay_is_drawn(tmp_path):
    lm_run(tmp_path / "w2", [0, 20.0, 19.0, 18.0], w=2)
    lm_run(tmp_path / "w4", [0, 0, 0, 18.0], w=4)
    lm_run(tmp_path / "x", [9.0, 9.0, 9.0, 9.0], update_multiplier=2)
    lm_run(tmp_path / "r", [9.0, 9.0, 9.0, 9.0], replay=True)
    lm_run(tmp_path / "s", [9.0, 9.0, 9.0, 9.0], from_scratch=True)
    (shown,) = lm_figures.comparable(entries(tmp_path))
    assert shown.setting == "SM_w2"
    line = lm_figures.trajectory(shown)
    assert (line.x[0], line.y) == ([1000, 1000, 2000], pytest.approx([20, 19.5, 19]))


def test_captions_and_remarks_name_the_paper_and_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "save", lambda figure, path: None)
    lm_run(tmp_path / "a", [30.0, 29.0, 28.0, 27.0])
    lm_run(tmp_path / "b", [0, 0, 0, 18.0], w=4)
    figure_entries, _ = find_entries(find_runs([tmp_path]))
    ((path, caption),), remarks = lm_figures.write_figures(figure_entries, tmp_path)
    assert path == tmp_path / "figure5.png"
    assert "Grey: the paper" in caption
    assert "45.7 GFLOPs per input of 512 tokens for base" in caption
    assert remarks == [
        "not in Figure 5 (one waiting time, usual updates, no replay, not from scratch): "
        "SM_w4 of base",
        "Figure 5: 1 of 1 runs have a counterpart in the paper",
        "front: no two complete runs of one waiting time",
    ]


def test_without_comparable_runs_there_is_no_picture(tmp_path):
    lm_run(tmp_path / "a", [9.0, 9.0], replay=True)
    figure_entries, _ = find_entries(find_runs([tmp_path]))
    pictures, remarks = lm_figures.write_figures(figure_entries, tmp_path)
    assert (pictures, len(remarks)) == ([], 2)
    assert remarks[0].startswith("not in Figure 5 (one waiting time")
    assert remarks[0].endswith(": SM_w1 (replay) of base")
