"""`alma report --metric`: bits per byte across tokenizers, and scores."""

import pytest

from alma.errors import UserError
from alma.report.results import find_runs, group
from alma.report.scores import BITS, scored

from .synthetic import edited, lm_run, report


def run_of(folder, values, text=1000, **config):
    """A run with bits per byte and a score a hundredth and a thousandth of the perplexity."""

    def more(row):
        row["extra"] |= {"bits_per_byte": row["value"] / 100, "words": text // 5, "bytes": text}
        if row["stage"] is not None:
            row["extra"]["scores"] = {"cloze_error": row["value"] / 1000}

    return edited(lm_run(folder, values, **config), more)


def test_tokenizers_are_compared_by_bits_per_byte(tmp_path):
    run_of(tmp_path / "a", [300.0, 200.0], stream="words", stream_sha256="1")
    run_of(tmp_path / "b", [350.0, 250.0], stream="bytes", stream_sha256="2")
    run_of(tmp_path / "c", [350.0, 250.0], text=2000, stream="more", stream_sha256="3")
    assert [len(results) for results in group(find_runs([tmp_path]))] == [1, 1, 1]
    output = report(str(tmp_path), "--metric", BITS)
    assert output.returncode == 0
    tables = output.stdout.split("Test bits-per-byte")[1:]
    assert len(tables) == 2
    assert [name in tables[0] for name in ("words (sm)", "bytes (sm)", "more (sm)")] == [
        True,
        True,
        False,
    ]
    assert ["2.00" in tables[0], "3.50" in tables[0], "500.00" in tables[0]] == [True, True, True]


def test_a_score_is_a_column_from_the_first_stage_on(tmp_path):
    for seed in (0, 1):
        run_of(tmp_path / str(seed), [900.0, 300.0, 200.0, 100.0], w=2, seed=seed)
    runs = scored(find_runs([tmp_path]), "cloze_error")
    (result,) = group(runs)[0]
    assert result.times == [2, 3, 4]
    assert [rows[4]["value"] for rows in result.repeats] == [0.1, 0.1]
    assert not result.unfinished
    output = report(str(tmp_path), "--metric", "cloze_error", "--html", str(tmp_path / "r.html"))
    assert output.returncode == 0
    assert "Test cloze_error" in output.stdout
    assert "cloze_error" in (tmp_path / "r.html").read_text()


def test_a_number_that_no_run_has(tmp_path):
    run_of(tmp_path, [300.0, 200.0])
    with pytest.raises(UserError, match="--metric cloze: no run has it; .*cloze_error"):
        scored(find_runs([tmp_path]), "cloze")
