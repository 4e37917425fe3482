"""Late evaluations: cells of the evaluation matrix that were measured after their row."""

import json
import math
import os

import numpy as np
import pytest

from alma import json_lines
from alma.errors import UserError
from alma.evaluations import item_losses_file, read_item_losses, write_item_losses
from alma.records import Run

CONFIG = {"learner": "sm", "megabatches": 4, "waiting_time": 2, "replay": False, "seed": 0}


def row(t, stage, matrix, **extra):
    """A row of text, tested on as many held-out parts as `matrix` has numbers."""
    periods = [f"2024-0{j}" for j in range(1, len(matrix) + 1)]
    shares = [{"0": [0.25, 0.75]} for _ in matrix]
    return {
        "t": t,
        "stage": stage,
        "trained_on": [] if stage is None else [2 * stage + 1, 2 * stage + 2],
        "metric": "perplexity",
        "value": 10.0,
        "parameters": 10,
        "train_flops": 1e9,
        "eval_flops_per_example": 100,
        "seconds": 0.1,
        "peak_memory_bytes": 1000,
        "extra": {
            "matrix": matrix,
            "matrix_periods": periods,
            "matrix_experts": shares,
            "raw": {"perplexity": 11.0, "matrix": [value + 1 for value in matrix]},
        }
        | extra,
    }


def late(stage, megabatch, value, **fields):
    """A late evaluation on a period of 2024."""
    period = f"2024-0{megabatch}"
    return {"stage": stage, "megabatch": megabatch, "period": period, "value": value} | fields


@pytest.fixture
def run(tmp_path):
    """A run that was written when the stream had two of its four mega-batches, then four."""
    run = Run.open(tmp_path, CONFIG)
    for t, stage in ((0, None), (1, None), (2, 0)):
        run.append(row(t, stage, [1.0, 2.0]))
    run.append(row(3, 0, [1.0, 2.0]))
    run.append(row(4, 1, [5.0, 6.0, 7.0, 8.0]))
    return run


def test_late_cells_continue_the_matrix_of_their_model_and_of_rows_that_wait_with_it(run):
    experts = {"0": [0.5, 0.5]}
    run.append_evaluations(
        [
            late(None, 3, 30.0, raw=31.0, experts=experts),
            late(None, 4, 40.0, raw=41.0, experts=experts),
            late(0, 4, 4.0, raw=5.0, experts=experts),
        ]
    )
    rows = Run.read(run.directory).rows
    assert [rows[t]["extra"]["matrix"] for t in (0, 1)] == [[1.0, 2.0, 30.0, 40.0]] * 2
    assert rows[0]["extra"]["raw"]["matrix"] == [2.0, 3.0, 31.0, 41.0]
    assert rows[0]["extra"]["matrix_experts"][2:] == [experts, experts]
    for t in (2, 3):
        cells = rows[t]["extra"]["matrix"]
        assert cells[:2] == [1.0, 2.0]
        assert math.isnan(cells[2])  # stage 0 was not tested on mega-batch 3
        assert cells[3] == 4.0
        assert (
            rows[t]["extra"]["matrix_experts"] == row(t, 0, [1.0, 2.0])["extra"]["matrix_experts"]
        )
        names = ["2024-01", "2024-02", "2024-03", "2024-04"]
        assert rows[t]["extra"]["matrix_periods"] == names
    assert rows[4] == run.rows_as_written[4]
    assert run.rows_as_written[0]["extra"]["matrix"] == [1.0, 2.0]


def test_a_cell_is_written_once_and_never_one_that_a_row_has(run):
    cells = [late(0, 3, 3.0), late(1, 3, 9.0), late(0, 2, 9.0)]
    run.append_evaluations(cells)
    run.append_evaluations([late(0, 3, 99.0)])
    assert [json.loads(line) for line in run.evaluations.open()] == [cells[0]]


def test_periods_before_the_cutoff_count_as_seen(run):
    extra = {"matrix_seen": 2}
    other = Run.open(run.directory.parent / "other", CONFIG)
    other.append(row(0, None, [1.0, 2.0], **extra))
    other.append_evaluations([late(None, 3, 3.0, seen=True), late(None, 4, 4.0, seen=False)])
    assert other.rows[0]["extra"]["matrix_seen"] == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"stage": 0, "megabatch": 5, "value": 1.0}, "beyond mega-batch 4"),
        ({"stage": 4, "megabatch": 1, "value": 1.0}, "beyond mega-batch 4"),
        ({"stage": 0, "megabatch": 3}, "value"),
        ({"stage": 0, "megabatch": 3, "value": "1"}, "value"),
        ({"stage": 0, "megabatch": 3, "value": 1.0, "values": 2}, "unknown fields"),
    ],
)
def test_a_line_that_is_no_evaluation_is_refused_by_its_number(run, line, problem):
    run.append_evaluations([late(0, 3, 3.0)])
    if problem == "beyond mega-batch 4":
        with pytest.raises(ValueError, match=problem):
            run.append_evaluations([line])
    with run.evaluations.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=rf"evaluations.jsonl:2: .*{problem}.*restore the file"):
        _ = Run.read(run.directory).rows


def test_a_second_line_for_a_cell_is_refused(run):
    run.append_evaluations([late(0, 3, 3.0)])
    run.evaluations.write_bytes(2 * run.evaluations.read_bytes())
    with pytest.raises(UserError, match="second evaluation of stage 0 on mega-batch 3: keep one"):
        _ = run.rows


def test_an_incomplete_last_line_is_ignored_and_then_removed(run):
    run.append_evaluations([late(0, 3, 3.0), late(0, 4, 4.0)])
    whole = run.evaluations.read_bytes()
    run.evaluations.write_bytes(whole[:-5])
    assert len(run.late_evaluations) == 1
    again = Run.open(run.directory, CONFIG)
    again.append_evaluations([late(0, 4, 4.0)])
    assert run.evaluations.read_bytes() == whole


def test_a_full_disk_leaves_no_part_of_a_line(run, monkeypatch):
    """A row that is written in part is removed; the next one follows the last whole line."""
    run.append_evaluations([late(0, 3, 3.0)])
    before = run.evaluations.read_bytes()
    write = os.write
    monkeypatch.setattr(
        json_lines.os, "write", lambda descriptor, line: write(descriptor, line[:5])
    )
    with pytest.raises(OSError, match="No space left"):
        run.append_evaluations([late(0, 4, 4.0)])
    assert run.evaluations.read_bytes() == before


def test_an_untrained_run_that_is_replaced_loses_its_late_evaluations(tmp_path):
    run = Run.open(tmp_path, CONFIG)
    run.append(row(0, None, [1.0]))
    run.append_evaluations([late(None, 2, 2.0)])
    Run.open(tmp_path, CONFIG | {"seed": 1})
    assert not run.evaluations.exists()


def test_item_losses_are_read_as_written_and_damage_is_told(tmp_path):
    path = item_losses_file(tmp_path, 3, 7)
    assert path == tmp_path / "held_out/stage_003_megabatch_0007.npy"
    assert read_item_losses(path) is None
    losses = np.array([[12.5, 4.0], [3.0, 2.0]])
    write_item_losses(path, losses)
    assert (read_item_losses(path) == losses).all()
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match="damaged .*: delete it, and start `alma test` again"):
        read_item_losses(path)
    write_item_losses(path, losses[:, :1])
    with pytest.raises(UserError, match="not an array of losses and counts"):
        read_item_losses(path)
