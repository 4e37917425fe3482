"""The Switch Transformer: sizes, causality, incremental decoding, checkpointing, FLOPs."""

import copy
import functools
import gc
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.modules import MultiheadAttention
from torch.utils.flop_counter import FlopCounterMode

from alma.flops import Shape
from fairseq_alma import check
from fairseq_alma.moe import layer as switch_layer
from fairseq_alma.moe.dispatchers import LoopDispatcher, PaddedDispatcher
from fairseq_alma.moe.layer import routings_of, switch_layers
from fairseq_alma.switch_lm import CausalSelfAttention, SwitchLanguageModel, compile_training
from slurm.lm.estimate import Machine, estimate, vocabulary_size
from slurm.lm.plan import make_plan
from slurm.lm.request import read_requests, resolved
from tests.fairseq_alma.shared import Plain, config_of

# Millions of parameters counted by hand: shared, per expert, then all with E = 4, 8, 12 experts.
SIZES = {
    "switch_gmoe_base": (38.6, 6.30, 63.8, 89.0, 114.2),
    "switch_gmoe_large": (95.7, 28.34, 209.1, 322.4, 435.8),
}


def paper_dictionary() -> Dictionary:
    """The paper's 50k BPE tokens: fairseq's dictionary of GPT-2, 50,264 with specials and
    padding."""
    dictionary = Dictionary()
    for token in range(50_260):
        dictionary.add_symbol(f"token{token}")
    return dictionary


def arguments(arch: str, stream, *flags: str):
    return config_of(stream, "--task", "alma_lm", "--arch", arch, *flags).model


# The paper's sizes (Table 2), in millions. Those of its base model exceed the architecture in
# section 5 by 1.2M, 2.0M and 1.8M; those of its large model equal the count, rounded.
PAPER = {
    "switch_gmoe_base": ((65, 91, 116), (0.5, 2.5)),
    "switch_gmoe_large": ((210, 323, 436), (0.0, 1.0)),
}


@pytest.mark.parametrize("arch", SIZES)
def test_parameter_counts_are_those_of_the_papers_architecture(arch, stream):
    dictionary = paper_dictionary()
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    shared, per_expert, *totals = SIZES[arch]
    for experts, total in zip((4, 8, 12), totals, strict=True):
        args = arguments(arch, stream, "--moe-expert-count", str(experts))
        with torch.device("meta"):
            model = SwitchLanguageModel.build_model(args, task)
        count = sum(p.numel() for p in model.parameters())
        shape = Shape.of(args, len(dictionary))
        assert count == shape.parameters
        assert shape.parameter_sizes == [p.numel() for p in model.parameters()]
        assert round(count / 1e6, 1) == total
        assert round(shape.shared / 1e6, 1) == shared
        assert round(shape.per_expert / 1e6, 2) == pytest.approx(per_expert, abs=0.011)
    printed, (least, most) = PAPER[arch]
    assert all(least <= paper - total <= most for paper, total in zip(printed, totals, strict=True))


def test_switch_gmoe_is_the_base_model(stream):
    default = arguments("switch_gmoe", stream)
    base = arguments("switch_gmoe_base", stream)
    assert {**default, "_name": ""} == {**base, "_name": ""}


@pytest.mark.parametrize(("learner", "flags"), [("sm", ()), ("umix", ("--members", "2"))])
def test_the_launchers_estimate_has_the_parameters_of_the_real_model(
    forked, learner, flags, build, stream, tiny
):
    changed = ["--moe-expert-count", "3", "--moe-freq", "1", "--decoder-ffn-embed-dim", "48"]
    words = [str(stream), "--out", "R", "--learner", learner, *flags, "--"]
    words += tiny[2:-2]  # --task and --seed are the launcher's
    (request,) = resolved(read_requests([*words, *changed]))
    estimated = estimate(make_plan(request, 1), vocabulary_size(str(stream)), Machine((), None))
    _, model = build(*changed, *flags)
    assert estimated.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("arch", "gflops"), [("switch_gmoe_base", 45.7), ("switch_gmoe_large", 126.5)]
)
def test_inference_flops_are_those_of_the_design(arch, gflops, stream):
    shape = Shape.of(arguments(arch, stream), 50_264)
    assert shape.forward_flops(512) / 1e9 == pytest.approx(gflops, rel=2e-3)


def test_flops_equal_the_counter_where_it_is_right(build, sample):
    _, model = build("--moe-expert-count", "3")
    model.eval()
    shape = Shape.of(model.decoder.args, len(model.decoder.dictionary))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**sample["net_input"])
    # On a CPU the counter sees every GEMM except those of scaled_dot_product_attention.
    assert counter.get_total_flops() == shape.forward_flops(sample["ntokens"])


