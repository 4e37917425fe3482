"""`alma advise` on streams that drift: how often to retrain, from a CSV file; its backtest."""

import json
import math

import numpy as np
import pytest

from alma.report.advice import matrix
from alma.report.advice.__main__ import main
from alma.report.advice.cadence import NO_EVIDENCE, Compute, retraining
from alma.report.advice.staleness import StalenessFit, effect_of_age, known_at
from alma.report.advice.staleness_backtest import look_back_on, summarize
from benchmarks import cadence_calibration as calibration

from .synthetic import error_of, losses, run_here

HEADER = "model,trained_until,domain,tested_on,loss,lower_95,upper_95"


def noisy(law, deviation=0.003, *, seed=0, **settings):
    """`losses` with normal noise."""
    random = np.random.default_rng(seed)
    return losses(lambda *cell: law(*cell) + random.normal(0, deviation), **settings)


def call(*arguments, **settings):
    """Run `alma advise` in this process."""
    return run_here(main, arguments, **settings)


def month(number):
    """The label of a month, counted from January 2013."""
    return f"{2013 + number // 12}-{1 + number % 12:02}"


def lines(slope=0.001, model="1b", domain="news", seed=0, trained=range(0, 96, 24)):
    """Lines of a file as that of TiC-LM: models of every second year, tested on every year."""
    random = np.random.default_rng(seed)
    found = []
    for u in trained:
        for p in range(0, 96, 12):
            loss = 2.5 + slope * abs(p - u) + random.normal(0, 0.001)
            found.append(f"{model},{month(u)},{domain},{month(p)},{loss:.4f},{loss - 0.1},{loss + 0.1}")
    return found


def written(path, *rows, header=HEADER):
    """A CSV file."""
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def table(tmp_path):
    """Losses of two models in two domains, one of which does not drift."""
    kinds = [("1b", "news", 0.001), ("1b", "wiki", 0.0), ("3b", "news", 0.002), ("3b", "wiki", 0.0)]
    rows = [lines(slope, model, domain, i) for i, (model, domain, slope) in enumerate(kinds)]
    return written(tmp_path / "losses.csv", *(line for each in rows for line in each))


def test_a_file_of_losses_is_read_as_it_is(table):
    groups = matrix.read_groups([table])
    assert [g.losses.label for g in groups] == ["1b/news", "1b/wiki", "3b/news", "3b/wiki"]
    first = groups[0]
    assert (len(first.losses.until), len(first.losses.periods), first.unit) == (4, 8, "months")
    assert [first.name(u) for u in first.losses.until] == ["2013-01", "2015-01", "2017-01", "2019-01"]
    assert [b - a for a, b in zip(first.losses.periods, first.losses.periods[1:], strict=False)] == [12] * 7
    assert first.losses.seeds[0][1][0] == pytest.approx(2.5 + 0.024, abs=0.005)


def test_each_group_is_answered_in_turn(table, tmp_path):
    done = call("--matrix", table, "--out", tmp_path / "out")
    assert done.returncode == 0
    groups = json.loads((tmp_path / "out/advice.json").read_text())["groups"]
    assert [each["advice"] for each in groups] == ["every period", NO_EVIDENCE] * 2
    assert done.stdout.count("How often to retrain?") == 4  # once for each
    assert done.stdout.count("\nEvery period: the loss is") == 2
    assert done.stdout.count("no evidence that the stream drifts") >= 1
    assert done.stdout.count("Naive rules") == 1
    gain, low, high = groups[0]["cadences"][1]["against_first"]
    assert low < 0.006 < high  # half a year more at 0.001 a month
    assert gain == pytest.approx(0.006, abs=0.002)
    assert groups[0]["effect_of_age"][0] == pytest.approx(0.012, abs=0.002)  # of a period, 12 months
    one = call("--matrix", table, "--groups", "3b/*").stdout
    assert ("3b/news" in one, "3b/wiki" in one, "1b/news" in one) == (True, True, False)


@pytest.mark.parametrize(
    ("labels", "unit"),
    [
        (["1.5", "2.5", "4"], ""),
        (["2013", "2014", "2016"], ""),
        (["2013-01", "2013-12", "2014-01"], "months"),
        (["2013-01-31", "2013-02-01", "2016-02-29"], "days"),
    ],
)
def test_labels_of_time_come_back(tmp_path, labels, unit):
    rows = [f"{u},{p},1.0" for u in labels for p in labels]
    (group,) = matrix.read_groups(
        [written(tmp_path / "one.csv", *rows, header="trained_until,tested_on,loss")]
    )
    assert (group.losses.label, group.unit) == ("one", unit)
    assert [group.name(time) for time in group.losses.periods] == labels


