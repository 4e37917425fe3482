"""What a preset does beside chosen options, and the size of an experiment beside its settings."""

import textwrap

from alma.experiments import sections_of
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


def test_a_size_is_overridden_by_the_experiment_and_that_by_its_run(tmp_path):
    text = """\
    size: small
    sizes:
      small: {epochs: 1, seed: 1, flags: {lr: 0.1}}
    epochs: 5
    seed: 2
    runs:
      plain: {}
      other: {seed: 3}
    """
    (tmp_path / "experiment.yaml").write_text(textwrap.dedent(text))
    plain, other = sections_of(tmp_path / "experiment.yaml")
    assert plain.options == {"epochs": 5, "seed": 2}
    assert other.options == {"epochs": 5, "seed": 3}
    assert plain.flags == other.flags == {"lr": 0.1}
