"""TF32 of fp32 trainings: on which GPUs, and what a restart keeps. The capability is faked."""

from types import SimpleNamespace

import pytest
import torch

from alma.errors import UserError
from fairseq_alma.training import tf32


@pytest.fixture(autouse=True)
def _restored():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def trainer_on(device="cuda", no_tf32=False, fp16=False):
    task = SimpleNamespace(args=SimpleNamespace(no_tf32=no_tf32), tf32=False)
    common = SimpleNamespace(fp16=fp16, bf16=False)
    cfg = SimpleNamespace(common=common)
    return SimpleNamespace(task=task, cfg=cfg, device=torch.device(device))


def checkpoints(folder, finetune=None):
    return SimpleNamespace(
        restore_file="checkpoint_last.pt", save_dir=str(folder), finetune_from_model=finetune
    )


def save(path, state):
    torch.save({"extra_state": {"AlmaLMTask": state}, "model": {}, "cfg": {}}, path)
    return str(path)


def prepared(monkeypatch, cfg, trainer, capability=(8, 0)):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        tf32, "memory_map", lambda path: torch.load(path, weights_only=True, mmap=True)
    )
    tf32.prepare(cfg, trainer)
    return trainer.task.tf32


@pytest.mark.parametrize(
    ("device", "capability", "options", "expected"),
    [
        ("cuda", (8, 0), {}, True),
        ("cuda", (9, 0), {}, True),
        ("cuda", (7, 5), {}, False),
        ("cpu", (9, 0), {}, False),
        ("cuda", (9, 0), {"no_tf32": True}, False),
        ("cuda", (9, 0), {"fp16": True}, False),
    ],
)
def test_fp32_trainings_use_it_from_ampere_on(
    monkeypatch, tmp_path, caplog, device, capability, options, expected
):
    caplog.set_level("INFO")
    torch.set_float32_matmul_precision("highest")
    trainer = trainer_on(device, **options)
    assert prepared(monkeypatch, checkpoints(tmp_path), trainer, capability) is expected
    assert torch.get_float32_matmul_precision() == ("high" if expected else "highest")
    assert ("products of fp32: TF32" in caplog.text) is expected


@pytest.mark.parametrize("kind", ["restart", "next stage"])
@pytest.mark.parametrize(("state", "expected"), [({}, False), ({"tf32": True}, True)])
def test_a_training_keeps_the_precision_with_which_it_began(
    monkeypatch, tmp_path, kind, state, expected
):
    path = save(tmp_path / "checkpoint_last.pt", state)
    cfg = checkpoints(tmp_path)
    if kind == "next stage":
        cfg = checkpoints(tmp_path / "next", path)
    assert prepared(monkeypatch, cfg, trainer_on()) is expected


def test_a_restart_refuses_to_leave_tf32(monkeypatch, tmp_path):
    save(tmp_path / "checkpoint_last.pt", {"tf32": True})
    with pytest.raises(UserError, match="was trained with TF32: leave it out"):
        prepared(monkeypatch, checkpoints(tmp_path), trainer_on(no_tf32=True))


@pytest.mark.gpu
def test_products_on_a_gpu_are_rounded_only_if_allowed():
    device = torch.device("cuda")
    if not tf32.is_supported(device):
        pytest.skip("no TF32 before Ampere")
    x = torch.randn(512, 512, device=device)
    exact = x.double() @ x.double()
    errors = []
    for allowed in (False, True):
        tf32.allow(allowed)
        errors.append(float((x @ x - exact).abs().max()))
    assert errors[1] > 10 * errors[0]
