"""fairseq's own commands with the plug-in: training, resuming, growing, several processes,
errors."""

import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.trainer import Trainer

from alma.stream import Stream
from fairseq_alma import compat
from fairseq_alma.growth import GROWN
from tests.fairseq_alma.shared import assert_same_model, load, logged


def losses_of(*outputs: str) -> list[list[float]]:
    """The losses of the updates that each output logs."""
    losses_of_outputs = []
    for text in outputs:
        losses_of_outputs.append([float(record["loss"]) for record in logged(text, "train_inner")])
    return losses_of_outputs


def test_an_update_starts_from_the_random_state_of_fairseqs_seed():
    compat.install()
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(common=SimpleNamespace(seed=3)), get_num_updates=lambda: 4
    )
    with utils.set_torch_seed(7):
        expected = torch.rand(3)
    with torch.random.fork_rng():
        Trainer._set_seed(trainer)
        assert torch.equal(torch.rand(3), expected)


def test_a_stage_learns_and_logs_the_router_of_each_layer(train, tmp_path):
    output = train(tmp_path / "run")
    inner = logged(output, "train_inner")
    valid = logged(output, "valid")
    assert float(inner[-1]["loss"]) < float(inner[0]["loss"]) - 0.5
    names = (
        "balance_loss",
        "dropped",
        "max_load",
        "dead_experts",
        "entropy",
        "top1_prob",
        "share3",
    )
    assert all(f"l1_{name}" in inner[-1] for name in names)
    assert sum(float(inner[-1][f"l1_share{e}"]) for e in range(4)) == pytest.approx(1, abs=5e-3)
    assert all(float(valid[-1][f"valid_l1_nll{e}"]) >= 0 for e in range(4))
    assert float(valid[-1]["valid_l1_dropped"]) == 0  # dropless


def test_stock_eval_lm_and_our_evaluation_agree(start, evaluate, stream, stage0):
    for window in (0, 16):
        flags = ("--path", stage0, "--gen-subset", "test", "--context-window", window)
        stock = start("eval-lm", stream, "--task", "alma_lm", *flags).wait()
        assert stock.code == 0, stock.output
        base2 = float(stock.output.split("Loss (base 2): ")[1].split(",")[0])
        result = evaluate(*flags)
        assert result["nll"] / math.log(2) == pytest.approx(base2, abs=2e-4)
        test = Stream.load(stream).test
        assert (result["tokens"], result["words"], result["bytes"]) == (
            test.tokens,
            test.words,
            test.bytes,
        )
    (training,) = result["training"]
    assert training["updates"] == 20
    assert 20 * 400 < training["tokens"] <= 20 * 512
    assert sum(result["experts"]["1"]["share"]) == pytest.approx(1)


def test_killed_training_resumes_bit_for_bit(start, train, stream, tiny, tmp_path):
    """In epoch 2 too, whose batches fairseq would change by a resume."""
    flags = ("--max-update", "60", "--save-interval-updates", "8", "--keep-interval-updates", "1")
    train(tmp_path / "whole", *flags)
    save = tmp_path / "killed"
    for update in (8, 40, 48):
        is_saved = lambda u=update: any(save.glob(f"checkpoint_*_{u}.pt"))  # noqa: E731
        start("train", stream, *tiny, "--save-dir", save, *flags).kill_when(is_saved)
    assert "Loaded checkpoint" in train(save, *flags)
    for name in ("last", "best"):
        assert_same_model(tmp_path / f"whole/checkpoint_{name}.pt", save / f"checkpoint_{name}.pt")
    states = [
        load(tmp_path / name / "checkpoint_last.pt")["extra_state"] for name in ("whole", "killed")
    ]
    assert states[1]["train_iterator"]["epoch"] > 1
    for count in ("train_tokens", "valid_tokens"):
        assert len({state["AlmaLMTask"][count] for state in states}) == 1


def test_validation_loss_and_cost_are_recorded(train, evaluate, stream, tiny, tmp_path):
    """Every validation within the training reads every block, as evaluation does."""
    output = train(tmp_path / "run", "--save-interval-updates", "8")
    best = tmp_path / "run" / "checkpoint_best.pt"
    record = evaluate("--path", best, "--valid")
    of_valid = evaluate("--path", best, "--gen-subset", "valid")
    assert of_valid["valid"] is None
    assert record["valid"] == {
        key: of_valid[name] for key, name in (("loss", "nll"), ("perplexity",) * 2)
    }
    assert record["perplexity"] != record["valid"]["perplexity"]
    untrained = evaluate("--untrained", *tiny, "--valid")
    assert untrained["valid"]["loss"] == pytest.approx(math.log(1000), rel=0.1)
    (training,) = record["training"]
    times = len(logged(output, "valid"))
    assert times >= 3
    per_token = training["flops"] / training["tokens"] / 3
    assert training["validation_flops"] == times * Stream.load(stream).valid.tokens * per_token


