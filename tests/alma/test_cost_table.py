"""The table of costs of a dry run."""

from alma.cost_table import GIGA, MEGA, cost_table, scaled, total, with_commas


def test_cells_have_one_form_and_unknown_ones_a_question_mark():
    assert [with_commas(number) for number in (7, 12345, None)] == ["7", "12,345", "?"]
    assert [scaled(number, MEGA, "M") for number in (1.25e6, 1.2345e9)] == ["1.2M", "1,234M"]
    assert (scaled(0.96e9, GIGA), scaled(None, GIGA)) == ("1.0", "?")
    assert (total([1, 2]), total([]), total([1, None])) == (3, 0, None)


def test_sums_are_in_the_last_line_below_their_columns():
    columns = ("run", "learner", "tokens")
    runs = [
        {"tokens": "3", "run": "a", "learner": "sm"},
        {"run": "b", "learner": "ens", "tokens": "4"},
    ]
    lines = cost_table(columns, runs, {"run": "total", "tokens": "7"}).splitlines()
    assert [line.split() for line in lines] == [
        ["run", "learner", "tokens"],
        ["a", "sm", "3"],
        ["b", "ens", "4"],
        ["total", "7"],
    ]
    assert len(set(map(len, lines))) == 1
    assert len(cost_table(columns, runs, None).splitlines()) == 3
    assert cost_table(columns, [], None).split() == list(columns)
