"""The units of a loss: a token, a word and a byte."""

import math
from types import SimpleNamespace

import pytest

from fairseq_alma import stage_record


def test_a_loss_is_given_per_token_word_and_byte(monkeypatch):
    """12 tokens of 8 words and 64 bytes; each token costs 4 bits."""
    result = SimpleNamespace(nll=12 * 4 * math.log(2), tokens=12, expert_tokens={}, expert_loss={})
    monkeypatch.setattr(stage_record, "_evaluate", lambda *_: result)
    monkeypatch.setattr(stage_record, "Tokens", lambda *_: range(12))
    part = SimpleNamespace(words=8, bytes=64)
    stream = SimpleNamespace(valid=None, test=part)
    task = SimpleNamespace(sources={"test": ()}, stream=stream)
    record = stage_record.describe("test", SimpleNamespace(task=task))
    assert record["perplexity"] == pytest.approx(16)
    assert record["perplexity_per_word"] == pytest.approx(2**6)
    assert record["bits_per_byte"] == pytest.approx(0.75)