def test_attention_scores_are_two_products_over_all_positions_in_each_layer():
    shape = Shape(layers=3, dim=8, hidden=32, vocabulary=20, positions=16, experts=0, moe_freq=1)
    queries, keys, values = torch.randn(3, 16, 8)
    with FlopCounterMode(display=False) as counter:
        queries @ keys.T @ values
    scores = shape.forward_flops(16, attention_over=16) - shape.forward_flops(16)
    assert scores == 3 * counter.get_total_flops()


def test_no_later_token_or_sequence_changes_earlier_logits_in_training_with_drops(build, sample):
    _, model = build("--moe-expert-count", "4", "--dropout", "0", "--moe-capacity-factor", "0.5")
    model.train()
    tokens = sample["net_input"]["src_tokens"][:1]
    with torch.no_grad():
        before, extra = model(tokens)
        routings = extra["routings"].values()
        assert all((routing.counts_E > routing.kept_E).any() for routing in routings), (
            "nothing dropped"
        )
        for position in (1, 17, 40, 63):
            changed = tokens.clone()
            changed[0, position] = 5 if tokens[0, position] != 5 else 6
            after = model(changed)[0]
            torch.testing.assert_close(after[:, :position], before[:, :position], atol=1e-6, rtol=0)
            assert not torch.allclose(after[:, position], before[:, position])
        tokens = sample["net_input"]["src_tokens"]
        changed = torch.cat([tokens[:2], tokens[:2]])
        torch.testing.assert_close(model(changed)[0][:2], model(tokens)[0][:2], atol=1e-6, rtol=0)


def balance_loss(output: tuple) -> torch.Tensor:
    return sum(routing.balance_loss for routing in routings_of(output).values())


