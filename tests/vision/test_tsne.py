"""The t-SNE of the gating tree: its functions, and the command on tiny runs."""

import json
import shutil
import sys

import pytest

from tests.vision.conftest import seeded
from vision import MegaBatchStream, run, tsne
from vision.mixture import Gating


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of gmoe on digits with 1, 2 and 3 experts in its three stages."""
    place = tmp_path_factory.mktemp("runs") / "gmoe"
    tiny = {"hidden": 4, "epochs": 2, "device": "cpu", "save_stages": True}
    run(MegaBatchStream("digits", 3), "gmoe", place, **tiny)
    return place


def grown(*splits, tree=True):
    """Gating that starts with one expert and splits the given experts in turn."""
    router = Gating(2, 1, tree)
    for expert in splits:
        router.split(expert, seeded(0))
    return router


@pytest.mark.parametrize(
    ("splits", "parents"),
    [
        ((), {}),
        ((0,), {"0": "01", "1": "01"}),
        ((0, 1), {"0": "012", "12": "012", "1": "12", "2": "12"}),
        ((0, 1, 0), {"03": "0123", "12": "0123", "1": "12", "2": "12", "0": "03", "3": "03"}),
        ((0, 1, 2), {"0": "0123", "123": "0123", "1": "123", "23": "123", "2": "23", "3": "23"}),
    ],
)
def test_tree_is_read_from_the_paths(splits, parents):
    tree = tsne.tree_of(grown(*splits).paths)
    named = {
        "".join(map(str, sorted(node))): "".join(map(str, sorted(up))) for node, up in tree.items()
    }
    assert named == parents


def test_flat_gating_has_no_tree():
    assert tsne.tree_of(grown(0, 1, tree=False).paths) == {}


@pytest.mark.parametrize(
    ("experts", "chosen"),
    [
        ({0: 1, 1: 2, 2: 3, 3: 4, 4: 5}, [1, 2, 3]),
        ({0: 2, 1: 2, 2: 3, 3: 3, 4: 4}, [1, 3, 4]),
        ({0: 2, 1: 2, 2: 2}, [2]),
        ({0: 6, 1: 7}, [1]),
        ({3: 1}, [3]),
    ],
)
def test_the_stages_drawn_have_2_3_and_4_experts(experts, chosen):
    assert tsne.choose(experts) == chosen


def test_the_model_of_a_stage_has_the_recorded_error(place):
    _, dataset, models = tsne.load(place, "nowhere")
    assert list(models) == [1, 2]
    examples = dataset.examples(dataset.test)
    rows = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
    for stage, model in models.items():
        error = (model(examples.images)[0].argmax(0) != examples.labels).double().mean()
        assert (model.experts, float(error)) == (stage + 1, rows[stage + 1]["value"])


def test_the_command_draws_one_panel_per_stage(place, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "new/two.png"
    monkeypatch.setattr(
        sys, "argv", ["tsne", str(place), *f"--examples 30 --out {picture}".split()]
    )
    tsne.main()
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(picture.read_bytes()) > 10_000
    text = picture.with_suffix(".svg").read_text()
    assert "class" in text
    assert all(f"stage {stage} (t = {stage + 1}): {stage + 1} experts" in text for stage in (1, 2))


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        (None, "", "not a run directory"),
        ({"stages": False}, "", "--save-stages"),
        ({"learner": "sm"}, "", "give a run of gmoe or moe"),
        ({"dataset": "mnist"}, "--data-root nowhere", "give its folder with --data-root"),
        ({"data": "0" * 16}, "", "not the run's data"),
        ({"hidden": 5}, "", "is damaged"),
        ({}, "--examples 4", "at least 5"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    place, tmp_path, changes, words, message, monkeypatch, capsys
):
    if changes is not None:  # a copy of the run with another config
        ignored = None if changes.pop("stages", True) else shutil.ignore_patterns("stage_*")
        shutil.copytree(place, tmp_path / "run", ignore=ignored)
        info = json.loads((place / "run.json").read_text())
        info["config"] |= changes
        (tmp_path / "run/run.json").write_text(json.dumps(info))
    monkeypatch.setattr(sys, "argv", ["tsne", str(tmp_path / "run"), *words.split()])
    with pytest.raises(SystemExit) as stop:
        tsne.main()
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1)
    assert message in printed.err
