"""fairseq's own commands with the plug-in: training, resuming, growing, several processes, errors."""

import json
import math
import os
import shutil

import pytest
import torch

from alma.stream import Stream
from fairseq_alma.growth import GROWN


def load(path) -> dict:
    return torch.load(path, weights_only=True)


def train(start, stream, tiny, save, *flags):
    child = start("train", stream, *tiny, "--save-dir", save, *flags)
    finished = child.wait()
    assert finished.code == 0, finished.output
    return finished.output


def logged(output: str, tag: str) -> list[dict]:
    """The JSON records that fairseq logged under a tag (train_inner, valid, ...)."""
    lines = (line.split(f"{tag}:", 1)[-1] for line in output.splitlines() if f":{tag}:" in line)
    return [json.loads(line) for line in lines if line.startswith("{")]


def assert_same_model(a, b, exact: bool = True) -> None:
    first, second = load(a)["model"], load(b)["model"]
    assert first.keys() == second.keys()
    for name in first:
        if exact:
            assert torch.equal(first[name], second[name]), name
        elif not name.endswith("k_proj.bias"):  # its gradient is rounding error, which Adam scales up
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.fixture
def stage0(start, stream, tiny, tmp_path):
    """The last checkpoint of stage 0, with 4 experts."""
    train(start, stream, tiny, tmp_path / "stage_00")
    return tmp_path / "stage_00" / "checkpoint_last.pt"


def test_a_stage_learns_and_logs_the_router_of_each_layer(start, stream, tiny, tmp_path):
    logs = tmp_path / "tensorboard"
    output = train(start, stream, tiny, tmp_path / "run", "--tensorboard-logdir", logs)
    inner, valid = logged(output, "train_inner"), logged(output, "valid")
    assert float(inner[-1]["loss"]) < float(inner[0]["loss"]) - 0.5
    names = ("balance_loss", "dropped", "max_load", "dead_experts", "entropy", "top1_prob", "share3")
    assert all(f"l1_{name}" in inner[-1] for name in names)
    assert sum(float(inner[-1][f"l1_share{e}"]) for e in range(4)) == pytest.approx(1, abs=5e-3)
    assert all(float(valid[-1][f"valid_l1_nll{e}"]) >= 0 for e in range(4))
    assert float(valid[-1]["valid_l1_dropped"]) == 0  # dropless
    written = b"".join(path.read_bytes() for path in logs.rglob("events*"))
    assert b"l1_share0" in written


@pytest.mark.parametrize("window", ["0", "16"])
def test_stock_eval_lm_and_our_evaluation_agree(start, stream, stage0, tmp_path, window):
    flags = f"{stream} --task alma_lm --path {stage0} --gen-subset test --context-window {window}".split()
    stock = start("eval-lm", *flags).wait()
    assert stock.code == 0, stock.output
    base2 = float(stock.output.split("Loss (base 2): ")[1].split(",")[0])
    assert start("evaluate", *flags, "--out", tmp_path / "result.json").wait().code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["nll"] / math.log(2) == pytest.approx(base2, abs=2e-4)
    test = Stream.load(stream).test
    assert (result["tokens"], result["words"], result["bytes"]) == (test.tokens, test.words, test.bytes)
    (training,) = result["training"]
    assert training["updates"] == 20
    assert 20 * 400 < training["tokens"] <= 20 * 512
    assert sum(result["experts"]["1"]["share"]) == pytest.approx(1)


def test_killed_training_resumes_bit_for_bit(start, stream, tiny, tmp_path):
    """In epoch 2 too, whose batches fairseq would change by a resume."""
    flags = ("--max-update", "60", "--save-interval-updates", "8", "--keep-interval-updates", "1")
    train(start, stream, tiny, tmp_path / "whole", *flags)
    save = tmp_path / "killed"
    for update in (8, 40, 48):
        found = lambda u=update: any(save.glob(f"checkpoint_*_{u}.pt"))  # noqa: E731
        start("train", stream, *tiny, "--save-dir", save, *flags).kill_when(found)
    output = train(start, stream, tiny, save, *flags)
    assert "Loaded checkpoint" in output
    assert load(save / "checkpoint_last.pt")["extra_state"]["train_iterator"]["epoch"] > 1
    assert_same_model(tmp_path / "whole/checkpoint_last.pt", save / "checkpoint_last.pt")
    assert_same_model(tmp_path / "whole/checkpoint_best.pt", save / "checkpoint_best.pt")
    tokens = [
        load(tmp_path / d / "checkpoint_last.pt")["extra_state"]["AlmaLMTask"] for d in ("whole", "killed")
    ]
    assert tokens[0]["train_tokens"] == tokens[1]["train_tokens"]
    assert tokens[0]["valid_tokens"] == tokens[1]["valid_tokens"]


