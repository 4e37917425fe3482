"""`alma advise --price`: costs that are 0 or below it, and a price that may be money."""

import numpy as np
import pytest

from .synthetic import call_advise

ACCURACY = """\
trained_until,tested_on,accuracy
2026-01,2026-01,91.2
2026-01,2026-02,89.1
2026-01,2026-03,87.2
2026-02,2026-01,91.0
2026-02,2026-02,91.4
2026-02,2026-03,89.3
2026-03,2026-01,90.8
2026-03,2026-02,91.1
2026-03,2026-03,91.5
"""
"""README's file."""


@pytest.fixture
def advice(tmp_path):
    """`advice(content, *flags)`: what `alma advise` prints for a file, without its note."""

    def run(content, *flags):
        file = tmp_path / "values.csv"
        file.write_text(content)
        printed = call_advise("--matrix", file, *flags).stdout
        return printed.partition("\nExtra loss: ")[0]

    return run


def error_matrix(seed, slope, noise, models):
    """Errors in percent that rise with age by `slope` a month."""
    generator = np.random.default_rng(seed)
    lines = ["trained_until,tested_on,error"]
    for until in range(1, models + 1):
        for tested in range(1, models + 2):
            value = 10 + slope * max(tested - until, 0) + noise * generator.standard_normal()
            lines.append(f"2024-{until:02},2024-{tested:02},{value:.6f}")
    return "\n".join(lines)


def test_rounding_errors_are_no_costs(advice):
    """Before: it costs 2.47e-12 in all, for prices above 3.56e-13."""
    flat = error_matrix(2, 0.0, 0.0, 10)
    printed = advice(flat, "--price", "0.3")
    assert "e-1" not in printed
    assert "it costs nothing in all and saves 3.6 [3.6, 3.6] against retraining" in printed
    assert "So for prices above 0." in printed
    brief = advice(flat, "--price", "0.3", "--brief")
    assert "It costs nothing in 12 months." in brief
    free = advice(flat, "--price", "0")
    assert "e-1" not in free
    assert "may save 0 [0, 0] against" in free


def test_a_cost_below_0_says_why(advice):
    """The bend of the law, mean residuals by age, is below 0: before, it costs -0.884 in all."""
    printed = advice(error_matrix(3, -0.3, 0.3, 9), "--price", "400")
    assert "costs -" not in printed
    assert "it costs nothing (older models were better than new ones, by 0." in printed


def test_the_brief_names_metric_and_model_as_the_file_does(advice):
    lines = error_matrix(1, 0.0, 0.3, 8).replace("error", "model,F1").splitlines()
    named = [lines[0].replace("trained_until,tested_on,model,", "model,trained_until,tested_on,")]
    named += [f"clf,{line}" for line in lines[1:]]
    brief = advice("\n".join(named).replace(",10.", ",70.").replace(",9.", ",69."), "--brief")
    assert "\nFor clf, by F1, with values until 2024-09.\n" in brief
    assert " 1 point of F1" in brief
    assert " f1" not in brief


def test_a_price_that_may_be_money_is_asked_about(advice):
    question = "Is --price 400 money? It was read as points of accuracy summed over months, and "
    question += "the worst value of all is 4.3 from the best. If it is money, give --price 400/X: "
    question += "X is what one unit costs in one month."
    for flags in ((), ("--brief",)):
        assert question in advice(ACCURACY, "--price", "400", *flags)
    for price in ("3", "50", "400/1000", "4000/10"):
        assert "money?" not in advice(ACCURACY, "--price", price)
    weekly = error_matrix(1, 0.7, 0.2, 11).replace("2024-", "2026-W")  # the plan has a training
    assert "Is --price 400 money?" in advice(weekly, "--price", "400")
    assert "money?" not in advice(weekly, "--price", "60")
    nats = ACCURACY.replace("accuracy", "loss").replace(",9", ",").replace(",8", ",")
    brief = advice(nats, "--price", "400", "--brief")
    assert "It was read as loss summed over months" in brief
    assert "nats" not in brief
