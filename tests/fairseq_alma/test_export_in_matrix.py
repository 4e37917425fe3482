"""Models that `alma export` writes with code are tested by `alma matrix`, by the code of ALMA."""

import json

import pytest
import torch
import torch.nn.functional as F

from alma.trainer import TRAINED, StageTask, TextPart

TEXT = "The first of two lines.\nThe second one."


def _evaluate(folder, data, out):
    """Answer a task as `alma matrix` gives it, with the loss of the model in a folder."""
    from transformers_alma import texts

    size = data.stat().st_size
    part = TextPart("2024", "2024", words=8, bytes=size, tokens=0, files=(str(data),), documents=1)
    task = StageTask(
        action="evaluate",
        out=str(out),
        stream="",
        dictionary=0,
        learner="sm",
        stage=None,
        t=0,
        megabatches=1,
        waiting_time=1,
        valid=(),
        evaluate=(part,),
        members=(str(folder),),
        seeds=(),
    )
    texts.evaluate(task, texts.parser().parse_args(["--device", "cpu", "stage.json"]))


def test_the_code_in_the_folder_is_not_run(untrained, child, stream, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    from fairseq_alma.hugging_face import export, read_model

    path = untrained("model.pt", "--moe-expert-count", 6)[0]
    folder = tmp_path / "hf"
    export(path, folder, stream)
    file = folder / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    model = read_model(str(path)).eval()
    end = model.config.eos_token_id
    tokens = torch.tensor([[end, *tokenizer(TEXT, add_special_tokens=False).input_ids, end]])
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:]).item()
    (folder / "modeling_alma.py").write_text("raise SystemExit('the code of a folder has run')\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": TEXT}))
    log = tmp_path / "child.log"
    done = child(log, _evaluate, folder, tmp_path / "data.jsonl", tmp_path).wait()
    assert done.code == 0, done.output
    ((measured, count),) = json.loads((tmp_path / TRAINED).read_text())["losses"].values()
    assert (measured, count) == (pytest.approx(loss, rel=1e-5), tokens.shape[1] - 1)
