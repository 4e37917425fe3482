"""The criterion chunked_cross_entropy: values and gradients of fairseq's,
without a tensor of all logits."""

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from torch.utils.flop_counter import FlopCounterMode

from alma.errors import UserError
from fairseq_alma.ensemble import ensemble_of
from fairseq_alma.training import loss as loss_module
from fairseq_alma.training.loss import ChunkedCrossEntropyCriterion, chunked_nll
from tests.fairseq_alma.shared import Largest, Plain

PAD = 1


@pytest.fixture
def padded(sample) -> dict:
    """`sample` with padding in half of the second sequence and at the end of the last."""
    for row, length in ((1, 32), (3, 50)):
        sample["net_input"]["src_tokens"][row, length:] = PAD
        sample["target"][row, length:] = PAD
    return {**sample, "ntokens": int((sample["target"] != PAD).sum()), "padded": True}


def inputs(tokens=50, dims=(16,), vocabulary=301, spread=1.0, dtype=torch.float32):
    """Features (S, D), weights (V, D) and targets (S,), some of them padding."""
    torch.manual_seed(0)
    features = torch.randn(tokens, sum(dims)).to(dtype).requires_grad_()
    weights = [(spread * torch.randn(vocabulary, dim)).to(dtype).requires_grad_() for dim in dims]
    target = torch.randint(2, vocabulary, (tokens,))
    target[::7] = PAD
    return features, weights, target


def reference(features, weights, target, scale=1.0):
    """Loss and gradients in double precision."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (features, *weights)]
    logits = F.linear(leaves[0], torch.cat(leaves[1:], dim=1))
    loss = F.cross_entropy(logits, target, ignore_index=PAD, reduction="sum")
    (loss * scale).backward()
    return loss, [leaf.grad for leaf in leaves]


@pytest.fixture(params=["cpu", "gpu"])
def rows(request, monkeypatch):
    """Chunks of the tokens without padding, as on a CPU; or of all, as on a GPU."""
    if request.param == "gpu":
        monkeypatch.setattr(
            loss_module,
            "_chunks",
            lambda target, pad, chunk: (torch.arange(len(target)).split(chunk), True),
        )


@pytest.mark.usefixtures("rows")
def test_ids_that_are_unused_get_no_probability_and_no_gradient():
    features, weights, target = inputs()
    unused = [0, 1, 300]
    target[(target[:, None] == torch.tensor(unused)).any(1) & (target != PAD)] = 5
    classes = [i for i in range(301) if i not in unused]
    place = torch.tensor([classes.index(i) if i in classes else -100 for i in range(301)])
    expected = F.cross_entropy(features @ weights[0][classes].t(), place[target], reduction="sum")
    expected.backward()
    gradients = [features.grad.clone(), weights[0].grad.clone()]
    features.grad = weights[0].grad = None
    loss, _ = chunked_nll(features, weights, target, PAD, 16, unused)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([features.grad, weights[0].grad], gradients)
    assert not weights[0].grad[unused].any()


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("chunk", [1, 16, 42, 1000])  # 42 tokens are not padding
@pytest.mark.parametrize("dims", [(16,), (8, 5)])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk, dims):
    features, weights, target = inputs(dims=dims)
    loss, nll = chunked_nll(features, weights, target, PAD, chunk)
    (3 * loss).backward()
    expected, grads = reference(features, weights, target, scale=3)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert nll.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    assert not nll.requires_grad
    assert nll[target == PAD].eq(0).all()
    for tensor, grad in zip((features, *weights), grads, strict=True):
        torch.testing.assert_close(tensor.grad, grad.float(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(chunked_nll(features, weights, target, PAD, chunk), (loss, nll))


@pytest.mark.usefixtures("rows")
def test_a_batch_of_padding_has_no_loss_and_zero_gradients():
    features, weights, target = inputs()
    loss, _ = chunked_nll(features, weights, torch.full_like(target, PAD), PAD, 16)
    loss.backward()
    assert loss.item() == 0
    assert all(tensor.grad.eq(0).all() for tensor in (features, *weights))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("dtype", "error", "error_of_small"), [(torch.float16, 2e-3, 0.03), (torch.bfloat16, 2e-2, 0.2)]
)
def test_half_precision_gradients_do_not_underflow(dtype, error, error_of_small):
    """With a loss scale, gradients near fp16's smallest number, 6e-8, are as accurate as others."""
    features, weights, target = inputs(tokens=8, vocabulary=2000, spread=2, dtype=dtype)
    scale = 2.0**11
    loss, _ = chunked_nll(features, weights, target, PAD, 3)
    (loss * scale).backward()
    expected, (by_features, by_weight) = reference(features, weights, target, scale)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=error)
    for actual, grad in ((features.grad, by_features), (weights[0].grad, by_weight)):
        assert actual.dtype == dtype
        assert (actual - grad).norm() < error * grad.norm()
    small = (by_weight.abs() < 1e-6 * scale) & (by_weight.abs() > 1e-8 * scale)
    assert small.sum() > 1000
    assert (weights[0].grad - by_weight)[small].norm() < error_of_small * by_weight[small].norm()


def test_sums_over_chunks_are_in_fp32():
    """A bf16 sum of equal terms stops growing after 256 of them."""
    features = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_nll(features, [weight], torch.full((512,), 2), PAD, 1)[0].backward()
    assert weight.grad.flatten().tolist() == [128, 128, -384, 128]


