"""TF32 of fp32 trainings: on which GPUs, and what a restart keeps. The capability is faked."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from alma.errors import UserError
from alma.flops import Weights
from fairseq_alma import stage_record
from fairseq_alma.training import tf32


@pytest.fixture(autouse=True)
def _restored():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def trainer_on(device="cuda", no_tf32=False, fp16=False):
    task = SimpleNamespace(args=SimpleNamespace(no_tf32=no_tf32), tf32=None)
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
        ("cuda", (7, 5), {}, None),
        ("cpu", (9, 0), {}, None),
        ("cuda", (9, 0), {"no_tf32": True}, False),
        ("cuda", (9, 0), {"fp16": True}, None),
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
    assert ("products of fp32: TF32" in caplog.text) is bool(expected)


@pytest.mark.parametrize("kind", ["restart", "next stage"])
@pytest.mark.parametrize(
    ("state", "expected"),
    [({}, False), ({"tf32": False}, False), ({"tf32": True}, True), ({"tf32": None}, True)],
)
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "recorded", "kept"),
    [
        ("restart", True, True),
        ("restart", None, None),
        ("next stage", True, None),
        ("next stage", None, None),
        ("next stage", False, False),
    ],
)
def test_a_device_without_it_claims_nothing_of_its_own(
    monkeypatch, tmp_path, caplog, device, kind, recorded, kept
):
    """A restart keeps what its training recorded, and says that it computes in full."""
    caplog.set_level("INFO")
    path = save(tmp_path / "checkpoint_last.pt", {"tf32": recorded})
    cfg = checkpoints(tmp_path)
    if kind == "next stage":
        cfg = checkpoints(tmp_path / "next", path)
    assert prepared(monkeypatch, cfg, trainer_on(device), (7, 5)) is kept
    said = "in full: no TF32 here; the training began with it"
    assert caplog.text.count(said) == (1 if kept else 0)


@pytest.mark.parametrize(
    ("recorded", "claimed"), [({}, None), ({"tf32": None}, None), ({"tf32": True}, True)]
)
def test_records_of_a_stage_say_that_it_was_used(monkeypatch, recorded, claimed):
    counts = dict.fromkeys(stage_record._COUNTS, 1) | recorded
    state = {"extra_state": {"AlmaLMTask": counts}, "optimizer_history": [{"num_updates": 3}]}
    monkeypatch.setattr(stage_record, "memory_map_last", lambda path: state)
    record = stage_record.training_record("checkpoint_last.pt", Weights(8, 4))
    assert record.get("tf32") is claimed


def test_evaluations_on_a_gpu_compute_in_full_also_convolutions(monkeypatch):
    """torch allows TF32 in convolutions by default."""
    tf32.allow(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def precision(*_):
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    monkeypatch.setattr(stage_record, "evaluate", precision)
    model = Mock()
    cfg = Mock(common=Mock(cpu=False))
    loaded = stage_record.Loaded(cfg, Mock(), model, [], [], 0)
    assert stage_record._evaluate("test", loaded, None) == ("highest", False)
    model.cuda.assert_called_once()


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
