"""`alma export RUN` writes the weights that the run evaluates."""

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("average", "weights"), [("last:3", "last:3"), (0.9, "average"), ("poly:8", "average")]
)
def test_a_run_gives_the_weights_that_it_evaluates(average, weights, tmp_path, monkeypatch):
    from fairseq_alma import export, hugging_face

    (tmp_path / "run.json").touch()
    monkeypatch.setattr(
        export.Run, "read", lambda run: SimpleNamespace(config={"average": average})
    )
    monkeypatch.setattr(export, "checkpoint_of", lambda run, t: "checkpoint.pt")
    monkeypatch.setattr(export, "_tokenizer_of", lambda run, checkpoint: None)
    monkeypatch.setattr(export, "card_of", lambda run, t: "")
    exported = []
    monkeypatch.setattr(hugging_face, "export", lambda *arguments: exported.append(arguments))
    export.export(str(tmp_path), tmp_path / "out")
    assert exported[0][3] == weights
