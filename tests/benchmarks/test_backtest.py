"""`python -m benchmarks backtest`: what it counts is what came."""

import numpy as np
import pytest

from alma.errors import UserError
from alma.report.advice.candidates import one_section
from alma.report.results import find_runs
from benchmarks import backtest
from tests.alma.synthetic import B, drifting, image_run, law, lm_run, losses


def means_on(place, *ts):
    """The means over the origins at `ts`, or over all."""
    origins = backtest.origins_of(one_section(find_runs([place])), B)
    return backtest.means([origin for origin in origins if not ts or origin.now in ts])


def test_what_came_is_counted(tmp_path):
    for seed in range(3):
        image_run(tmp_path / f"sm{seed}", law(0.65, 0.4, 0.02, 0.02, seed), seed=seed)
        better = law(0.5, 0.4, 0.02, 0.02, 9 + seed)
        image_run(tmp_path / f"ens{seed}", better, seed=seed, learner="ens", members=5)
    everywhere = means_on(tmp_path)
    assert everywhere["stages"] == sum(2 * (B - t) for t in range(4, 40, 4))
    assert everywhere["90% interval held"] > 0.85
    assert everywhere["forecast off by"] < everywhere["as last time"]
    assert everywhere["regret: forecast"] == 0


def test_a_wrong_advice_is_a_regret(tmp_path):
    """The learner that leads up to t = 20 stops learning there."""
    stops = law(0.4, 0.6, 0)
    goes_on = law(0.45, 0.6, 0)
    image_run(tmp_path / "stops", stops[:20] + [stops[19]] * 20, size=16)
    image_run(tmp_path / "goes-on", goes_on[:20] + [0.01] * 20)
    means = [sum(stops[16:20]) + 20 * stops[19], sum(goes_on[16:20]) + 0.2]
    assert means_on(tmp_path, 16)["regret: forecast"] == pytest.approx(
        means[0] / means[1] - 1, rel=1e-4
    )


def test_what_does_not_count_is_named_and_few_stages_are_refused(tmp_path, capsys):
    for seed, rows in ((0, None), (1, None), (2, 2)):
        image_run(
            tmp_path / f"{seed}",
            [0.5, 0.4, 0.3, 0.2],
            seed=seed,
            **({"rows": rows} if rows else {}),
        )
    image_run(tmp_path / "ens", [0.4, 0.3, 0.3, 0.2], learner="ens", rows=4)
    backtest.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"left out: {tmp_path / '2'}, at t=1 of 4, beside finished seeds",
        "left out: ens w=1, at t=3 of 4",
    ]
    image_run(tmp_path / "few/w2", [0.9, 0.5], 2)
    with pytest.raises(UserError, match="at least two stages"):
        backtest.main([str(tmp_path / "few")])


def test_staleness_beats_the_naive_rules_on_an_even_drift(tmp_path, capsys):
    random = np.random.default_rng(0)
    run_losses = losses(lambda u, p, _: 2 + 0.1 * abs(p - u) + random.normal(0, 0.005), count=10)
    scores = backtest.look_back_on([run_losses], "t={:g}".format)
    held, forecast, none, last = scores["all"].mean(0)
    assert forecast < 0.3 * last < none
    assert held > 0.8
    assert scores["t=9"].shape == (9, 4)  # the models of 1 to 9 on period 10
    assert scores["t=9"].mean(0)[2] == pytest.approx(0.5, abs=0.01)
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0, 0.01, (7, 7))
        run = lm_run(tmp_path / "runs" / f"{seed}", [60.0] * 6, seed=seed)
        drifting(
            run, lambda t, j, e=noise: float(50 * np.exp(0.0 if not t else e[t, j] - 0.02 * t))
        )
    backtest.main([str(tmp_path / "runs")])
    assert "Backtest of staleness (nats a token)" in capsys.readouterr().out


def test_losses_from_elsewhere(tmp_path, capsys):
    rows = ["model,trained_until,tested_on,loss"]
    rows += [
        f"{m},{u},{p},{2 + 0.1 * abs(p - u)}" for m in "ab" for u in range(8) for p in range(8)
    ]
    (tmp_path / "losses.csv").write_text("\n".join(rows) + "\n")
    backtest.main(["--matrix", str(tmp_path / "losses.csv"), "--groups", "a"])
    assert capsys.readouterr().out.count("Backtest of staleness (nats): a") == 1
    rows = [row for row in rows if row.split(",")[1] != row.split(",")[2]]
    (tmp_path / "few.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match="too few models with a loss on their own period"):
        backtest.main(["--matrix", str(tmp_path / "few.csv")])
