"""fairseq's cross_entropy against chunked_cross_entropy: output projection and loss, forward and backward.

S = 2048 tokens, the paper's dictionary and base model: V = 50,264, D = 512; fp32, one thread.
"""

import os
import time
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models import FairseqDecoder, FairseqLanguageModel
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.timing import spread
from fairseq_alma.loss import ChunkedCrossEntropyConfig, ChunkedCrossEntropyCriterion

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's lines about a GPU that is not there
SEQUENCES, LENGTH, UNITS, DIM = 4, 512, 50_264, 512


class Head(FairseqDecoder):
    """A decoder of which only the output projection is left; its features (B, T, D) are a parameter."""

    def __init__(self):
        super().__init__(SimpleNamespace(pad=lambda: 1))
        self.features = nn.Parameter(torch.randn(SEQUENCES, LENGTH, DIM))
        self.output_projection = nn.Linear(DIM, UNITS, bias=False)

    def forward(self, tokens: Tensor, features_only: bool = False, **kwargs):
        """As fairseq's Transformer decoder."""
        return (self.features if features_only else self.output_projection(self.features)), {}


def step(criterion, model, sample) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad()
    started = time.perf_counter()
    criterion(model, sample)[0].backward()
    return time.perf_counter() - started


def peak_bytes(criterion, model, sample) -> int:
    """The most that one pass has allocated at a time, as torch's allocator reports it."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(criterion, model, sample)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += change
        peak = max(peak, now)
    return peak


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row; the peaks are measured in the warm-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = FairseqLanguageModel(Head())
    tokens = torch.randint(4, UNITS, (SEQUENCES, LENGTH))
    sample = {"net_input": {"src_tokens": tokens}, "target": tokens, "ntokens": tokens.numel()}
    task = SimpleNamespace(target_dictionary=model.decoder.dictionary)
    chunk = ChunkedCrossEntropyConfig().loss_chunk_tokens
    ours = ChunkedCrossEntropyCriterion(task, False, chunk)
    theirs = CrossEntropyCriterion(task, False)
    peaks, gradients = [], []
    for criterion in (theirs, ours):
        peaks.append(peak_bytes(criterion, model, sample))
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    del gradients
    ratios = [
        step(theirs, model, sample) / step(ours, model, sample)
        for _ in tqdm(range(max(3, repeats // 2)), disable=None, unit="pair")
    ]
    torch.set_num_threads(threads)
    return [
        {
            "tokens": tokens.numel(),
            "V": UNITS,
            "D": DIM,
            "chunk": chunk,
            "cross_entropy / chunked": spread(ratios),
            "peak MB, cross_entropy": round(peaks[0] / 1e6),
            "peak MB, chunked": round(peaks[1] / 1e6),
        }
    ]