@pytest.mark.parametrize(("router", "optimizer"), [("preserve", "reset"), ("copy", "copy")])
def test_losing_experts_split_and_every_copy_receives_tokens(
    train, evaluate, stage0, tmp_path, router, optimizer
):
    flags = (
        "--stage 1 --moe-expert-count 6 --grow-experts 2 --max-update 1 --log-interval 1".split()
    )
    flags += [
        "--finetune-from-model",
        stage0,
        "--grow-router",
        router,
        "--grow-optimizer",
        optimizer,
    ]
    save = tmp_path / "grown"
    (valid,) = logged(train(save, *flags), "valid")
    assert min(float(valid[f"valid_l1_share{e}"]) for e in (4, 5)) > 0.005, valid
    parents = load(save / GROWN)["growth"]["decoder.layers.1.fc1"]
    layer = evaluate("--path", stage0, "--gen-subset", "valid")["experts"]["1"]
    summed = [share * loss for share, loss in zip(layer["share"], layer["loss"], strict=True)]
    assert parents == sorted(range(4), key=lambda expert: -summed[expert])[:2]
    copies = load(save / GROWN)["model"]["decoder.layers.1.fc1.router.copies"]
    split = [*parents, 4, 5] if router == "preserve" else []
    assert copies.tolist() == [2 if expert in split else 1 for expert in range(6)]
    last = load(save / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 1  # the schedule restarts in both
    steps = {int(state["step"]) for state in last["last_optimizer_state"]["state"].values()}
    assert steps == ({1} if optimizer == "reset" else {21})


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("pytorch_ddp", ()),
        ("legacy_ddp", ("--moe-expert-parallel",)),
        pytest.param("legacy_ddp", (), marks=pytest.mark.thorough),
        pytest.param("pytorch_ddp", ("--moe-expert-parallel",), marks=pytest.mark.thorough),
    ],
)
def test_two_gloo_processes_equal_gradient_accumulation_in_one(
    train, train_on_two, tmp_path, backend, parallel
):
    """Of fairseq's criterion; they have chunks of its loss."""
    flags = ["--max-update", "8", "--dropout", "0", "--log-interval", "1", "--ddp-backend", backend]
    flags += ["--clip-norm", "0.1"]  # smaller than every norm
    one = train(tmp_path / "one", *flags, "--update-freq", "2")
    chunked = ("--criterion", "chunked_cross_entropy", "--loss-chunk-tokens", "100")
    two, _ = train_on_two(tmp_path / "two", *flags, *chunked, *parallel)
    losses = losses_of(one, two)
    assert len(losses[0]) == 8
    norms = []
    for text in (one, two):
        norms.append([float(record["gnorm"]) for record in logged(text, "train_inner")])
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)
    assert min(norms[0]) > 0.1
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # logged with 3 decimals
    assert_same_model(
        tmp_path / "one/checkpoint_last.pt", tmp_path / "two/checkpoint_last.pt", exact=False
    )
    counts = [
        load(tmp_path / d / "checkpoint_last.pt")["extra_state"]["AlmaLMTask"]
        for d in ("one", "two")
    ]
    assert counts[0]["train_tokens"] == counts[1]["train_tokens"]


_QUICK = [("--fp16", "chunked_cross_entropy")]


@pytest.mark.parametrize(
    ("half", "criterion"),
    [
        pytest.param(
            half, criterion, marks=() if (half, criterion) in _QUICK else pytest.mark.thorough
        )
        for half in ("--fp16", "--memory-efficient-fp16", "--bf16", "--memory-efficient-bf16")
        for criterion in ("cross_entropy", "chunked_cross_entropy")
    ],
)
def test_half_precisions_learn_like_fp32(train, tmp_path, half, criterion):
    flags = ("--dropout", "0", "--criterion", criterion, "--clip-norm", "0.1")
    whole = train(tmp_path / "fp32", *flags)
    output = train(tmp_path / "half", *flags, half)
    losses = losses_of(whole, output)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1][-1] < losses[1][0] - 0.5
    weight = load(tmp_path / "half/checkpoint_last.pt")["model"][
        "decoder.layers.1.fc1.w1"
    ]  # saved in fp32
    assert torch.equal(
        weight, weight.to(torch.bfloat16 if "bf16" in half else torch.float16).float()
    )


@pytest.mark.parametrize(
    "parallel", [("--moe-expert-parallel",), pytest.param((), marks=pytest.mark.thorough)]
)
def test_two_processes_grow_and_resume_like_one(train, train_on_two, stage0, tmp_path, parallel):
    flags = ["--stage", "1", "--moe-expert-count", "6", "--grow-experts", "2"]
    flags += ["--finetune-from-model", stage0, "--dropout", "0"]
    train(tmp_path / "one", *flags, "--update-freq", "2", "--max-update", "4")
    for updates in ("2", "4"):
        output, _ = train_on_two(tmp_path / "two", *flags, "--max-update", updates, *parallel)
    assert "@ 2 updates" in output
    for name in (GROWN, "checkpoint_last.pt"):
        assert_same_model(tmp_path / "one" / name, tmp_path / "two" / name, exact=False)


