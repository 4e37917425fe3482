"""Differences from a baseline, paired by seed, in everything that `alma report --baseline`
writes."""

import math

from scipy import stats

from alma.report import differences
from alma.report.results import find_runs, group

from .synthetic import drifting, image_run, lm_run, report


def rows_of(place, baseline):
    """The rows of the table of the one group in a folder, by learner."""
    (results,) = group(find_runs([place]))
    (baselines,) = differences.find_baselines([results], baseline)
    assert baselines is not None
    header, *rows = differences.titled(baselines, results).cells
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_a_difference_is_taken_seed_by_seed(tmp_path):
    """Seeds are 20 points apart and the learners 1 and 3: the interval is that of 1 and 3."""
    for seed, error, less in ((0, 0.3, 0.01), (1, 0.5, 0.03)):
        image_run(tmp_path / f"sm{seed}", [error] * 4, seed=seed)
        image_run(tmp_path / f"ens{seed}", [error - less] * 4, seed=seed, learner="ens")
    (row,) = rows_of(tmp_path, "sm").values()
    # 6.314 (Student's t, one degree of freedom, 90%)
    # times the standard error of 1 point is the half width.
    assert row["average"] == row["last"] == "-2.00 [-8.31, +4.31]"
    assert row["CER"] == "-0.08 [-0.33, +0.17]"
    assert (row["n"], row["Comp"]) == ("2", "1x")
    assert rows_of(tmp_path, "ens w=1")["sm"]["average"] == "+2.00 [-4.31, +8.31]"


def test_only_common_seeds_and_common_t_count(tmp_path):
    """The baseline has seeds 0 and 1 up to t = 4, the other seeds 1 and 2 up to t = 2;
    they differ later."""
    for seed in (0, 1):
        image_run(tmp_path / f"sm{seed}", [0.4 + seed / 10, 0.4, 0.1, 0.1], seed=seed)
    for seed in (1, 2):
        run = image_run(
            tmp_path / f"ens{seed}", [0.6, 0.4, 0.3, 0.3], seed=seed, learner="ens", rows=3
        )
        assert run.rows[-1]["t"] == 2
    (row,) = rows_of(tmp_path, "sm").values()
    assert (row["learner"], row["n"], row["t"]) == ("ens (not finished, t=2/4)", "1", "2")
    assert (row["average"], row["last"]) == ("+5.00", "+0.00")
    (row,) = rows_of(tmp_path, "ens").values()
    assert (row["learner"], row["n"], row["t"]) == (
        "sm",
        "1",
        "2",
    )  # the baseline is the one behind
    image_run(tmp_path / "umix", [0.1] * 4, seed=7, learner="umix")
    lone = rows_of(tmp_path, "sm")["umix"]
    assert (lone["n"], lone["average"], lone["last"]) == ("1, 2", "-16.25", "+0.00")


def test_other_seeds_are_compared_by_welch_and_trained_models_by_themselves(tmp_path):
    """Averages .2, .3, .4 against .5 and .7, from t = 2 on."""
    for seed, level in enumerate((0.2, 0.3, 0.4)):
        image_run(tmp_path / f"sm{seed}", [level] * 4, seed=seed)
    for seed, level in ((7, 0.5), (8, 0.7)):
        image_run(tmp_path / f"ens{seed}", [0.9, level, level, level], 2, seed=seed, learner="ens")
    (row,) = rows_of(tmp_path, "sm").values()
    assert row["n"] == "2, 3"
    error = (0.02 / 2 + 0.01 / 3) ** 0.5
    freedom = error**4 / ((0.02 / 2) ** 2 + (0.01 / 3) ** 2 / 2)
    half = 100 * error * float(stats.t.ppf(0.95, freedom))
    assert row["trained"] == f"+30.00 [{30 - half:+.2f}, {30 + half:+.2f}]"
    assert row["average"].startswith("+37.50 [")


def test_an_unpaired_seed_that_is_behind_changes_nothing(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / f"sm{seed}", [0.4, 0.4, 0.3, 0.2], seed=seed)
        image_run(tmp_path / f"ens{seed}", [0.4, 0.4, 0.2, 0.1], seed=seed, learner="ens")
    before = rows_of(tmp_path, "sm")["ens"]
    image_run(tmp_path / "ens2", [0.4, 0.4, 0.2, 0.1], seed=2, learner="ens", rows=2)
    (row,) = rows_of(tmp_path, "sm").values()
    assert (row["n"], row["last"], row["average"]) == ("2", before["last"], before["average"])
    assert before["last"].startswith("-10.00")
    assert "t" not in row


def test_other_data_are_left_out(tmp_path):
    image_run(tmp_path / "sm", [0.4, 0.3])
    image_run(tmp_path / "other", [0.2, 0.1], learner="ens", dataset="mnist", data="11")
    image_run(tmp_path / "near", [0.2, 0.1], learner="umix")
    digits, mnist = group(find_runs([tmp_path]))
    baseline, none = differences.find_baselines([digits, mnist], "sm")
    assert [row[0] for row in differences.titled(baseline, digits).cells[1:]] == ["umix"]
    assert none is None


def loss(newest, following, past):
    """Perplexity of a model: its log on its newest mega-batch, on later ones, and on earlier
    ones."""

    def cell(t, j):
        if not t:
            return 9e9
        if j == t:
            return math.exp(1 + j + newest)
        if j > t:
            return math.exp(1 + j + following * (j - t))
        return math.exp(1 + j + past)

    return cell


def test_losses_are_compared_by_age(tmp_path):
    """The difficulty of a part, 1 + j, cancels;
    a model that waits is compared where both were trained."""
    drifting(lm_run(tmp_path / "a", [30, 20, 10, 5]), loss(0, 0.5, 0.25))
    drifting(
        lm_run(tmp_path / "b", [30, 20, 10, 5], replay_share=0.5, flops=2e15), loss(0.125, 0.75, 0)
    )
    drifting(lm_run(tmp_path / "c", [30, 20, 10, 5], w=2, learner="gmoe"), loss(0.125, 0.75, 0))
    rows = rows_of(tmp_path, "sm")
    for learner, w, comp in (("sm, replay 0.5", "1", "2x"), ("gmoe", "2", "0.5x")):
        row = rows[learner]
        assert row["Comp"] == comp
        assert [row[name] for name in ("w", "newest", "next", "past")] == [
            w,
            "+0.125",
            "+0.250",
            "-0.250",
        ]
        assert (
            row["end"] == "-0.156"
        )  # parts 1 to 3 are the past of the last model, part 4 its newest
    assert rows_of(tmp_path, "gmoe")["sm"]["newest"] == "-0.125"  # the baseline waits
    done = report(tmp_path, "--baseline", "sm w=1", "--out", tmp_path / "out")
    for text in (done.stdout, (tmp_path / "out/report.md").read_text()):
        assert "Differences from sm w=1, 90% intervals, B = 4" in text
        assert "nats a token on the newest mega-batch" in text
        assert "+0.125" in text
    assert "Differences" not in report(tmp_path).stdout
