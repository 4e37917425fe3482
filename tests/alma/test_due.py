"""`alma due`: by the calendar, by a price, by unusual losses, and when nothing can be said."""

import json
import math
import shutil

import numpy as np
import pytest

from alma.decisions.due import main
from alma.records import Run

from .monthly import CONFIG, Monthly, drifting
from .synthetic import error_of, image_run, run_here


def due(run, *options):
    """Exit code and line of `alma due`."""
    done = run_here(main, [run.directory, *options])
    (line,) = done.stdout.splitlines()
    assert done.stderr == ""
    return done.returncode, line


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight months with a model each, and a ninth on which they were tested."""
    run = Monthly(tmp_path_factory.mktemp("eight")).months(8)
    run.arrive()
    return run


def test_nothing_arrived_is_no(tmp_path):
    code, line = due(Monthly(tmp_path).months(3), "--every", "1", "--price", "0")
    assert code == 1
    assert line.startswith("no: nothing arrived since the training on 2024-03, as far as the ")
    assert f"`alma test {tmp_path}` adds what was appended to the stream" in line


def test_a_month_without_tests_is_no_evidence_and_names_the_command(tmp_path):
    run = Monthly(tmp_path).months(8)
    run.arrive(tested=False)
    code, line = due(run)
    assert code == 3
    assert f"not tested on mega-batch 9 (`alma test {tmp_path}` tests it): do not train" in line
    code, line = due(run, "--every", "3")
    assert code == 3
    assert line.endswith("by --every 3 the next training is due in 2 months")
    assert due(run, "--every", "1")[0] == 0


def test_the_calendar_counts_months_since_the_training(eight):
    assert due(eight, "--every", "1") == (
        0,
        "yes: 1 month since the training on 2024-08, of --every 1",
    )
    code, line = due(eight, "--every", "2")
    assert code == 1
    assert line.startswith("no: 1 month since the training on 2024-08, of --every 2; the losses")


def test_losses_as_usual_are_no(eight):
    assert due(eight) == (1, "no: the losses of the model of 2024-08 are as usual")


def test_unusual_losses_are_yes_whatever_the_terms(tmp_path):
    def broken(u, p):
        return drifting(u, p) + (2.0 if p == 9 else 0.0)

    run = Monthly(tmp_path, broken).months(8)
    run.arrive()
    for options in ((), ("--every", "12"), ("--price", "1e6")):
        code, line = due(run, *options)
        assert code == 0
        assert line == (
            "yes: the last losses of the model of 2024-08 are 1.99 nats a token above those of "
            "earlier models in service"
        )


def test_a_price_that_the_drift_pays_is_yes_and_a_higher_one_no(eight):
    code, line = due(eight, "--price", "0.01")
    assert code == 0
    assert line.startswith("yes: the cheapest plan trains now and saves ")
    assert line.endswith(" nats a token over periods against never")
    code, line = due(eight, "--price", "300/1000")
    assert code == 1
    assert "the cheapest plan trains in " in line
    assert line.endswith(" in the unit of --price against retraining every month")
    code, line = due(eight, "--price", "100")
    assert line.count("the cheapest plan trains no more and saves") == 1
    assert "Is --price 100 money? It was read as " in line
    assert "money?" not in due(eight, "--price", "100000/1000")[1]


def test_a_drift_that_has_just_changed_is_no_evidence_as_in_the_advice(tmp_path):
    def just_changed(u, p):
        return 3 + 0.1 * abs(max(p, 10) - max(u, 10)) + 1e-3 * math.sin(9 * u + 7 * p)

    run = Monthly(tmp_path, just_changed).months(12)
    run.arrive()
    code, line = due(run, "--price", "0.02")
    assert code == 3
    assert "no evidence: the drift has just changed" in line


def test_a_saving_with_zero_in_its_interval_is_no_evidence(tmp_path):
    noise = np.random.default_rng(1).normal(0, 0.05, (10, 10))
    run = Monthly(tmp_path, lambda u, p: drifting(u, p) / 3 + 2 + noise[u, p]).months(8)
    run.arrive()
    code, line = due(run, "--price", "0.02", "--json")
    answer = json.loads(line)
    assert (code, answer["answer"]) == (3, "no evidence")
    other = "never" if answer["plan"]["first"] == 0 else "retraining every month"
    saving = answer["plan"]["savings"][other]
    assert saving["low"] <= 0 < saving["high"]
    assert answer["course"] == "do not train, which costs nothing"


def test_few_models_are_no_evidence_unless_the_calendar_decides(tmp_path):
    run = Monthly(tmp_path).months(2)
    run.arrive()
    for options in ((), ("--price", "0.1")):
        code, line = due(run, *options)
        assert code == 3
        assert line.startswith("no evidence: 2 models tell too little")
        assert line.endswith("do not train, which costs nothing")
    assert due(run, "--every", "1")[0] == 0
    assert due(run, "--every", "2")[0] == 1


def test_few_losses_in_service_do_not_tell_what_is_usual(tmp_path):
    run = Monthly(tmp_path).months(4)
    run.arrive()
    code, line = due(run)
    assert code == 3
    assert line.startswith("no evidence: too few losses of earlier models in service to say what ")
    assert due(run, "--every", "2")[0] == 1
    assert due(run, "--price", "100")[0] == 1


def test_a_first_training_is_due(tmp_path):
    run = Monthly(tmp_path)
    run.arrive()
    run.run.append(run.row(0, trained=False))
    assert due(run) == (0, "yes: no model is trained yet, and 1 month arrived")


def test_a_run_that_waits_is_told_that_its_stage_would_be_short(tmp_path):
    run = waiting(tmp_path, megabatches=5)
    code, line = due(run, "--every", "1")
    assert code == 0
    assert line.endswith("; a stage of this run waits for 2, so train in a new --out")


def waiting(place, megabatches):
    """A run with w = 2 whose stages are complete up to t = 4."""
    run = Monthly(place, waiting_time=2)
    run.arrived = megabatches
    config = run.config | {"megabatches": megabatches}
    run.run = Run.open(place, config)
    for t in range(5):
        row = run.row(t, trained=t >= 2)
        if t >= 2:
            row |= {"stage": t // 2 - 1, "trained_on": [t // 2 * 2 - 1, t // 2 * 2]}
        run.run.append(row)
    return run


def test_a_stage_that_was_cut_short_is_refused(tmp_path):
    run = Monthly(tmp_path, waiting_time=2)
    run.arrived = 2
    run.run = Run.open(tmp_path, run.config | {"megabatches": 4})
    run.run.append(run.row(0, trained=False))
    run.run.append(run.row(1, trained=True))
    told = error_of(run_here(main, [tmp_path]))
    assert "stage 0 was trained when the stream ended with mega-batch 1" in told
    assert "choose another --out" in told


def test_a_stream_without_order_has_a_calendar_alone(tmp_path):
    image_run(tmp_path, [0.3, 0.2, 0.1, 0.1], rows=4)
    done = run_here(main, [tmp_path, "--every", "2"])
    assert done.returncode == 1
    assert done.stdout == "no: 1 mega-batch since the training on mega-batch 3, of --every 2\n"
    told = error_of(run_here(main, [tmp_path]))
    assert "only the calendar can say: give --every N" in told


def test_a_record_that_grew_says_what_one_made_in_one_go_says(tmp_path):
    grown = Monthly(tmp_path / "grown").months(11)
    grown.arrive()
    whole = Monthly(tmp_path / "whole")
    for _ in range(12):
        whole.arrived += 1
    whole.run = Run.open(tmp_path / "whole", CONFIG | {"megabatches": 12})
    whole.run.append(whole.row(0, trained=False))
    for t in range(1, 12):
        whole.run.append(whole.row(t, trained=True))
    for options in ((), ("--every", "2"), ("--price", "0.05"), ("--price", "0.2")):
        assert due(grown, *options) == due(whole, *options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--every", "0"], "--every: '0' is not a positive whole number"),
        (["--price", "much"], "numbers from 0 to 1e12"),
        (["--evry", "3"], "did you mean --every?"),
    ],
)
def test_a_bad_option_is_one_line(eight, options, told):
    assert told in error_of(run_here(main, [eight.directory, *options]))


def test_a_place_that_is_no_single_run_is_one_line_that_names_what_is_there(tmp_path):
    assert "is not a folder: give a run directory" in error_of(run_here(main, [tmp_path / "no"]))
    assert "no folder in it has a run.json" in error_of(run_here(main, [tmp_path]))
    one = Monthly(tmp_path / "one").months(3)
    assert run_here(main, [tmp_path]).returncode == 1  # the only run below a folder
    Monthly(one.directory / "inner").months(1)
    assert due(one)[1].startswith("no: nothing arrived since the training on 2024-03")
    shutil.rmtree(one.directory / "inner")
    for i in range(9):
        Monthly(tmp_path / f"more{i}").arrive()
    told = error_of(run_here(main, [tmp_path]))
    assert "has 10 runs, and a decision is about one: give one of " in told
    assert f"{tmp_path / 'more0'}, " in told
    assert told.endswith(", 2 more\n")
    told = error_of(run_here(main, [tmp_path / "more0"]))
    assert f"has no rows yet, nothing was evaluated: `alma status {tmp_path / 'more0'}`" in told


def test_a_damaged_record_is_one_line(tmp_path):
    run = Monthly(tmp_path).months(3)
    text = run.run.results.read_text()
    run.run.results.write_text(text.replace('"stage": 2', '"stage": "2"'))
    assert "not a row" in error_of(run_here(main, [tmp_path]))
    run.run.results.write_text(text)
    for file in (run.run.results, run.run.evaluations):
        file.write_text(file.read_text().replace("2024-0", "2024-13-0"))
    told = error_of(run_here(main, [tmp_path, "--every", "1"]))
    assert "results.jsonl: month must be in 1..12: restore the file" in told


def test_numbers_that_json_lacks_are_null(eight):
    answer = json.loads(due(eight, "--price", "0", "--json")[1])
    assert answer["plan"]["flips"][0] == 0
    assert not any(isinstance(value, float) and math.isnan(value) for value in answer.values())
