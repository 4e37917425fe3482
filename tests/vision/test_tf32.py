"""TF32 of image runs: on which GPUs, and what a restart keeps. The capability is faked."""

import pytest
import torch

from alma import tf32
from vision import MegaBatchStream, run


@pytest.fixture
def allowed(monkeypatch):
    """What a run asks of torch, on a CPU that says it has TF32."""
    asked: list[bool] = []
    monkeypatch.setattr(tf32, "is_supported", lambda device: True)
    monkeypatch.setattr(tf32, "allow", asked.append)
    return asked


def start(out, epochs=1, **settings):
    stream = MegaBatchStream("digits", 2)
    return run(stream, "sm", out, hidden=2, epochs=epochs, device="cpu", **settings)


def test_a_run_says_that_it_uses_it(allowed, tmp_path, capsys):
    info = start(tmp_path / "run").info
    assert (allowed, info["tf32"]) == ([True], True)
    assert "no_tf32" not in info["config"]
    assert (
        f"{tmp_path}/run: products of fp32 in TF32 (--no-tf32: in full)" in capsys.readouterr().out
    )


def test_the_flag_leaves_it(allowed, tmp_path):
    info = start(tmp_path, no_tf32=True).info
    assert allowed == [False]
    assert "tf32" not in info
    assert info["config"]["no_tf32"] is True


def test_a_cpu_claims_nothing(tmp_path, capsys):
    assert "tf32" not in start(tmp_path).info
    assert "TF32" not in capsys.readouterr().out


def test_mixed_precision_has_no_products_of_fp32_to_round(allowed, tmp_path):
    assert "tf32" not in start(tmp_path, amp="bf16").info
    assert allowed == [False]


def test_a_run_may_change_its_machine(tmp_path, capsys, monkeypatch):
    """It began on a CPU, which says nothing about a GPU; then it comes to one without TF32."""
    start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tf32, "is_supported", lambda device: True)
        patch.setattr(tf32, "allow", lambda allowed: None)
        assert start(tmp_path).info["tf32"] is True
    capsys.readouterr()
    assert start(tmp_path).info["tf32"] is True
    assert "no TF32 here; the run had it" in capsys.readouterr().out


def test_only_ampere_and_later_have_it(monkeypatch):
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tf32.is_supported(torch.device("cuda")) is expected
    assert not tf32.is_supported(torch.device("cpu"))
