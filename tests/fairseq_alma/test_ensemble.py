"""Ensembles evaluated from their checkpoints, and UMix: several models trained as one."""

import math
import re
from pathlib import Path

import pytest
import torch

from alma.errors import UserError
from fairseq_alma.checkpoint import memory_map_members
from fairseq_alma.ensemble import EnsembleDecoder
from fairseq_alma.moe.layer import switch_layers
from tests.fairseq_alma.shared import Plain, changed, load

SEEDS = ("1", "1001")
WIDER = ("--moe-expert-count", "6", "--decoder-embed-dim", "16")


@pytest.fixture
def members(train, tmp_path) -> list[Path]:
    """Checkpoints of two members after 4 updates; the second has more experts and is narrower."""
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
        probs = sum(m.eval()(item["source"][None])[0].double().softmax(-1) for m in models) / len(
            models
        )
        total -= probs[0].gather(1, item["target"][:, None]).log().sum().item()
        tokens += len(item["target"])
    return total / tokens


def test_an_ensemble_is_the_mean_of_its_members_probabilities(
    start, evaluate, members, build, stream
):
    """In fairseq-eval-lm, too."""
    models = []
    for path in members:
        task, model = build("--sample-break-mode", "none", *(WIDER if path == members[-1] else ()))
        model.load_state_dict(load(path)["model"])
        models.append(model)
    paths = ":".join(map(str, members))
    valid = ("--gen-subset", "valid")
    result = evaluate("--path", paths, *valid)
    assert result["nll"] == pytest.approx(mean_nll(models, task, "valid"), abs=1e-6)
    alone = [evaluate("--path", path, *valid) for path in members]
    assert result["nll"] < max(member["nll"] for member in alone)
    for key in ("parameters", "eval_flops_per_example"):
        assert result[key] == sum(member[key] for member in alone)
    assert result["training"] == [member["training"][0] for member in alone]
    assert (result["members"], result["expert_count"]) == (2, None)
    assert [len(result["experts"][layer]["share"]) for layer in ("0.1", "1.1")] == [4, 6]
    with_context = evaluate("--path", paths, *valid, "--context-window", "16")
    assert with_context["tokens"] == result["tokens"]
    assert with_context["nll"] != result["nll"]
    stock = start("eval-lm", stream, "--task", "alma_lm", "--path", paths, *valid).wait()
    assert stock.code == 0, stock.output
    base2 = float(stock.output.split("Loss (base 2): ")[1].split(",")[0])
    assert result["nll"] / math.log(2) == pytest.approx(base2, abs=2e-4)


@pytest.mark.thorough
def test_untrained_members_have_their_own_seeds(evaluate, build, tiny):
    result = evaluate("--untrained", "--seeds", "7,1007", *tiny)
    task, first = build("--sample-break-mode", "none")
    _, second = build("--seed", "1007")
    assert result["nll"] == pytest.approx(mean_nll([first, second], task, "test"), abs=1e-5)
    assert (result["members"], result["training"]) == (2, [])
    only = evaluate("--untrained", *tiny)
    assert only["nll"] == pytest.approx(mean_nll([first], task, "test"), abs=1e-5)
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

    criterion = CrossEntropyCriterion(task, sentence_avg=False)
    loss, size, log = task.train_step(sample, umix, criterion, Plain(), 0)
    _, extra = umix(**sample["net_input"])
    balance = [routing.balance_loss for routing in extra["routings"].values()]
    plain, _, _ = criterion(umix, sample)
    assert len(balance) == 2
    assert loss.item() == pytest.approx(plain.item() + 0.5 * size * sum(balance).item(), rel=1e-5)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in umix.parameters())
    assert {"moe_l0.1_load", "moe_l1.1_load"} <= log.keys()