def test_autocast_computes_logits_in_its_dtype():
    features, weights, target = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_nll(features, weights, target, PAD, 16)
        logits = F.linear(features, weights[0])
    loss.backward()
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits.float(), target, ignore_index=PAD, reduction="sum").item(), rel=1e-6
    )
    expected, grads = reference(features, weights, target)
    assert loss.item() != pytest.approx(expected.item(), rel=1e-6)
    for tensor, grad in zip((features, *weights), grads, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - grad).norm() < 2e-2 * grad.norm()


def test_padding_costs_nothing():
    losses = []
    for padding in (0, 24):
        features, weights, target = inputs(tokens=48)
        target[:] = 5
        target[48 - padding :] = PAD
        with FlopCounterMode(display=False) as counter:
            chunked_nll(features, weights, target, PAD, 16)[0].backward()
        losses.append(counter.get_total_flops())
    assert losses[0] == 2 * losses[1] > 0


DENSE = tuple("--arch transformer_lm --decoder-ffn-embed-dim 64 --decoder-input-dim 24".split())
MODELS = {
    "switch": ("--moe-gate-loss-wt", "0.5"),
    "checkpointed": ("--checkpoint-activations",),
    "umix": ("--members", "2", "--moe-gate-loss-wt", "0.5"),
    "dense": (*DENSE, "--decoder-output-dim", "32"),
    "tied": (*DENSE, "--decoder-output-dim", "24", "--share-decoder-input-output-embed"),
}


def updates(task, model, criterion, sample) -> tuple[list, dict[str, torch.Tensor]]:
    """Logs of 5 updates of two accumulated batches each, and the gradients of the last."""
    # SGD: Adam would scale rounding errors of small gradients up.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    logged = []
    for update in range(5):
        optimizer.zero_grad()
        for half in (slice(0, 2), slice(2, 4)):
            target = sample["target"][half]
            batch = {
                "net_input": {"src_tokens": sample["net_input"]["src_tokens"][half]},
                "target": target,
                "ntokens": int((target != PAD).sum()),
            }
            loss, size, log = task.train_step(batch, model, criterion, Plain(), update)
            logged.append(
                (loss.item(), size, {name: torch.as_tensor(log[name]).tolist() for name in log})
            )
        if update < 4:
            optimizer.step()
    return logged, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_fairseqs_criterion(build, padded, name, sentence_avg):
    task, model = build(*MODELS[name])
    expected, expected_grads = updates(
        task, model, CrossEntropyCriterion(task, sentence_avg), padded
    )
    task, model = build(*MODELS[name])
    criterion = ChunkedCrossEntropyCriterion(task, sentence_avg, 24)
    logged, grads = updates(task, model, criterion, padded)
    for (loss, size, log), (expected_loss, expected_size, expected_log) in zip(
        logged, expected, strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert size == expected_size
        assert log.keys() == expected_log.keys()
        for key in log:
            assert log[key] == pytest.approx(expected_log[key], rel=1e-5, abs=1e-5), key
    assert grads.keys() == expected_grads.keys()
    largest = max(grad.abs().max() for grad in expected_grads.values()).item()
    for key, grad in expected_grads.items():
        assert (grads[key] - grad).abs().max() < 1e-5 * largest, key


@pytest.mark.parametrize("name", ["switch", "umix"])
def test_validation_has_the_same_loss_per_expert(build, padded, name):
    task, model = build(*MODELS[name])
    criteria = CrossEntropyCriterion(task, False), ChunkedCrossEntropyCriterion(task, False, 24)
    results = [task.valid_step(padded, model, criterion.eval()) for criterion in criteria]
    (expected, size, expected_log), (loss, our_size, log) = results
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert size == our_size
    assert log.keys() == expected_log.keys()
    names = [key for key in log if key.endswith("_nll")]
    assert names
    for key in names:
        torch.testing.assert_close(log[key], expected_log[key], atol=1e-3, rtol=1e-5)
        assert log[key].sum().item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["switch", "umix", "dense"])
def test_no_tensor_of_all_logits_is_ever_made(build, sample, name):
    task, model = build(*MODELS[name])
    weight = model.get_parameter(
        next(n for n, _ in model.named_parameters() if "embed_tokens" in n)
    )
    all_logits = sample["target"].numel() * weight.size(0)
    chunk = 48
    limit = max(chunk * weight.size(0), weight.numel(), all_logits // 4)
    for criterion in (
        CrossEntropyCriterion(task, False),
        ChunkedCrossEntropyCriterion(task, False, chunk),
    ):
        with Largest() as largest:
            task.train_step(sample, model, criterion, Plain(), 0)
            task.valid_step(sample, model, criterion)
        chunked = isinstance(criterion, ChunkedCrossEntropyCriterion)
        assert (largest.elements <= limit) == chunked
        assert (largest.elements < all_logits) == chunked


def test_unsupported_decoders_and_chunk_sizes_are_refused(build, sample):
    task, model = build()
    with pytest.raises(UserError, match="--loss-chunk-tokens"):
        ChunkedCrossEntropyCriterion(task, False, 0)
    criterion = ChunkedCrossEntropyCriterion(task, False, 24)
    with pytest.raises(UserError, match="EnsembleDecoder"):
        criterion(ensemble_of([model, model]), sample)
