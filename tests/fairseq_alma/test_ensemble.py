"""Ensembles evaluated from their checkpoints, and UMix: several models trained as one."""

import json
import math
from pathlib import Path

import pytest
import torch

from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.layer import switch_layers

SEEDS = ("1", "1001", "2001")


@pytest.fixture
def members(start, stream, tiny, tmp_path) -> list[Path]:
    """Checkpoints of three members after 4 updates; the last has more experts and is narrower."""
    paths = []
    for seed in SEEDS:
        save = tmp_path / f"member_{seed}"
        flags = ["--seed", seed, "--max-update", "4", "--save-dir", save, "--disable-validation"]
        if seed == SEEDS[-1]:
            flags += ["--moe-expert-count", "6", "--decoder-embed-dim", "16"]
        finished = start("train", stream, *tiny, *flags).wait()
        assert finished.code == 0, finished.output
        paths.append(save / "checkpoint_last.pt")
    return paths


def evaluate(start, stream, out, *flags) -> dict:
    arguments = ["--task", "alma_lm", "--out", out, *flags]
    finished = start("evaluate", stream, *arguments).wait()
    assert finished.code == 0, finished.output
    return json.loads(out.read_text())


@torch.no_grad()
def mean_nll(models, task, split: str) -> float:
    """-log of the mean of the models' probabilities, per token, in double precision."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    total = tokens = 0.0
    for i in range(len(dataset)):
        item = dataset[i]
        probs = sum(m.eval()(item["source"][None])[0].double().softmax(-1) for m in models) / len(models)
        total -= probs[0].gather(1, item["target"][:, None]).log().sum().item()
        tokens += len(item["target"])
    return total / tokens


def test_an_ensemble_is_the_mean_of_its_members_probabilities(start, stream, members, build, tmp_path):
    models = []
    for path in members:
        wider = [] if path != members[-1] else ["--moe-expert-count", "6", "--decoder-embed-dim", "16"]
        task, model = build("--sample-break-mode", "none", *wider)
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
        models.append(model)
    paths = ":".join(map(str, members))
    found = evaluate(start, stream, tmp_path / "a", "--path", paths, "--gen-subset", "valid")
    assert found["nll"] == pytest.approx(mean_nll(models, task, "valid"), abs=1e-6)
    alone = [
        evaluate(start, stream, tmp_path / str(k), "--path", path, "--gen-subset", "valid")
        for k, path in enumerate(members)
    ]
    assert found["nll"] < max(one["nll"] for one in alone)
    for key in ("parameters", "eval_flops_per_example"):
        assert found[key] == sum(one[key] for one in alone)
    assert found["training"] == [one["training"][0] for one in alone]
    assert (found["members"], found["expert_count"]) == (3, None)
    assert [len(found["experts"][layer]["share"]) for layer in ("0.1", "1.1", "2.1")] == [4, 4, 6]
    window = ["--gen-subset", "valid", "--context-window", "16"]
    with_context = evaluate(start, stream, tmp_path / "c", "--path", paths, *window)
    assert with_context["tokens"] == found["tokens"]
    assert with_context["nll"] != found["nll"]


def test_our_evaluation_takes_a_combined_checkpoint_as_its_members(start, stream, members, tmp_path):
    combined = tmp_path / "ens.pt"
    assert start("combine", *members, "--out", combined).wait().code == 0
    flags = ["--gen-subset", "valid", "--path"]
    one = evaluate(start, stream, tmp_path / "a", *flags, combined)
    listed = evaluate(start, stream, tmp_path / "b", *flags, ":".join(map(str, members)))
    assert one == listed | {"training": []}


def test_untrained_members_have_their_own_seeds(start, stream, build, tiny, tmp_path):
    found = evaluate(start, stream, tmp_path / "a", "--untrained", "--seeds", "7,1007", *tiny)
    task, one = build("--sample-break-mode", "none")
    _, two = build("--seed", "1007")
    assert found["nll"] == pytest.approx(mean_nll([one, two], task, "test"), abs=1e-5)
    assert (found["members"], found["training"]) == (2, [])
    only = evaluate(start, stream, tmp_path / "b", "--untrained", *tiny)
    assert only["nll"] == pytest.approx(mean_nll([one], task, "test"), abs=1e-5)
    context = evaluate(start, stream, tmp_path / "c", "--untrained", "--context-window", "16", *tiny)
    assert context["tokens"] == only["tokens"]
    assert context["nll"] != only["nll"]


@torch.no_grad()
def test_umix_averages_the_logits_of_independent_models(build, sample):
    _, umix = build("--members", "3")
    assert isinstance(umix.decoder, EnsembleDecoder)
    umix.eval()
    tokens = sample["net_input"]["src_tokens"]
    logits = [member(tokens)[0] for member in umix.decoder.members]
    assert not torch.equal(logits[0], logits[1])
    torch.testing.assert_close(umix(**sample["net_input"])[0], sum(logits) / 3)
    _, single = build("--members", "1")
    assert not isinstance(single.decoder, EnsembleDecoder)
    assert [name.count(".") for name in switch_layers(umix)] == [1] * 3


def test_umix_trains_all_members_jointly_with_their_load_balancing_losses(build, sample):
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion

    task, umix = build("--members", "2", "--moe-gate-loss-wt", "0.5", "--dropout", "0")

    class Optimizer:
        def backward(self, loss):
            self.loss = loss
            loss.backward()

    optimizer = Optimizer()
    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    loss, size, log = task.train_step(sample, umix, criterion, optimizer, 0)
    _, extra = umix(**sample["net_input"])
    balance = [routing.balance_loss for routing in extra["routings"].values()]
    plain, _, _ = criterion(umix, sample)
    assert len(balance) == 2
    assert loss.item() == pytest.approx(plain.item() + 0.5 * size * sum(balance).item(), rel=1e-5)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in umix.parameters())
    assert {"moe_l0.1_load", "moe_l1.1_load"} <= log.keys()


def test_umix_is_one_run_of_fairseq_train_and_counts_all_its_members(start, stream, tiny, tmp_path):
    results = {}
    for members in ("1", "2"):
        save = tmp_path / members
        flags = ["--members", members, "--max-update", "6", "--save-dir", save]
        finished = start("train", stream, *tiny, *flags).wait()
        assert finished.code == 0, finished.output
        path = save / "checkpoint_last.pt"
        results[members] = evaluate(start, stream, save / "result.json", "--path", path)
    one, two = results["1"], results["2"]
    assert (one["members"], two["members"]) == (1, 2)
    assert two["parameters"] == 2 * one["parameters"]
    assert two["eval_flops_per_example"] == 2 * one["eval_flops_per_example"]
    assert two["training"][0]["flops"] == pytest.approx(2 * one["training"][0]["flops"])
    assert math.isfinite(two["nll"])
    assert "l1.1_share3" in finished.output
    combined = tmp_path / "both.pt"
    paths = [tmp_path / members / "checkpoint_last.pt" for members in results]
    assert start("combine", *paths, "--out", combined).wait().code == 0
    both = evaluate(start, stream, tmp_path / "both.json", "--path", combined)
    assert both["members"] == 3
    assert both["parameters"] == one["parameters"] + two["parameters"]