def test_umix_is_one_run_of_fairseq_train_and_counts_all_its_members(
    train, evaluate, stage0, tmp_path
):
    output = train(tmp_path / "umix", "--members", "2", "--max-update", "6")
    umix = tmp_path / "umix" / "checkpoint_last.pt"
    single, pair, both = (evaluate("--path", path) for path in (stage0, umix, f"{stage0}:{umix}"))
    assert [result["members"] for result in (single, pair, both)] == [1, 2, 3]
    assert pair["parameters"] == 2 * single["parameters"]
    assert pair["eval_flops_per_example"] == 2 * single["eval_flops_per_example"]
    costs = [
        result["training"][0]["flops"] / result["training"][0]["tokens"]
        for result in (single, pair)
    ]
    assert costs[1] == pytest.approx(2 * costs[0])
    assert math.isfinite(pair["nll"])
    assert "l1.1_share3" in output
    assert both["parameters"] == single["parameters"] + pair["parameters"]


@pytest.fixture
def unlike(untrained) -> tuple:
    """Checkpoints of two models with different experts and widths."""
    return untrained("member_0.pt")[0], untrained("member_1.pt", *WIDER, "--seed", "2")[0]


@pytest.mark.parametrize(
    ("command", "least"),
    [("interactive", 1), pytest.param("generate", 10, marks=pytest.mark.thorough)],
)
def test_fairseq_continues_texts_by_an_ensemble(start, unlike, stream, tmp_path, command, least):
    (tmp_path / "input.txt").write_text("\u2581the \u2581of\n")
    flags = f"--task alma_lm --beam 2 --max-len-b 6 --input {tmp_path}/input.txt".split()
    if command == "generate":
        flags = "--task alma_lm --gen-subset valid --sample-break-mode eos --prefix-size 3".split()
        flags += (
            "--batch-size 16 --beam 1 --max-len-b 5 --skip-invalid-size-inputs-valid-test".split()
        )
    texts = []
    for path in (*unlike, f"{unlike[0]}:{unlike[1]}"):
        finished = start(command, stream, "--path", path, *flags).wait()
        assert finished.code == 0, finished.output
        texts.append(sorted(re.findall(r"^H-(\d+)\t\S+\t(.*)$", finished.output, re.MULTILINE)))
        assert len(texts[-1]) >= least
    assert least == 1 or texts[2] not in texts[:2]  # one short text may be the same


class Context(torch.nn.Module):
    """A decoder that reads so many tokens."""

    dictionary = None

    def __init__(self, tokens: int):
        super().__init__()
        self.max_positions = lambda: tokens


def test_an_ensemble_reads_no_longer_text_than_each_member():
    decoder = EnsembleDecoder([Context(64), Context(32), Context(128)], "probs")
    assert decoder.max_positions() == 32


def cut_dictionary(state):
    name = "decoder.embed_tokens.weight"
    state["model"][name] = state["model"][name][:-8]


def test_members_that_do_not_fit_are_one_clear_line(start, unlike, stream, tmp_path):
    first, second = unlike
    (tmp_path / "half.pt").write_bytes(first.read_bytes()[:2000])

    def made(name, change):
        return changed(second, tmp_path / name, change)

    for bad, message in (
        (
            made("v.pt", cut_dictionary),
            "v.pt has a dictionary of 996 entries and blocks of 64 tokens",
        ),
        (
            made("b.pt", lambda s: s["cfg"]["task"].update(tokens_per_sample=32)),
            "and blocks of 32 tokens",
        ),
        (
            made("o.pt", lambda s: s["model"].update(encoder=torch.zeros(1))),
            "o.pt is not a checkpoint of a",
        ),
        (tmp_path / "absent.pt", "absent.pt: no such checkpoint"),
        (tmp_path / "half.pt", "half.pt: truncated"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            memory_map_members([str(first), str(bad)])
    flags = [stream, "--task", "alma_lm", "--path", f"{first}:{bad}", "--gen-subset", "valid"]
    for command, arguments in (("eval-lm", ()), ("evaluate", ("--out", tmp_path / "out"))):
        assert message in start(command, *flags, *arguments).wait().error
    assert not (tmp_path / "out").exists()
