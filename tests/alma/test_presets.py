"""What a preset does beside chosen options."""

from alma.presets import compatible, contradicts_replay


def test_a_value_that_is_chosen_or_contradicts_a_chosen_one_is_left_out():
    values = {"epochs": 10, "replay_share": 0.5}
    assert compatible(values, {}, contradicts_replay) == values
    assert compatible(values, {"epochs": 3}, contradicts_replay) == {"replay_share": 0.5}
    assert compatible(values, {"replay": True}, contradicts_replay) == {"epochs": 10}
    assert compatible(values, {"replay": False}, contradicts_replay) == values


def test_a_value_needs_the_values_before_it():
    """As the average needs the schedule: without the first value the second contradicts."""

    def contradicts(name, options):
        if name == "schedule":
            return "from_scratch" in options
        return options.get("schedule") != "continuous"

    values = {"schedule": "continuous", "average": "poly:8"}
    assert compatible(values, {}, contradicts) == values
    assert compatible(values, {"from_scratch": True}, contradicts) == {}
    assert compatible(values, {"schedule": "stage"}, contradicts) == {}
