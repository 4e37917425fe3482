"""`alma advise --matrix` with any metric: one drift, one answer; what is open is options."""

import math

import numpy as np
import pytest

from alma.report.advice import retraining_words as words
from alma.report.advice.direction import check_direction
from alma.report.advice.matrix import read_groups
from alma.report.advice.metric_of_column import MetricOptions, metric_of
from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses
from alma.report.metric import PERCENT_ERROR as PERCENT

from .synthetic import call_advise, error_of

EVERY = (1, 3, 6, 12)
BYTES = 4  # a token
MONTHS = [f"{2013 + m // 12}-{1 + m % 12:02}" for m in range(96)]
OF_LOSS = {
    "nats": lambda loss: loss,
    "bits": lambda loss: loss / math.log(2),
    "perplexity": math.exp,
    "bits_per_byte": lambda loss: loss / math.log(2) / BYTES,
    "error (%)": lambda loss: 100 * (loss - 2),
    "error_share": lambda loss: loss - 2,
    "accuracy (%)": lambda loss: 100 * (3 - loss),
    "accuracy": lambda loss: 3 - loss,
}
"""A value of each metric by a loss in nats from 2 to 3; errors are a function of it, too."""


def matrix_of_losses(slope=0.008):
    """Loss by model and period, months: models of every second year, tested every year."""
    random = np.random.default_rng(3)
    cells = [(u, p) for u in range(0, 96, 24) for p in range(0, 96, 12)]
    return {(u, p): 2.1 + slope * abs(p - u) + random.normal(0, 0.001) for u, p in cells}


def written(path, column, value_of, losses=None):
    """A CSV file with the values of a metric."""
    rows = []
    for (u, p), loss in (losses or matrix_of_losses()).items():
        rows.append(f"{MONTHS[u]},{MONTHS[p]},{value_of(loss)!r}")
    path.write_text("\n".join([f"trained_until,tested_on,{column}", *rows]) + "\n")
    return path