def test_validation_loss_and_cost_are_recorded(start, stream, tiny, tmp_path):
    # Without a multiple of 1, the last few blocks are dropped.
    flags = ("--save-interval-updates", "8", "--required-batch-size-multiple", "1")
    output = train(start, stream, tiny, tmp_path / "run", *flags)
    best = tmp_path / "run" / "checkpoint_best.pt"

    def evaluate(*flags) -> dict:
        out = tmp_path / "result.json"
        assert start("evaluate", stream, *flags, "--out", out).wait().code == 0
        return json.loads(out.read_text())

    record = evaluate("--path", best, "--valid")
    of_valid = evaluate("--path", best, "--gen-subset", "valid")
    assert of_valid["valid"] is None
    assert record["valid"] == {key: of_valid[name] for key, name in (("loss", "nll"), ("perplexity",) * 2)}
    assert record["perplexity"] != record["valid"]["perplexity"]
    untrained = evaluate("--untrained", *tiny, "--valid")
    assert untrained["valid"]["loss"] == pytest.approx(math.log(1000), rel=0.1)
    (training,) = record["training"]
    times = len(logged(output, "valid"))
    assert times >= 3
    per_token = training["flops"] / training["tokens"] / 3
    assert training["validation_flops"] == times * Stream.load(stream).valid.tokens * per_token


def test_restarting_a_complete_stage_changes_nothing(start, stream, tiny, stage0):
    before = load(stage0)
    output = train(start, stream, tiny, stage0.parent)
    assert "nothing to train" in output
    after = load(stage0)
    assert after["optimizer_history"][-1]["num_updates"] == 20
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


@pytest.mark.parametrize("router", ["preserve", "copy", "tree"])
def test_every_copy_receives_tokens_after_the_first_update(start, stream, tiny, stage0, tmp_path, router):
    flags = "--stage 1 --moe-expert-count 6 --grow-experts 2 --max-update 1 --log-interval 1".split()
    save = tmp_path / "grown"
    output = train(
        start, stream, tiny, save, "--finetune-from-model", stage0, "--grow-router", router, *flags
    )
    (valid,) = logged(output, "valid")
    assert min(float(valid[f"valid_l1_share{e}"]) for e in (4, 5)) > 0.005, valid
    parents = load(save / GROWN)["growth"]["decoder.layers.1.fc1"]
    assert len(set(parents)) == 2
    copies = load(save / GROWN)["model"]["decoder.layers.1.fc1.router.copies"]
    split = [*parents, 4, 5] if router == "preserve" else []
    assert copies.tolist() == [2 if expert in split else 1 for expert in range(6)]


def test_growth_splits_the_experts_with_the_largest_validation_loss(start, stream, tiny, stage0, tmp_path):
    flags = ["--stage", "1", "--moe-expert-count", "5", "--grow-experts", "1", "--max-update", "1"]
    train(start, stream, tiny, tmp_path / "grown", "--finetune-from-model", stage0, *flags)
    out = tmp_path / "valid.json"
    arguments = [stream, "--task", "alma_lm", "--path", stage0, "--gen-subset", "valid", "--out", out]
    assert start("evaluate", *arguments).wait().code == 0
    layer = json.loads(out.read_text())["experts"]["1"]
    summed = [share * loss for share, loss in zip(layer["share"], layer["loss"], strict=True)]
    (parent,) = load(tmp_path / "grown" / GROWN)["growth"]["decoder.layers.1.fc1"]
    assert parent == summed.index(max(summed))


