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


def test_a_run_that_began_in_full_stays_so(monkeypatch, tmp_path, capsys, request):
    start(tmp_path)
    asked = request.getfixturevalue("allowed")
    assert "tf32" not in start(tmp_path).info
    assert asked == [False]
    assert "in full, as the run began" in capsys.readouterr().out


def test_only_ampere_and_later_have_it(monkeypatch):
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tf32.is_supported(torch.device("cuda")) is expected
    assert not tf32.is_supported(torch.device("cpu"))
