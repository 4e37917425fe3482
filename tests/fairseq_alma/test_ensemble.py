"""Ensembles evaluated from their checkpoints, and UMix: several models trained as one."""

import math
from pathlib import Path

import pytest
import torch

from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.layer import switch_layers
from tests.fairseq_alma.shared import load

SEEDS = ("1", "1001", "2001")
WIDER = ("--moe-expert-count", "6", "--decoder-embed-dim", "16")


@pytest.fixture
def members(train, tmp_path) -> list[Path]:
    """Checkpoints of three members after 4 updates; the last has more experts and is narrower."""
    paths = []
    for seed in SEEDS:
        save = tmp_path / f"member_{seed}"
        wider = WIDER if seed == SEEDS[-1] else ()
        train(save, "--seed", seed, "--max-update", "4", "--disable-validation", *wider)
        paths.append(save / "checkpoint_last.pt")
    return paths


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


def test_an_ensemble_is_the_mean_of_its_members_probabilities(start, evaluate, members, build, tmp_path):
    models = []
    for path in members:
        task, model = build("--sample-break-mode", "none", *(WIDER if path == members[-1] else ()))
        model.load_state_dict(load(path)["model"])
        models.append(model)
    paths, valid = ":".join(map(str, members)), ("--gen-subset", "valid")
    found = evaluate("--path", paths, *valid)
    assert found["nll"] == pytest.approx(mean_nll(models, task, "valid"), abs=1e-6)
    alone = [evaluate("--path", path, *valid) for path in members]
    assert found["nll"] < max(one["nll"] for one in alone)
    for key in ("parameters", "eval_flops_per_example"):
        assert found[key] == sum(one[key] for one in alone)
    assert found["training"] == [one["training"][0] for one in alone]
    assert (found["members"], found["expert_count"]) == (3, None)
    assert [len(found["experts"][layer]["share"]) for layer in ("0.1", "1.1", "2.1")] == [4, 4, 6]
    with_context = evaluate("--path", paths, *valid, "--context-window", "16")
    assert with_context["tokens"] == found["tokens"]
    assert with_context["nll"] != found["nll"]
    combined = tmp_path / "ens.pt"
    assert start("combine", *members, "--out", combined).wait().code == 0
    assert evaluate("--path", combined, *valid) == found | {"training": []}


def test_untrained_members_have_their_own_seeds(evaluate, build, tiny):
    found = evaluate("--untrained", "--seeds", "7,1007", *tiny)
    task, one = build("--sample-break-mode", "none")
    _, two = build("--seed", "1007")
    assert found["nll"] == pytest.approx(mean_nll([one, two], task, "test"), abs=1e-5)
    assert (found["members"], found["training"]) == (2, [])
    only = evaluate("--untrained", *tiny)
    assert only["nll"] == pytest.approx(mean_nll([one], task, "test"), abs=1e-5)
    context = evaluate("--untrained", "--context-window", "16", *tiny)
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


def test_umix_is_one_run_of_fairseq_train_and_counts_all_its_members(start, train, evaluate, tmp_path):
    paths, found = [], []
    for members in ("1", "2"):
        output = train(tmp_path / members, "--members", members, "--max-update", "6")
        paths.append(tmp_path / members / "checkpoint_last.pt")
        found.append(evaluate("--path", paths[-1]))
    one, two = found
    assert (one["members"], two["members"]) == (1, 2)
    assert two["parameters"] == 2 * one["parameters"]
    assert two["eval_flops_per_example"] == 2 * one["eval_flops_per_example"]
    assert two["training"][0]["flops"] == pytest.approx(2 * one["training"][0]["flops"])
    assert math.isfinite(two["nll"])
    assert "l1.1_share3" in output
    combined = tmp_path / "both.pt"
    assert start("combine", *paths, "--out", combined).wait().code == 0
    both = evaluate("--path", combined)
    assert both["members"] == 3
    assert both["parameters"] == one["parameters"] + two["parameters"]