@pytest.mark.parametrize(
    "flags", [(), ("--checkpoint-activations",), ("--members", "2")], ids=" ".join
)
def test_a_trained_model_can_be_copied_and_its_experts_pickled(build, sample, flags):
    _, model = build("--moe-expert-count", "4", *flags)
    model.train()
    output = model(**sample["net_input"])
    (output[0].float().square().mean() + balance_loss(output)).backward()
    twin = copy.deepcopy(model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    with torch.no_grad():
        outputs = [
            language_model.eval()(**sample["net_input"])[0] for language_model in (model, twin)
        ]
    assert torch.equal(*outputs)
    weights = next(iter(switch_layers(model).values())).w1
    weights.grad = None
    assert len(pickle.dumps(weights)) < 1.1 * weights.nbytes + 1000


@pytest.mark.parametrize(
    "flags", [(), ("--checkpoint-activations",), ("--members", "2")], ids=" ".join
)
def test_no_graph_outlives_an_update(build, sample, flags):
    """Its tensors would take memory until the next forward pass."""
    task, model = build("--moe-expert-count", "4", *flags)

    def with_graph() -> int:
        gc.collect()
        return sum(
            type(tensor) is torch.Tensor and tensor.grad_fn is not None
            for tensor in gc.get_objects()
        )

    before = with_graph()
    output = model(**sample["net_input"])
    assert with_graph() > before
    del output
    gradients(task, model, sample)
    assert with_graph() == before


def test_evaluation_does_not_depend_on_the_batch(build, sample):
    _, model = build()
    model.eval()
    tokens = sample["net_input"]["src_tokens"]
    with torch.no_grad():
        together = model(tokens)[0]
        alone = torch.cat([model(tokens[i : i + 1])[0] for i in range(4)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


class FairseqAttention(MultiheadAttention):
    """fairseq's, called as CausalSelfAttention is."""

    def forward(self, x, mask, padding, _):
        x = x.transpose(0, 1)
        attended, _ = super().forward(
            x, x, x, key_padding_mask=padding, need_weights=False, attn_mask=mask
        )
        return attended.transpose(0, 1)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_equals_fairseqs_and_is_causal_without_a_mask_tensor(
    build, sample, padded, monkeypatch
):
    causal = []
    attention = F.scaled_dot_product_attention

    def spied(*args, **kwargs):
        causal.append(kwargs.get("is_causal", False))
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    _, model = build("--dropout", "0", "--attention-dropout", "0")
    tokens = sample["net_input"]["src_tokens"].clone()
    if padded:
        tokens[0, -5:] = 1
    results = []
    for kind in (CausalSelfAttention, FairseqAttention):
        for layer in model.decoder.layers:
            layer.self_attn.__class__ = kind
        logits, _ = model(tokens)
        real = logits[tokens != 1]
        results.append((real, torch.autograd.grad(real.square().mean(), list(model.parameters()))))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
    assert causal == [not padded] * 2 + [False] * 2


def test_compiled_blocks_compute_the_same(build, sample, monkeypatch):
    """With dynamo and AOT autograd; inductor would take a minute."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)

    def of_a_gpu(x_SD, routing, capacity):
        return PaddedDispatcher(routing, capacity) if capacity else LoopDispatcher(routing)

    monkeypatch.setattr(switch_layer, "fastest_dispatcher", of_a_gpu)
    graphs = torch._dynamo.utils.counters["stats"]
    results = []
    for compiling in (False, True):
        _, model = build("--dropout", "0", "--compile")  # which does nothing on a CPU
        if compiling:
            for layer in model.decoder.layers:
                compile_training(layer)
        for training in (True, False):
            before = graphs["unique_graphs"]
            model.train(training)
            output = model(**sample["net_input"])
            loss = output[0].logsumexp(-1).mean() + balance_loss(output)
            results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
            assert (graphs["unique_graphs"] > before) == (training and compiling)
    torch.testing.assert_close(results[0], results[2], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(results[1], results[3], atol=1e-6, rtol=1e-4)


def test_incremental_decoding_equals_the_full_pass(build, sample):
    _, model = build()
    model.eval()
    tokens = sample["net_input"]["src_tokens"][:, :12]
    state: dict = {}
    with torch.no_grad():
        full = model(tokens)[0]
        steps = [model(tokens[:, : i + 1], incremental_state=state)[0] for i in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-4, rtol=1e-4)


def gradients(task, model, sample, criterion="cross_entropy") -> dict[str, torch.Tensor]:
    from fairseq import criterions

    loss = {"cross_entropy": {}, "label_smoothed_cross_entropy": {"label_smoothing": 0.1}}[
        criterion
    ]
    built = criterions.build_criterion(
        SimpleNamespace(
            criterion=criterion,
            sentence_avg=False,
            report_accuracy=False,
            ignore_prefix_size=0,
            **loss,
        ),
        task,
    )
    model.zero_grad()
    torch.manual_seed(3)
    task.train_step(sample, model, built, Plain(), update_num=0)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("criterion", ["cross_entropy", "label_smoothed_cross_entropy"])
def test_the_balance_loss_acts_under_any_criterion_scaled_by_the_sample_size(
    build, sample, criterion
):
    """d loss / d router is linear in --moe-gate-loss-wt,
    with slope sample_size * d balance / d router."""
    sizes = {}
    for weight in ("0", "0.5", "1"):
        task, model = build("--moe-gate-loss-wt", weight, "--dropout", "0")
        sizes[weight] = gradients(task, model, sample, criterion)
    name = "decoder.layers.1.fc1.router.weight"
    step = sizes["0.5"][name] - sizes["0"][name]
    torch.testing.assert_close(sizes["1"][name] - sizes["0.5"][name], step, atol=1e-3, rtol=1e-3)
    model.zero_grad()
    balance_loss(model(**sample["net_input"])).backward()
    expected = dict(model.named_parameters())[name].grad * 0.5 * sample["ntokens"]
    torch.testing.assert_close(step, expected, atol=1e-3, rtol=1e-3)
    assert expected.abs().max() > 1e-2


def test_activation_checkpointing_keeps_all_gradients(build, sample):
    plain = gradients(*build("--dropout", "0.1", "--moe-gate-loss-wt", "1"), sample)
    flags = ("--dropout", "0.1", "--moe-gate-loss-wt", "1", "--checkpoint-activations")
    checkpointed = gradients(*build(*flags), sample)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--moe-expert-count", "0"), "must be 1 or more"),
        (("--moe-freq", "0"), "must be 1 or more"),
        (("--scale-fc",), "--scale-fc"),
        (("--scale-heads",), "--scale-heads"),
        (("--decoder-layerdrop", "0.1"), "--decoder-layerdrop"),
        (("--adaptive-softmax-cutoff", "500"), "--adaptive-softmax-cutoff"),
        (("--character-embeddings",), "--character-embeddings"),
    ],
)
def test_unsupported_options_are_refused_before_anything_is_made(flags, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        check.resolve(["STREAM", *flags])
    assert re.fullmatch(f"error: .*{words}.*\n", capsys.readouterr().err)
