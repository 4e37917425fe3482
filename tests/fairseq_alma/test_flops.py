"""FLOPs and parameters of fairseq's own language models,
not of Switch Transformers (test_switch_lm.py)."""

import pytest
import torch
from fairseq import tasks
from torch.utils.flop_counter import FlopCounterMode

from alma.flops import Shape, Weights
from fairseq_alma.stage_record import _shape
from slurm.engine.machine import Machine
from slurm.lm.estimate import estimate, vocabulary_size
from slurm.lm.plan import make_plan
from slurm.lm.request import read_requests, resolved
from tests.fairseq_alma.shared import config_of

NARROW = (
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 "
    "--decoder-attention-heads 2"
)


def counted(model, sample) -> int:
    """FLOPs of a forward pass. On a CPU the counter misses attention scores,
    which the formulas leave out."""
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**sample["net_input"])
    return counter.get_total_flops()


@pytest.fixture
def build_dense(stream):
    """`build_dense(*flags)`: a language model of fairseq-train's flags."""

    def run(*flags: str):
        cfg = config_of(stream, "--tokens-per-sample", "64", *flags)
        return cfg.model, tasks.setup_task(cfg.task).build_model(cfg.model)

    return run


@pytest.mark.parametrize(
    "flags",
    [
        "",  # embeddings of width 512, projected to 32 and back
        "--share-decoder-input-output-embed --decoder-learned-pos",
        "--decoder-input-dim 32 --decoder-output-dim 16 --decoder-normalize-before",
        "--arch transformer_lm_gpt",
    ],
)
def test_a_transformer_lm_of_any_widths(forked, build_dense, sample, stream, flags):
    words = ["--arch", "transformer_lm", *NARROW.split(), *flags.split()]
    args, model = build_dense(*words)
    shape = _shape(args, model.decoder)
    assert isinstance(shape, Shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == parameters
    assert shape.parameter_sizes == [parameter.numel() for parameter in model.parameters()]
    assert counted(model, sample) == shape.forward_flops(sample["ntokens"])
    words += ["--tokens-per-sample", "64"]
    (request,) = resolved(
        read_requests([str(stream), "--out", "R", "--learner", "sm", "--", *words])
    )
    estimated = estimate(make_plan(request, 1), vocabulary_size(str(stream)), Machine((), None))
    assert estimated.parameters == parameters


@pytest.mark.parametrize(
    ("flags", "not_counted"),
    [
        ("lstm_lm --decoder-embed-dim 8 --decoder-hidden-size 16 --decoder-out-embed-dim 24", 0),
        (
            "lstm_lm --decoder-embed-dim 8 --decoder-hidden-size 16 --decoder-out-embed-dim 8 "
            "--share-decoder-input-output-embed",
            0,
        ),
        # the counter does not know fairseq's convolution;
        # the formula leaves out the K x D of a dynamic one
        ("fconv_lm --decoder-layers [(16,3)]*2 --decoder-embed-dim 8", 2 * 3 * 16 * 32),
        (f"lightconv_lm --decoder-kernel-size-list [3,3] {NARROW}", -2 * 3 * 32),
    ],
)
def test_the_flops_of_other_models(build_dense, sample, flags, not_counted):
    args, model = build_dense("--arch", *flags.split())
    shape = _shape(args, model.decoder)
    tokens = sample["ntokens"]
    assert isinstance(shape, Weights)
    assert shape.forward_flops(tokens) == counted(model, sample) + 2 * tokens * not_counted
    assert shape.training_flops(tokens) == 3 * shape.forward_flops(tokens)