@pytest.mark.parametrize("mode", ["reset", "copy"])
def test_the_optimizer_is_reset_or_copied_when_growing(start, stream, tiny, stage0, tmp_path, mode):
    flags = ["--stage", "1", "--moe-expert-count", "6", "--grow-experts", "2", "--max-update", "1"]
    save = tmp_path / "grown"
    train(start, stream, tiny, save, "--finetune-from-model", stage0, "--grow-optimizer", mode, *flags)
    last = load(save / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 1  # the schedule restarts in both
    steps = {int(state["step"]) for state in last["last_optimizer_state"]["state"].values()}
    assert steps == ({1} if mode == "reset" else {21})


def train_on_two(start_two, stream, tiny, save, *flags):
    """Train in two gloo processes; returns the output of the first."""
    first, second = (rank.wait() for rank in start_two(stream, *tiny, "--save-dir", save, *flags))
    assert (first.code, second.code) == (0, 0), first.output + second.output
    return first.output


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("pytorch_ddp", ()),
        ("legacy_ddp", ("--moe-expert-parallel",)),
        pytest.param("legacy_ddp", (), marks=pytest.mark.slow),
        pytest.param("pytorch_ddp", ("--moe-expert-parallel",), marks=pytest.mark.slow),
    ],
)
def test_two_gloo_processes_equal_gradient_accumulation_in_one(
    start, start_two, stream, tiny, tmp_path, backend, parallel
):
    flags = ["--max-update", "20", "--dropout", "0", "--log-interval", "1", "--ddp-backend", backend]
    flags += ["--clip-norm", "0.1"]  # smaller than every norm
    one = train(start, stream, tiny, tmp_path / "one", *flags, "--update-freq", "2")
    two = train_on_two(start_two, stream, tiny, tmp_path / "two", *flags, *parallel)
    losses = [[float(record["loss"]) for record in logged(text, "train_inner")] for text in (one, two)]
    assert len(losses[0]) == 20
    assert all(float(record["gnorm"]) > 0.1 for record in logged(one, "train_inner"))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # logged with 3 decimals
    assert_same_model(tmp_path / "one/checkpoint_last.pt", tmp_path / "two/checkpoint_last.pt", exact=False)
    counts = [load(tmp_path / d / "checkpoint_last.pt")["extra_state"]["AlmaLMTask"] for d in ("one", "two")]
    assert counts[0]["train_tokens"] == counts[1]["train_tokens"]


_QUICK = [("--fp16", "chunked_cross_entropy"), ("--amp", "cross_entropy")]


@pytest.mark.parametrize(
    ("half", "criterion"),
    [
        pytest.param(half, criterion, marks=() if (half, criterion) in _QUICK else pytest.mark.slow)
        for half in ("--fp16", "--memory-efficient-fp16", "--bf16", "--memory-efficient-bf16", "--amp")
        for criterion in ("cross_entropy", "chunked_cross_entropy")
    ],
)
def test_half_precisions_learn_like_fp32(start, stream, tiny, tmp_path, half, criterion):
    """--amp with the loss scale of a real run."""
    flags = ("--dropout", "0", "--criterion", criterion, "--clip-norm", "0.1")
    whole = train(start, stream, tiny, tmp_path / "fp32", *flags)
    scale = ("--fp16-init-scale", "65536") if half == "--amp" else ()
    output = train(start, stream, tiny, tmp_path / "half", *flags, half, *scale)
    losses = [[float(record["loss"]) for record in logged(text, "train_inner")] for text in (whole, output)]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1][-1] < losses[1][0] - 0.5
    if half == "--amp":
        return
    weight = load(tmp_path / "half/checkpoint_last.pt")["model"]["decoder.layers.1.fc1.w1"]  # saved in fp32
    assert torch.equal(weight, weight.to(torch.bfloat16 if "bf16" in half else torch.float16).float())


def test_training_resumes_with_and_without_expert_parallelism(start, start_two, stream, tiny, tmp_path):
    flags = ("--dropout", "0", "--ddp-backend", "legacy_ddp")
    train(start, stream, tiny, tmp_path / "one", *flags, "--update-freq", "2", "--max-update", "9")
    for updates, parallel in (("3", ["--moe-expert-parallel"]), ("6", []), ("9", ["--moe-expert-parallel"])):
        train_on_two(start_two, stream, tiny, tmp_path / "both", *flags, "--max-update", updates, *parallel)
    assert_same_model(tmp_path / "one/checkpoint_last.pt", tmp_path / "both/checkpoint_last.pt", exact=False)
    states = [
        load(tmp_path / d / "checkpoint_last.pt")["last_optimizer_state"]["state"] for d in ("one", "both")
    ]
    for index in states[0]:
        torch.testing.assert_close(states[0][index], states[1][index], atol=1e-5, rtol=1e-4)
    output = train(start, stream, tiny, tmp_path / "both", "--max-update", "10", "--moe-expert-parallel")
    assert "@ 10 updates" in output  # also in one process


@pytest.mark.parametrize("parallel", [("--moe-expert-parallel",), pytest.param((), marks=pytest.mark.slow)])
def test_two_processes_grow_and_resume_like_one(start, start_two, stream, tiny, stage0, tmp_path, parallel):
    flags = ["--stage", "1", "--moe-expert-count", "6", "--grow-experts", "2"]
    flags += ["--finetune-from-model", stage0, "--dropout", "0"]
    train(start, stream, tiny, tmp_path / "one", *flags, "--update-freq", "2", "--max-update", "4")
    for updates in ("2", "4"):
        output = train_on_two(
            start_two, stream, tiny, tmp_path / "two", *flags, "--max-update", updates, *parallel
        )
    assert "@ 2 updates" in output
    for name in (GROWN, "checkpoint_last.pt"):
        assert_same_model(tmp_path / "one" / name, tmp_path / "two" / name, exact=False)