def retraining_of(path, **options):
    """The answer on the only group of a file."""
    (group,) = read_groups([path])
    return Retraining(group.losses, group.metric, group.period, every=EVERY, **options)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By column: how often to retrain, by the same drift in eight metrics."""
    folder = tmp_path_factory.mktemp("metrics")
    answer_by_column = {}
    for i, (column, value_of) in enumerate(OF_LOSS.items()):
        answer_by_column[column] = retraining_of(written(folder / f"{i}.csv", column, value_of))
    return answer_by_column


def test_one_drift_in_eight_metrics_gives_one_cadence(answers):
    choices = {column: retraining.choice for column, retraining in answers.items()}
    assert set(choices.values()) == {(3, False)}, choices
    assert len(choices) == 8


def test_numbers_convert_exactly(answers):
    in_nats = answers["nats"].gain(1, 12)
    per_nat = {
        "bits": 1 / math.log(2),
        "perplexity": 1,
        "bits_per_byte": 1 / math.log(2) / BYTES,
        "error (%)": 100,
        "error_share": 100,
        "accuracy (%)": 100,
        "accuracy": 100,
    }
    for column, factor in per_nat.items():
        expected = [factor * value for value in in_nats]
        assert list(answers[column].gain(1, 12)) == pytest.approx(expected, rel=1e-9), column


def test_sentences_speak_the_metric(answers):
    sentences = {column: " ".join(words.lines(answer)) for column, answer in answers.items()}
    assert "Percent: of perplexity. Loss rises by 0.00" in sentences["nats"]
    assert "Percent: of perplexity. Perplexity rises by 0.00" in sentences["perplexity"]
    assert words.answer(answers["bits"]) == words.answer(answers["nats"])
    assert " points of accuracy [" in sentences["accuracy"]
    assert "Accuracy falls by 0.798 [0.796, 0.8] points a month" in sentences["accuracy"]
    assert sentences["accuracy"] == sentences["accuracy (%)"]
    assert "Error rises by 0." in sentences["error_share"]
    assert " bits a byte [" in sentences["bits_per_byte"]
    for column in ("accuracy", "error_share", "bits_per_byte"):
        assert "nats" not in sentences[column]
        assert "perplexity" not in sentences[column]


def test_a_column_loss_says_in_which_unit_it_was_read(tmp_path):
    table = written(tmp_path / "a.csv", "loss", OF_LOSS["nats"])
    remark = "Loss was read as nats a token; --metric names another unit."
    assert remark in call_advise("--matrix", table).stdout
    assert remark not in call_advise("--matrix", table, "--metric", "bits").stdout


def test_a_price_and_a_worth_are_in_the_metric(tmp_path):
    table = written(tmp_path / "a.csv", "accuracy", OF_LOSS["accuracy"])
    in_nats = retraining_of(written(tmp_path / "b.csv", "nats", OF_LOSS["nats"]), price=0.05)
    done = call_advise("--matrix", table, "--price", "5", "--out", tmp_path / "out")
    plan = done.record["groups"][0]["plan"]
    assert plan["unit"] == "points of accuracy summed over periods"
    assert plan["trainings"] == in_nats.plan.trainings
    assert plan["total"] == pytest.approx(100 * in_nats.plan.total, rel=1e-6)
    assert "in points of accuracy summed over periods" in done.stdout
    assert "extra loss (points of accuracy), 90%" in done.stdout
    brief = call_advise("--matrix", table, "--brief", tmp_path / "brief.md").stdout
    assert "points of accuracy" in brief
    assert "erplexity" not in brief
    assert "points of accuracy<" in (tmp_path / "brief.svg").read_text()
    rare = call_advise("--matrix", table, "--worth", "50%").stdout
    assert "and 50 points of accuracy would be worth it" in rare


@pytest.mark.parametrize(
    ("column", "value_of", "options", "amount"),
    [
        ("MAPE", lambda loss: 10 * loss, "", " MAPE ["),
        ("RMSE", lambda loss: 1000 * loss, "", " RMSE ["),
        ("test_F1", lambda loss: 3 - loss, "", " points of F1 ["),
        ("Macro-F1 (%)", lambda loss: 100 * (3 - loss), "", " points of F1 ["),
        ("mAP", lambda loss: 3 - loss, "", " points of mAP ["),
        ("AUC", lambda loss: 3 - loss, "--bounds 0.1,1", " points of AUC ["),
        ("score", lambda loss: 9 - loss, "--metric score --higher-is-better", " score ["),
        ("value", lambda loss: 3 - loss, "--metric accuracy", " points of accuracy ["),
        ("loss", lambda loss: -loss, "--metric loss --higher-is-better", " loss ["),
    ],
)
def test_further_metrics(tmp_path, column, value_of, options, amount):
    table = written(tmp_path / "a.csv", column, value_of)
    done = call_advise("--matrix", table, "--worth", "0.001%", *options.split())
    assert amount in done.stdout, done.stdout
    assert "drifts" in done.stdout


def test_percent_in_worth_is_of_the_mean_of_other_metrics(tmp_path):
    table = written(tmp_path / "a.csv", "RMSE", lambda loss: 1000 * loss)
    assert retraining_of(table).least_gain == pytest.approx(21.5, rel=0.01)
    assert retraining_of(table, worth=(7.0, False)).least_gain == 7


def drift(share):
    """Accuracy, as a share, of a stream that drifts."""
    return 3 - share


@pytest.mark.parametrize(
    ("column", "value_of", "options", "question", "remedy"),
    [
        ("score", drift, "", "what is score?", "--metric score --higher-is-better"),
        ("a score", drift, "", "Give --metric 'a score' with", "--metric accuracy"),
        ("score", drift, "--metric score", "which values are better?", "--metric accuracy"),
        ("score", drift, "--metric quality", "is higher or lower better?", "--metric accuracy"),
        ("a,b", drift, "", "which column has the values, a, b?", ""),
        ("loss,accuracy", drift, "", "values, loss, accuracy? Give --metric COLUMN", ""),
        ("loss", lambda x: 10 * x, "", "nats a token? the median,", "--metric perplexity"),
        (
            "loss",
            lambda x: -x,
            "",
            "nats a token? -2.7",
            "--metric score --higher-is-better",
        ),
        ("error", lambda x: x - 2, "", "a share or percent?", "--metric error-share"),
        (
            "accuracy",
            lambda x: 3.4 - x,
            "",
            "is 1.30089 a share or percent?",
            "--metric accuracy-percent",
        ),
        ("accuracy_share", lambda x: 3.4 - x, "", "a typo? accuracy as a share is from 0 to 1", ""),
        ("accuracy", lambda x: 50 * x, "", "a typo? accuracy is from 0 to 100", "--metric RMSE"),
        (
            "perplexity",
            lambda x: x - 2,
            "",
            "a typo? perplexity is from 1 on",
            "--metric error-share",
        ),
        ("bits per byte", lambda x: x - 3, "", "a typo? loss is from 0 on", ""),
        ("RMSE", lambda x: x, "--higher-is-better", "lower is better for RMSE", ""),
        ("accuracy", lambda x: x - 2, "", "better, as was read?", "--metric error-share"),
        ("perplexity", drift, "--metric nats", "as was read?", "--metric score --higher-is-better"),
        (
            "score",
            drift,
            "--metric score --lower-is-better",
            "as was read?",
            "--metric score --higher-is-better",
        ),
        ("AUC", drift, "--bounds 0,2", "AUC is from 0 to 1", "--bounds 0.1,1"),
        ("AUC", drift, "--bounds 0.5,1", "a typo?", "--bounds 0.1,1"),
        ("AUC", drift, "--bounds 1", "such as 0,1", "--bounds 0.1,1"),
        ("accuracy", drift, "--worth 0.01", "--worth 0.01: a share, or percent", "--worth 1%"),
    ],
)
def test_what_is_open_is_asked(tmp_path, column, value_of, options, question, remedy):
    """Each question names an option, and the option works."""
    count = column.count(",") + 1
    table = written(tmp_path / "a.csv", column, value_of)
    if count > 1:
        head, *rows = table.read_text().splitlines()
        table.write_text("\n".join([head, *(f"{row},0.5" for row in rows)]) + "\n")
    assert question in error_of(call_advise("--matrix", table, *options.split()))
    if remedy:
        done = call_advise("--matrix", table, "--every", "1,12", *remedy.split())
        assert "How often to retrain?" in done.stdout
    elif count > 1:
        name = column.split(",")[1]
        flags = {"accuracy": [], "b": ["--lower-is-better"]}[name]
        assert call_advise("--matrix", table, "--metric", name, *flags).stdout


def test_runs_and_files_of_two_metrics_are_refused(tmp_path):
    one = written(tmp_path / "a.csv", "accuracy", drift)
    two = written(tmp_path / "b.csv", "error_share", lambda x: x - 2)
    both = call_advise("--matrix", one, "--matrix", two)
    assert "files with several metrics, accuracy, error_share" in error_of(both)
    assert "leave them out with runs" in error_of(call_advise(tmp_path, "--metric", "accuracy"))


def test_no_forecast_leaves_the_bounds(tmp_path):
    """V4: errors of 100% on all that comes; the law at age 12 had 151%."""
    losses = {}
    for u in range(12):
        for p in range(12):
            losses[u, p] = 2.02 if p <= u else 3.0
    for column, level in (("error_share", 2), ("accuracy", -98)):
        retraining = retraining_of(written(tmp_path / "a.csv", column, OF_LOSS[column], losses))
        assert retraining.laws.level == pytest.approx(level)
        for age in (1, 3, 12, 40):
            low, mean, high = sorted(retraining.extra_at(age))
            assert -2 - 1e-9 <= low <= mean <= high <= 98 + 1e-9
        assert retraining.extra(12).high <= 98 + 1e-9
        assert retraining.gain(1, 12).high <= 100 + 1e-9
        planned = retraining_of(tmp_path / "a.csv", price=5.0).plan
        assert max(saving.high for saving in planned.savings.values()) <= 12 * 100
        assert planned.total <= 12 * 98 + 5 * planned.trainings


def test_a_column_loss_is_nats_as_it_was():
    """The law is fitted to the very numbers of the file."""
    metric = metric_of("loss", [], MetricOptions("nats"))
    assert [metric.loss(value) for value in (0.1, 2.7, 13.3)] == [0.1, 2.7, 13.3]
    assert metric.least_gain((1.0, True)) == math.log1p(0.01)
    assert metric.limits == (-math.inf, math.inf)


def errors(law, models=12):
    """Errors in percent of models on all periods, by a function of both."""
    at = tuple(map(float, range(1, models + 1)))
    rows = []
    for u in at:
        rows.append(tuple(law(u, p) for p in at))
    return Losses("made up", at, at, (tuple(rows),))


def test_a_forecast_stops_at_the_worst_error():
    """Errors rise by 8 points a period, from 2: nothing is worse than 98 points above a new one."""
    retraining = Retraining(
        errors(lambda u, p: 2 + 8 * max(0, p - u)), PERCENT, price=1.0, periods_to_come=40
    )
    by_age = np.minimum(8 * np.arange(1, 41), 98)
    assert retraining.extra(40).mean == pytest.approx(by_age.mean())
    never = retraining.plan.total + retraining.plan.savings["never"].mean
    assert never == pytest.approx(by_age.sum())


def test_no_interval_of_a_gain_or_a_saving_leaves_the_bounds():
    """Three models whose errors are noise: without bounds the intervals reach beyond 100 points."""
    random = np.random.default_rng(6)
    noisy = errors(lambda u, p: random.uniform(0, 100), models=3)
    retraining = Retraining(noisy, PERCENT, Period("month"), every=(1, 12), price=2.0)
    assert retraining.gain(1, 12).low == -100
    saving = retraining.plan.savings["never"]
    of_trainings = 2.0 * retraining.plan.trainings
    assert (saving.low, saving.high) == (-1200 - of_trainings, 1200 - of_trainings)


def test_noise_and_learning_are_no_turned_direction():
    for seed in range(20):
        random = np.random.default_rng(seed)
        noisy = errors(lambda u, p, random=random: 30 + random.normal(0, 3), models=6)
        check_direction(Retraining(noisy, PERCENT))

    def learning(u, p):
        return 50 + (p - u if p > u else 3 * (p - u)) + (u * p) % 7 / 100

    retraining = Retraining(errors(learning), PERCENT)
    assert retraining.effect.high < 0
    check_direction(retraining)


def test_a_typo_in_an_accuracy_is_named(tmp_path):
    slowly = matrix_of_losses(0.001)
    table = written(tmp_path / "a.csv", "accuracy (%)", OF_LOSS["accuracy (%)"], slowly)
    head, first, *rows = table.read_text().splitlines()
    assert first.split(",")[2].startswith("89.")
    table.write_text("\n".join([head, first.replace(",89.", ",8.9"), *rows]) + "\n")
    assert "line 2, accuracy: 8.9" in error_of(call_advise("--matrix", table))
