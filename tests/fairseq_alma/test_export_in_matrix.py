"""Models that `alma export` writes with code are tested by `alma matrix`, by the code of ALMA."""

import pytest
import torch


def _logits_by_alma(folder, tokens, file):
    """What `alma matrix` loads from a folder answers on tokens, saved in a file."""
    from transformers_alma.arguments import EngineArguments
    from transformers_alma.exported import register_code
    from transformers_alma.models import pretrained

    register_code(str(folder))
    with torch.no_grad():
        logits = pretrained(str(folder), EngineArguments(dtype="auto")).eval()(tokens).logits
    torch.save(logits, file)


def test_the_code_in_the_folder_is_not_run(untrained, child, sample, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")
    from fairseq_alma.hugging_face import export, read_model

    path = untrained("model.pt", "--moe-expert-count", 6)[0]
    folder = tmp_path / "hf"
    export(path, folder)
    tokens = sample["net_input"]["src_tokens"]
    with torch.no_grad():
        expected = read_model(str(path)).eval()(tokens).logits
    (folder / "modeling_alma.py").write_text("raise SystemExit('the code of a folder has run')\n")
    file = tmp_path / "logits.pt"
    done = child(tmp_path / "child.log", _logits_by_alma, folder, tokens, file).wait()
    assert done.code == 0, done.output
    torch.testing.assert_close(torch.load(file), expected)