def test_a_preprocessed_directory_trains_stage_by_stage(train, preprocessed, tmp_path):
    flags = ["--megabatch-words", "25000", "--max-update", "2"]
    previous: list = []
    for stage in range(2):
        save = tmp_path / f"stage_{stage}"
        output = train(save, "--stage", stage, *flags, *previous, data=preprocessed)
        assert f"stage {stage}: {stage + 1}" in output
        previous = ["--finetune-from-model", save / "checkpoint_last.pt"]


def test_fewer_blocks_than_a_batch_is_a_multiple_of_train(train, stream, tmp_path):
    train(tmp_path / "run", *"--tokens-per-sample 2304 --max-tokens 18432 --max-update 2".split())
    counts = load(tmp_path / "run/checkpoint_last.pt")["extra_state"]["AlmaLMTask"]
    parts = Stream.load(stream)
    assert parts.megabatches[0].tokens < 7 * 2304
    assert counts["valid_tokens"] == 2 * parts.valid.tokens
    assert counts["train_tokens"] == 2 * parts.megabatches[0].tokens


@pytest.mark.parametrize("mode", ["eos", "complete_doc"])
def test_an_evaluation_that_would_leave_out_tokens_is_refused(
    start, stream, stage0, tmp_path, mode
):
    flags = (
        "--task",
        "alma_lm",
        "--path",
        stage0,
        "--gen-subset",
        "test",
        "--sample-break-mode",
        mode,
    )
    error = start("evaluate", stream, *flags, "--out", tmp_path / "x.json").wait().error
    tokens = Stream.load(stream).test.tokens
    assert re.fullmatch(
        rf"test: only [\d,]+ of {tokens:,} tokens can be evaluated: leave out --sample.*", error
    )
    assert not (tmp_path / "x.json").exists()


@pytest.mark.thorough
def test_a_hub_model_scores_text_in_a_script(stage0, stream):
    code = f"""
from fairseq.models.transformer_lm import TransformerLanguageModel
model = TransformerLanguageModel.from_pretrained(
    {str(stage0.parent)!r}, "checkpoint_last.pt", data_name_or_path={str(stream)!r},
    bpe="sentencepiece", sentencepiece_model={str(stream / "tokenizer.model")!r})
print(len(model.score("The function returns")["positional_scores"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1


def test_a_failed_write_is_one_line_and_keeps_the_earlier_checkpoint(
    start, train, stream, tiny, stage0
):
    before = stage0.read_bytes()
    flags = ("--max-update", "25")
    child = start("train", stream, *tiny, "--save-dir", stage0.parent, *flags, file_bytes=200_000)
    error = child.wait().error
    assert "cannot be written" in error
    assert stage0.read_bytes() == before
    assert not list(stage0.parent.glob("*.tmp"))
    (stage0.parent / ".checkpoint_last.pt.0f.tmp").write_bytes(b"left by a kill")
    output = train(stage0.parent, *flags)
    assert "@ 20 updates" in output
    assert not list(stage0.parent.glob("*.tmp"))


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def test_bad_input_is_one_line_and_exit_code_2(start, stream, tiny, stage0, tmp_path):
    def error(*flags, data=stream, save="bad") -> str:
        return start("train", data, *tiny, "--save-dir", tmp_path / save, *flags).wait().error

    late = start("train", stream, *tiny, "--save-dir", tmp_path / "late", "--stage", "3").wait()
    assert "stages 0 to 2" in late.error
    assert "SwitchLanguageModel" not in late.output
    assert "no such directory" in error(data=tmp_path / "nowhere", save="late")
    assert not (tmp_path / "late").exists()
    growing = ("--grow-experts", "2", "--moe-expert-count", "6")
    assert "--finetune-from-model" in error(*growing)
    previous = ("--finetune-from-model", stage0)
    assert "no such checkpoint" in error(
        "--stage", "1", "--finetune-from-model", tmp_path / "none.pt"
    )
    assert "has 4 experts, --moe-expert-count is 3" in error(*previous, "--moe-expert-count", "3")
    assert "--grow-experts 2 to split" in error(*previous, "--moe-expert-count", "6")
    assert "use --moe-expert-count 6" in error(
        *previous, "--moe-expert-count", "8", "--grow-experts", "2"
    )
    assert "at most once" in error(*previous, "--moe-expert-count", "9", "--grow-experts", "5")
    assert "has 4 experts, --moe-expert-count is 2: use" in error(
        "--moe-expert-count", "2", save="stage_00"
    )
    truncate(stage0)
    assert "checkpoint_last.pt: truncated; delete it" in error(*previous)
    assert "checkpoint_last.pt: truncated; delete it" in error(save="stage_00")
    assert not list(tmp_path.glob("bad/*.pt"))
