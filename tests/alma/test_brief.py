"""`alma advise --brief`: the question that was asked, for readers who train no models."""

import pytest

from alma.report.advice.period import Period
from alma.report.advice.plain_words import duration, side
from alma.report.advice.questions import QUESTIONS

from .growing import whole_run
from .synthetic import call_advise, image_run
from .test_advise_drifting_runs import drifting_runs

UNKNOWN = ("TFLOP", "regret", "nats", "w=1", "B = ", "None", "nan", "answers have evidence")


def brief(*arguments):
    """The brief that is printed, without words that such readers do not know."""
    said = call_advise(*arguments, "--brief").stdout
    for word in UNKNOWN:
        assert word not in said
    assert len(said.splitlines()) < 25
    return said


def test_how_often_is_answered_alone_if_it_was_asked(tmp_path):
    drifting_runs(tmp_path / "runs")
    said = brief(tmp_path / "runs", "--from", 6, "--price", "1/2")
    assert said.startswith(
        "# When to train the next model?\n\nFor digits, by error.\n\n**Answer.** Retrain in 1 "
    )
    assert "**The model.** A single model: 50% old data in each training, going on from" in said
    assert "**How sure.** Very likely (" in said
    assert "Replay" not in said
    assert "A price of a training above 3.8 changes" in said


def test_which_model_is_answered_with_what_each_answer_is_about(tmp_path):
    drifting_runs(tmp_path / "runs")
    said = brief(tmp_path / "runs", "--from", 6)
    assert said.startswith(
        "# Which model to use?\n\nFor digits, by error.\n\n**Answer.** Use a single model"
    )
    assert "%) than starting from scratch each time" in said
    assert " points of error less than new data only" in said
    assert "**How often to retrain it.** " in said


def test_no_evidence_is_never_followed_by_evidence(tmp_path):
    """M6: "No evidence either way", then "1 of 1 answers have evidence", which was about replay."""

    def cell(t, j):
        return 0.9 if not t else 0.3 + 0.02 * ((3 * t + 5 * j) % 7)

    for seed in (0, 1, 2):
        for name, config in (("plain", {}), ("replay", {"replay_share": 0.5})):
            worse = 0.3 if name == "plain" else 0.0

            def shifted(t, j, by=worse, seed=seed):
                return cell(t, j) + by * (t > 0) + seed / 1000

            whole_run(tmp_path / f"{name}{seed}", image_run, shifted, 7, seed, **config)
    asked = brief(tmp_path, "--price", "400/1000")
    assert "No evidence either way" in asked
    assert "ery likely" not in asked
    both = brief(tmp_path)
    assert "**How sure.** Very likely (" in both
    assert "**How often to retrain it.** No evidence either way: " in both


def test_one_run_of_each_is_not_too_close_to_call(tmp_path):
    """V5: a difference of 79.6 points with one seed."""
    image_run(tmp_path / "sm", [0.9, 0.85, 0.8, 0.8])
    image_run(tmp_path / "ens", [0.1, 0.05, 0.01, 0.01], learner="ens", members=3)
    said = brief(tmp_path)
    assert "Unknown against one model: one run of each cannot tell" in said
    assert "oo close to call" not in said


def test_the_cheaper_side_of_an_open_question_has_its_share_of_the_compute(tmp_path):
    """Four stages to come train on 5, 6, 7 and 8 mega-batches with replay, on one each without."""
    errors = [0.5, 0.4, 0.3, 0.25, 0.22, 0.2, 0.18, 0.17]
    image_run(tmp_path / "replay", [0.99 * error for error in errors], rows=5, replay=True)
    image_run(tmp_path / "new", errors, rows=5)
    said = brief(tmp_path)
    assert "Unknown against new data only: one run of each" in said
    assert " less than new data only, which takes 0.15 of its compute." in said
    assert "If compute is scarce: new data only." in said


def test_losses_from_elsewhere_say_what_would_change_the_answer(tmp_path):
    lines = ["model,trained_until,tested_on,loss"]
    for model in ("small", "large"):
        for until in range(2018, 2025):
            for tested in range(2018, 2025):
                loss = 3 + 0.05 * abs(tested - until) + (until * tested) % 7 / 1000
                lines.append(f"{model},{until},{tested},{loss:.4f}")
    (tmp_path / "losses.csv").write_text("\n".join(lines) + "\n")
    said = brief("--matrix", tmp_path / "losses.csv", "--groups", "small", "--price", "0.2")
    assert said.startswith(
        "# When to train the next model?\n\nFor small, by loss, with values until 2024.\n"
    )
    assert "**How sure.** Very likely (over 99%) to save against " in said
    assert "**What it costs and saves.** It costs " in said
    assert "**What would change it.** A price of a training " in said
    said = brief("--matrix", tmp_path / "losses.csv")
    assert said.startswith("# How often to retrain?\n\nFor small and large, by loss.\n")
    assert "**Small.** Every " in said
    assert "What would change it: A gain below 1% that counts (--worth), or" in said


def test_the_picture_of_a_record_without_an_answer(tmp_path):
    whole_run(tmp_path / "run", image_run, lambda t, j: 0.9 - 0.1 * t, 3)
    call_advise(tmp_path / "run", "--brief", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<title>Which model to use?</title>" in page
    assert "data:image/svg+xml;base64," in page


def test_every_side_of_a_question_has_plain_words():
    month = Period("month")
    assert side("wait for 3 mega-batches", month) == "training after every 3 months"
    assert side("replay 0.25 recent", month) == "25% data of the last training in each training"
    assert side("no replay", month) == "new data only"
    assert len(QUESTIONS) == 8  # a new question needs plain words


@pytest.mark.parametrize(
    ("hours", "text"),
    [(1e-5, "less than a minute"), (1 / 60, "1 minute"), (0.2, "12 minutes"), (3.5, "3.5 hours")],
)
def test_durations(hours, text):
    assert duration(hours) == text