def test_seeds_and_files_are_joined_and_a_missing_cell_does_not_count(tmp_path):
    header = "trained_until,tested_on,loss,seed"
    cells = [(u, p) for u in (1, 2, 3) for p in (1, 2, 3)]
    one = written(tmp_path / "a.csv", *(f"{u},{p},1,0" for u, p in cells), header=header + ",model")
    two = written(tmp_path / "b.csv", *(f"{u},{p},3,1" for u, p in cells[1:]), header=header)
    one.write_text(one.read_text().replace(",0\n", ",0,b\n"))
    (group,) = matrix.read_groups([one, two])
    assert len(group.losses.seeds) == 2
    assert math.isnan(group.losses.seeds[1][0][0])
    assert (0, 0) not in group.losses.by_age[0]


def _bad(old, new):
    """Replace a text of the file, once."""

    def edit(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_bad("tested_on", "tested"), "no column tested_on"),
        (_bad(",news,2014-01,", ",news,2013-01,"), "the same model, period and seed as"),
        (lambda path: path.write_text(HEADER + "\n"), "no losses below the names"),
        (lambda path: path.write_text(""), "no column trained_until, tested_on, loss"),
        (lambda path: path.write_text("\n".join([HEADER, *lines()[:1]])), "a single value of trained_until"),
        (lambda path: path.write_text("\n".join([HEADER, *lines()[:8]])), "a single value of trained_until"),
        (lambda path: path.write_text("\n".join([HEADER, *lines()[::8]])), "a single value of tested_on"),
        (lambda path: written(path, *lines(trained=(0, 84))[:10]), "fewer than 3 comparisons"),
        (_bad("1b,2013-01,news,2013-01", "1b,2013-13,news,2013-01"), "no such date: 2013-13"),
        (_bad("1b,2013-01,news,2013-01", "1b,2013,news,2013-01"), "another kind of time"),
        (_bad("1b,2013-01,news,2013-01", "1b,May 2013,news,2013-01"), "May 2013: a number, or a date"),
        (_bad("1b,2013-01,news,2013-01,2", "1b,2013-01,news,2013-01,2,2"), "as many values as line 1"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_bad_file_is_one_line(table, edit, told):
    edit(table)
    assert told in error_of(call("--matrix", table))


@pytest.mark.parametrize("value", ["nan", "inf", "2,5", "", "two"])
def test_a_loss_is_a_finite_number(tmp_path, value):
    rows = [f'{u},{p},"{value if (u, p) == (2, 3) else 1}"' for u in (1, 2, 3) for p in (1, 2, 3)]
    path = written(tmp_path / "bad.csv", *rows, header="trained_until,tested_on,loss")
    assert "bad.csv, line 7, loss: " in error_of(call("--matrix", path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--groups", "7b"], "no such group"),
        (["--groups", "1b/new"], "did you mean 1b/news?"),
        (["--budget", "2TFLOPs"], "need runs"),
        (["--by", "final"], "need runs"),
        (["runs"], "or --matrix FILE"),
    ],
)
def test_options_that_do_not_fit_a_matrix_are_one_line(table, arguments, told):
    assert told in error_of(call("--matrix", table, *arguments))
    assert "give run directories, or --matrix" in error_of(call())
    assert "--groups chooses among" in error_of(call("runs", "--groups", "a"))


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_a_known_law_is_found(exponent):
    """However hard the periods are; what came after the last read period does not matter."""
    hard = [3.0, 2.0, 4.0, 1.0, 2.5, 3.5, 2.0, 1.5, 9.0, 5.0]
    made = noisy(lambda u, p, _: hard[p - 1] + 0.1 * abs(p - u) ** exponent, count=10)
    fit = StalenessFit(known_at(made, 8))
    extra = fit.extra([0, 1, 2, 4])
    assert np.ptp(extra[:, 0]) == 0
    true = 0.1 * np.array([1, 2, 4]) ** exponent
    low, high = np.quantile(extra[:, 1:], [0.05, 0.95], axis=0)
    assert np.all((low < true) & (true < high))
    assert np.all(high - low < 0.05)
    assert len(fit.losses.periods) == len(fit.losses.until) == 8


def test_a_model_that_differs_by_chance_is_not_drift():
    made = noisy(lambda u, p, _: 2 + (0.1 if u in (2, 5) else 0), count=8)
    found = retraining(made, "nats a token", "a mega-batch")
    assert found.advice == NO_EVIDENCE
    assert abs(found.drift.mean) < 0.001


def test_a_loss_that_falls_with_training_is_not_drift():
    """The law sees it, the effect of age does not."""
    made = noisy(lambda u, p, _: 3 - 0.1 * u, seed=1)
    found = retraining(made, "nats a token", "a mega-batch")
    _, low, _ = found.against_first(found.cadences[1])
    assert low > 0
    assert found.advice == NO_EVIDENCE
    assert "no evidence that the stream drifts" in found.lines[1]


def test_the_effect_of_age_has_an_interval_over_periods_and_seeds():
    even = effect_of_age(losses(lambda u, p, _: 0.1 * abs(p - u)))
    assert even == pytest.approx((0.1, 0.1, 0.1))
    uneven = effect_of_age(losses(lambda u, p, _: 0.1 * abs(p - u) * (2 if 4 in (u, p) else 1)))
    assert uneven.low < uneven.mean - 0.01
    seeds = effect_of_age(losses(lambda u, p, s: (0.1 + 0.02 * s) * abs(p - u), seeds=2))
    assert seeds.mean == pytest.approx(0.11)
    assert seeds.mean - seeds.low == pytest.approx(1.895 * 0.01, rel=1e-3)  # t with 7 degrees of freedom
    assert math.isnan(effect_of_age(losses(lambda u, p, _: abs(p - u), count=2)).low)


def test_seeds_that_differ_widen_the_law():
    def width(spread):
        made = noisy(lambda u, p, s: (0.1 + spread * (s - 1)) * abs(p - u), seeds=3)
        low, high = np.quantile(StalenessFit(made).extra([1])[:, 0], [0.05, 0.95])
        return high - low

    assert width(0.05) > 3 * width(0.0)


def test_with_two_seeds_the_answer_lies_in_its_interval():
    made = noisy(lambda u, p, s: (0.1 + 0.01 * s) * abs(p - u), seeds=2)
    found = retraining(made, "nats a token", "a mega-batch")
    for cadence in found.cadences[1:]:
        middle, low, high = found.against_first(cadence)
        assert low < middle < high
        assert middle == pytest.approx(0.105 * (cadence.every - 1) / 2, rel=0.1)
    assert found.cadences[0].middle == pytest.approx(0.105, rel=0.1)


def test_cadences_have_costs_and_a_budget():
    made = noisy(lambda u, p, _: 0.1 * abs(p - u), 0.0005)
    found = retraining(made, "nats a token", "a mega-batch", Compute(6.0, 2.0, 4))
    assert [(each.every, each.compute) for each in found.cadences] == [(1, 14), (2, 10), (4, 8)]
    assert [each.last_time for each in found.cadences] == pytest.approx([0.1, 0.15, 0.25], abs=0.01)
    assert [each.middle for each in found.cadences] == pytest.approx([0.1, 0.15, 0.25], abs=0.01)
    assert found.advice == "every period"
    limited = retraining(made, "nats a token", "a mega-batch", Compute(6.0, 2.0, 4), 11.0)
    assert (limited.advice, len(limited.cadences)) == ("every 2nd period", 2)
    least = retraining(made, "nats a token", "a mega-batch", Compute(6.0, 2.0, 4), 1.0)
    assert [each.every for each in least.cadences] == [4]
    assert least.advice == NO_EVIDENCE


@pytest.mark.parametrize(("kind", "periods", "seeds"), [(0, 8, 1), (0, 8, 3), (1, 8, 1), (1, 8, 3)])
def test_streams_that_do_not_drift_are_no_evidence(kind, periods, seeds):
    """Of 40 matrices a tenth at most may show evidence: 9 or fewer with a probability of 99%."""
    every, rarely, _ = calibration.outcome(calibration.KINDS[kind], periods, seeds, 40)
    assert every + rarely <= 9 / 40


def test_drift_is_found():
    every, rarely, _ = calibration.outcome(calibration.Drift("even", 0.03), 12, 1, 40)
    assert every > 0.9
    assert rarely == 0


def test_the_backtest_reads_only_what_was_known():
    """A drift that begins at period 7 is no part of the forecasts before."""
    calm = noisy(lambda u, p, _: 2.0, 0.001)
    broken = noisy(lambda u, p, _: 2.0 + (p > 6) * (p - u), 0.001)
    origins = [look_back_on("made up", "", [each], str).origins for each in (calm, broken)]
    assert summarize(origins[0][:1])["extra"]["coverage_0.9"] > 0.8
    assert summarize(origins[1][:1])["losses"]["coverage_0.9"] < 1
    one, two = (StalenessFit(known_at(each, 6)).extra([1, 2]) for each in (calm, broken))
    assert np.array_equal(one, two)


def test_the_backtest_of_an_even_drift_beats_the_naive_rules():
    made = noisy(lambda u, p, _: 2 + 0.1 * abs(p - u), 0.005, count=10)
    found = look_back_on("made up", "nats a token", [made], "t={:g}".format)
    all_cells = summarize(found.origins)
    for scores in all_cells.values():
        assert scores["forecast"] < 0.6 * scores["as last time"] < scores["no staleness"]
        assert scores["coverage_0.9"] > 0.8
        assert scores["coverage_0.9"] > scores["coverage_0.5"]
    # at t = 9: the models of 1 to 9 on period 10; it has a model of its own
    last = summarize(found.origins[-1:])
    assert (last["losses"]["cells"], last["extra"]["cells"]) == (9, 9)
    assert last["losses"]["no staleness"] == pytest.approx(np.mean([0.1 * a for a in range(1, 10)]), abs=0.01)
    assert last["extra"]["as last time"] == pytest.approx(0.1, abs=0.01)


def test_a_trend_of_all_losses_is_forecast_though_no_age_explains_it():
    made = noisy(lambda u, p, _: 2 + 0.1 * p)
    draws = StalenessFit(known_at(made, 6)).coming_losses(0, [7, 8])
    assert np.median(draws, 0) == pytest.approx([2.7, 2.8], abs=0.1)
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    assert np.all((low < [2.7, 2.8]) & (high > [2.7, 2.8]))


def test_a_model_that_is_worse_stays_worse():
    made = noisy(lambda u, p, _: 2 + 0.5 * (u == 3))
    fit = StalenessFit(known_at(made, 6))
    worse, other = (float(np.median(fit.extra_losses(row, [7]))) for row in (2, 1))
    assert worse - other == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("kind", [calibration.Drift("even", 0.03), calibration.Drift("", 0.03, uneven=0.03)])
def test_the_true_gain_is_in_nine_of_ten_intervals(kind):
    """Of 40 matrices 32 or more, with a probability of 99%, of an uneven drift too."""
    assert calibration.outcome(kind, 12, 1, 40)[2] >= 32 / 40


def test_the_backtest_of_a_file(table, tmp_path):
    done = call("--matrix", table, "--groups", "1b/*", "--backtest", "--out", tmp_path / "out")
    assert done.stdout.count("Backtest of staleness: 1b/") == 2
    assert "2017-01" in done.stdout
    record = json.loads((tmp_path / "out/backtest.json").read_text())
    assert [each["title"] for each in record["groups"]] == ["1b/news", "1b/wiki"]
    few = written(tmp_path / "few.csv", *lines(trained=(6, 12, 18)))
    assert "too few models with a loss on their own period" in error_of(call("--matrix", few, "--backtest"))


def test_a_backtest_of_models_tested_on_two_periods_has_too_little_to_read(tmp_path):
    cells = [(until, tested, 1 + 0.1 * abs(tested - until)) for until in range(1, 6) for tested in (4, 5)]
    path = tmp_path / "losses.csv"
    path.write_text("trained_until,tested_on,loss\n" + "".join(f"{u},{t},{x}\n" for u, t, x in cells))
    assert "error: " in call("--matrix", path, "--backtest").stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1,1,1e200", ", line 2, loss: 1e200: a number up to 1e100"),
        ('1,1,"' + "1" * 140_000, "is a quote left open?"),
    ],
)
def test_numbers_and_lines_that_are_too_long(tmp_path, line, told):
    path = tmp_path / "losses.csv"
    path.write_text(f"trained_until,tested_on,loss\n{line}\n")
    done = call("--matrix", path)
    assert (done.returncode, told in done.stderr, done.stderr.count("\n")) == (2, True, 1)
