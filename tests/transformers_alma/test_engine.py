"""`alma train STREAM --init FOLDER`: rows are those of transformers; learners differ as said."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from alma.export import main as export
from alma.records import Run
from alma.stream import Stream
from alma.tables import number
from alma.trainer import StageTask
from slurm.lm import trainer as tasks
from tests.transformers_alma.conftest import BLOCK, END, KINDS

FLAGS = (
    f"--block_size {BLOCK} --max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 4"
    " --use_cpu"
).split()


def task_of(stream: Path, out: Path, *members: Path, models: int = 1) -> StageTask:
    """An evaluation on the test set."""
    loaded = Stream.load(stream)
    (part,) = tasks._text_parts(loaded, [loaded.test])
    return StageTask(
        action="evaluate",
        out=str(out),
        stream=str(stream),
        dictionary=loaded.vocab_size,
        learner="sm",
        stage=None,
        t=0,
        megabatches=2,
        waiting_time=1,
        valid=(part,),
        evaluate=(part,),
        members=tuple(map(str, members)),
        seeds=tuple(range(models)),
    )


def model_ids(stream: Path, name: str = "test") -> np.ndarray:
    """The ids of a part, read by hand."""
    loaded = Stream.load(stream)
    ids = np.fromfile(stream / f"{name}.bin", np.uint16).astype(np.int64)
    assert loaded.end_token == END
    return np.where(ids == 2, END, ids - 4)


@torch.no_grad()
def loss_by_hand(model, ids: np.ndarray, first: int | None = None) -> float:
    """transformers' own loss on blocks with a token of context each, in nats a token."""
    nats = 0.0
    for start in range(0, len(ids), BLOCK - 1):
        targets = ids[start : start + BLOCK - 1]
        context = ids[start - 1] if start else END
        if first is not None:
            context = first
        block = torch.from_numpy(np.concatenate([[context], targets]))[None]
        nats += model(input_ids=block, labels=block).loss.double().item() * len(targets)
    return nats / len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_row_0_is_the_loss_of_transformers(kind, make, own_stream, transformers, tmp_path):
    from transformers_alma.arguments import parse
    from transformers_alma.evaluation import evaluate

    folder = make(kind)
    task = task_of(own_stream, tmp_path)
    evaluate(task, parse(["--init", str(folder), *FLAGS]))
    answer = task.checked(json.loads((tmp_path / "trained.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model_ids(own_stream)
    loss, tokens = answer.losses["test"]
    assert tokens == len(ids) == Stream.load(own_stream).test.tokens
    assert loss == pytest.approx(loss_by_hand(model.eval(), ids), abs=1e-5)
    assert answer.parameters == model.num_parameters()
    documents = np.load(tmp_path / answer.documents["test"])
    assert documents[:, 1].sum() == len(ids)


def test_a_model_whose_tokenizer_begins_texts_gets_its_first_token(
    make, own_stream, transformers, tokenizer, tmp_path
):
    from tokenizers.processors import TemplateProcessing

    from transformers_alma import check
    from transformers_alma.arguments import parse
    from transformers_alma.evaluation import evaluate

    folder = make("Llama")
    assert check.first_token(str(folder), own_stream) is None
    record = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(record))
    with_first = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|3|>", eos_token=f"<|{END}|>"
    )
    with_first._tokenizer.post_processor = TemplateProcessing(
        single="<|3|> $A", special_tokens=[("<|3|>", 3)]
    )
    with_first.save_pretrained(folder)
    assert check.first_token(str(folder), own_stream) == 3
    task = task_of(own_stream, tmp_path)
    evaluate(task, parse(["--init", str(folder), "--first_token", "3", *FLAGS]))
    loss, _ = task.checked(json.loads((tmp_path / "trained.json").read_text())).losses["test"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = loss_by_hand(model.eval(), model_ids(own_stream), first=3)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_an_ensemble_averages_probabilities(make, own_stream, transformers, tmp_path):
    from transformers_alma.arguments import parse
    from transformers_alma.evaluation import evaluate

    folders = [make("Llama"), make("Qwen2")]
    task = task_of(own_stream, tmp_path, *folders)
    evaluate(task, parse(["--init", str(folders[0]), *FLAGS]))
    loss, _ = task.checked(json.loads((tmp_path / "trained.json").read_text())).losses["test"]
    ids = torch.from_numpy(model_ids(own_stream))
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in folders
    ]
    nats = 0.0
    for start in range(0, len(ids), BLOCK - 1):
        targets = ids[start : start + BLOCK - 1]
        context = ids[start - 1 : start] if start else torch.tensor([END])
        block = torch.cat([context, targets])[None]
        probabilities = torch.zeros(len(targets), dtype=torch.float64)
        for model in models:
            with torch.no_grad():
                of_model = model(input_ids=block).logits[0, :-1].double().softmax(-1)
            probabilities += of_model[range(len(targets)), targets] / 2
        nats -= probabilities.log().sum().item()
    assert loss == pytest.approx(nats / len(ids), abs=1e-5)


def test_a_run_by_the_main_command(train, llama, own_stream, transformers, tmp_path, monkeypatch):
    """Row 0 is the model as it came; each row is what transformers measures of its stage."""
    run = tmp_path / "run"
    printed = train(own_stream, "--init", llama, "--learner", "sm", "--out", run, "--", *FLAGS)
    assert "transformers trains llama: " in printed
    assert f"an update has 4 blocks of {BLOCK} tokens" in printed
    rows = Run.read(run).rows
    assert [row["t"] for row in rows] == [0, 1, 2]
    folders = [llama, *(run / f"stage_0{stage}/model/weights" for stage in (0, 1))]
    ids = model_ids(own_stream)
    for row, folder in zip(rows, folders, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert row["value"] == pytest.approx(math.exp(loss_by_hand(model.eval(), ids)), rel=1e-5)
        held_out = [
            math.exp(loss_by_hand(model, model_ids(own_stream, f"test_0{t}"))) for t in (0, 1)
        ]
        assert row["extra"]["matrix"] == pytest.approx(held_out, rel=1e-5)
    assert rows[2]["value"] < rows[1]["value"] < rows[0]["value"]
    record = Run.read(run)
    assert record.config["engine"] == "transformers"
    assert record.config["transformers_flags"] == FLAGS
    parameters = model.num_parameters()
    assert rows[1]["train_flops"] == 6 * parameters * 4 * 4 * (BLOCK - 1)
    assert not list(run.rglob("checkpoint-*")), "states of optimizers are left"
    again = train(own_stream, "--init", llama, "--learner", "sm", "--out", run, "--", *FLAGS)
    assert "stage 1: was complete" in again
    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["alma export", str(run), "--out", str(exported)])
    export()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert loaded.config.use_cache, "generation from the export would be slow"
    last = math.exp(loss_by_hand(loaded.eval(), ids))
    assert last == pytest.approx(rows[2]["value"], rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer(tokenizer.decode(ids[:20].tolist())).input_ids == ids[:20].tolist()
    assert not [file.name for file in exported.iterdir() if file.name.startswith("alma")]
    card = (exported / "README.md").read_text()
    assert f"| tokens of training | {2 * 4 * 4 * (BLOCK - 1):,} |" in card
    assert "mega-batches 1 to 2 of 2, of the stream `stream`" in card
    assert f"| mega-batch 2 | {number(rows[2]['extra']['matrix'][1])} | past |" in card


def test_training_is_that_of_transformers_own_loop(train, make, own_stream, transformers, tmp_path):
    """Plain AdamW with transformers' decay, on the blocks that the data set gives."""
    from transformers_alma.blocks import Layout, PartBlocks, StageBlocks

    folder = make("Qwen2")
    run = tmp_path / "run"
    train(own_stream, "--init", folder, "--learner", "sm", "--out", run, "--", *FLAGS)
    task = StageTask.read(str(run / "stage_00/model/stage.json"))
    layout = Layout(BLOCK, END)
    parts = [PartBlocks(part.map_tokens(), layout) for part in task.train]
    blocks = StageBlocks(parts, [], 0.0, [0, 1], 16)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for update in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / 4)
        items = [blocks[4 * update + k]["input_ids"] for k in range(4)]
        batch = torch.stack(items)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        run / "stage_00/model/weights", dtype=torch.float32
    )
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=2e-4, rtol=1e-3)