def test_distributed_world_size_spawns_processes_on_a_cpu(start, stream, tiny, tmp_path):
    flags = ("--max-update", "2", "--distributed-world-size", "2")
    output = train(start, stream, tiny, tmp_path / "run", *flags)
    assert "training on 2 devices" in output


def test_user_dir_is_accepted_too(start, stream, tiny, tmp_path):
    import fairseq_alma

    directory = os.path.dirname(fairseq_alma.__file__)
    train(start, stream, tiny, tmp_path / "run", "--user-dir", directory, "--max-update", "1")


def test_a_preprocessed_directory_trains_stage_by_stage(start, preprocessed, tiny, tmp_path):
    flags = ["--megabatch-words", "25000", "--max-update", "2"]
    previous: list = []
    for stage in range(2):
        save = tmp_path / f"stage_{stage}"
        output = train(start, preprocessed, tiny, save, "--stage", stage, *flags, *previous)
        assert f"stage {stage}: {stage + 1}" in output
        previous = ["--finetune-from-model", save / "checkpoint_last.pt"]


def test_a_failed_write_is_one_line_and_keeps_the_earlier_checkpoint(start, stream, tiny, stage0):
    before = stage0.read_bytes()
    more = ("--max-update", "25")
    child = start("train", stream, *tiny, "--save-dir", stage0.parent, *more, file_bytes=200_000)
    error = child.wait().error
    assert "cannot be written" in error
    assert stage0.read_bytes() == before
    assert not list(stage0.parent.glob("*.tmp"))
    (stage0.parent / ".checkpoint_last.pt.0f.tmp").write_bytes(b"left by a kill")
    output = train(start, stream, tiny, stage0.parent, *more)
    assert "@ 20 updates" in output
    assert not list(stage0.parent.glob("*.tmp"))


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def test_bad_input_is_one_line_and_exit_code_2(start, stream, tiny, stage0, tmp_path):
    def error(*flags, data=stream, save="bad") -> str:
        return start("train", data, *tiny, "--save-dir", tmp_path / save, *flags).wait().error

    assert "no such directory" in error(data=tmp_path / "nowhere")
    assert "dict.txt is missing" in error(data=tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(stream, damaged)
    truncate(damaged / "megabatch_00" / "train.bin")
    assert "train.bin: truncated" in error(data=damaged)
    late = start("train", stream, *tiny, "--save-dir", tmp_path / "late", "--stage", "3").wait()
    assert "stages 0 to 2" in late.error
    assert "SwitchLanguageModel" not in late.output
    wrong = tmp_path / "wrong"
    shutil.copytree(stream, wrong)
    (wrong / "dict.txt").write_text("a b c\n" * 3)
    assert "dict.txt is not a dictionary: Incorrect dictionary format" in error(data=wrong, save="late")
    (wrong / "dict.txt").write_bytes(b"\xff\xfe 1\n")
    assert "wrong/dict.txt is not a dictionary" in error(data=wrong, save="late")
    assert not (tmp_path / "late").exists()
    assert "waiting time 9 is longer" in error("--waiting-time", "9")
    growing = ("--grow-experts", "2", "--moe-expert-count", "6")
    assert "--finetune-from-model" in error(*growing)
    previous = ("--finetune-from-model", stage0)
    assert "no such checkpoint" in error("--stage", "1", "--finetune-from-model", tmp_path / "none.pt")
    assert "has 4 experts, --moe-expert-count is 3" in error(*previous, "--moe-expert-count", "3")
    assert "--grow-experts 2 to split" in error(*previous, "--moe-expert-count", "6")
    assert "use --moe-expert-count 6" in error(*previous, "--moe-expert-count", "8", "--grow-experts", "2")
    assert "at most once" in error(*previous, "--moe-expert-count", "9", "--grow-experts", "5")
    assert "experts are never taken away" in error("--moe-expert-count", "2", save="stage_00")
    truncate(stage0)
    assert "checkpoint_last.pt: truncated; delete it" in error(*previous)
    assert "checkpoint_last.pt: truncated; delete it" in error(save="stage_00")
    assert not list(tmp_path.glob("bad/*.pt"))