def test_learners_differ_as_said(train, llama, own_stream, tmp_path):
    """ens: members of one model, apart by data order; gens and --from-scratch: the model anew."""
    values = {}
    for learner, words in {
        "sm": [],
        "scratch": ["--from-scratch"],
        "ens": ["--members", "2"],
        "gens": [],
    }.items():
        name = "sm" if learner == "scratch" else learner
        out = tmp_path / learner
        train(own_stream, "--init", llama, "--learner", name, *words, "--out", out, "--", *FLAGS)
        values[learner] = [row["value"] for row in Run.read(out).rows]
    first = {name: numbers[0] for name, numbers in values.items()}
    assert len(set(first.values())) == 1, first
    assert values["sm"][1] == values["scratch"][1] != values["scratch"][2] != values["sm"][2]
    starts = json.loads((tmp_path / "ens/stage_01/member_1/model/stage.json").read_text())
    assert starts["checkpoint"].endswith("stage_00/member_1/model/weights")
    starts = json.loads((tmp_path / "gens/stage_01/model/stage.json").read_text())
    assert starts["checkpoint"] is None


def test_the_average_is_deployed_and_the_raw_weights_go_on(train, llama, own_stream, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "run"
    words = ["--init", llama, "--learner", "sm", "--average", ".5"]
    train(own_stream, *words, "--out", out, "--", *FLAGS, "--save_steps", "1")
    plain = tmp_path / "plain"
    train(own_stream, "--init", llama, "--learner", "sm", "--out", plain, "--", *FLAGS)
    for stage in (0, 1):
        weights = out / f"stage_0{stage}/model/weights"
        raw = load_file(weights / "raw/model.safetensors")
        expected = load_file(plain / f"stage_0{stage}/model/weights/model.safetensors")
        assert all(torch.equal(raw[name], expected[name]) for name in expected)
        average = load_file(weights / "model.safetensors")
        assert not any(torch.equal(average[name], raw[name]) for name in raw)
    assert Run.read(out).rows[2]["value"] != Run.read(plain).rows[2]["value"]
