"""Adapters (LoRA): a stage's checkpoint, kills, evaluation, averages, and their merge."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from alma.errors import UserError
from tests.transformers_alma import tiny

LORA = ("--lora", "4")


class Engine(tiny.TinyEngine):
    """The engine's tasks in forks."""

    def train(self, out: Path, flags=LORA, hook=lambda: None, **fields) -> int:
        from transformers_alma import training

        task = tiny.task(out, self.parts, **fields)

        def work() -> None:
            hook()
            training.train(task, self.arguments(*flags))

        done = tiny.start(work, out / "train.log").wait()
        assert done.code <= 0, done.output
        return done.code

    def loss(self, out: Path, members: tuple[str, ...], flags=LORA) -> float:
        from transformers_alma import evaluation

        fields = {"action": "evaluate", "evaluate": (self.parts[1],), "members": members}
        task = tiny.task(out, self.parts, **fields)
        evaluation.evaluate(task, self.arguments(*flags))
        return json.loads((out / "trained.json").read_text())["losses"]["test"][0]


@pytest.fixture(scope="module")
def engine(tiny_engine, tmp_path_factory):
    pytest.importorskip("peft")
    return Engine(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def trained(engine, tmp_path_factory) -> Path:
    """The checkpoint of a stage that nothing disturbed, with an average."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert engine.train(out, (*LORA, "--average", "poly:8")) == 0
    return out / "weights"


def test_a_checkpoint_has_adapters_alone(engine, trained):
    assert (trained / "adapter_model.safetensors").stat().st_size < 30_000
    assert not (trained / "model.safetensors").exists()
    assert tiny.checksums(trained).keys() == {
        "adapter_model.safetensors",
        "raw/adapter_model.safetensors",
    }
    assert len(set(tiny.checksums(trained).values())) == 2  # the average differs


def test_a_killed_training_ends_with_the_same_adapters(engine, trained, tmp_path):
    out = tmp_path / "killed"
    flags = (*LORA, "--average", "poly:8")
    assert engine.train(out, flags, partial(tiny.kill_before_update, 4)) == -signal.SIGKILL
    assert (out / "checkpoint-2/adapter_model.safetensors").exists()
    assert engine.train(out, flags) == 0
    assert tiny.checksums(out / "weights") == tiny.checksums(trained)


def test_the_first_update_starts_from_the_base(engine):
    from transformers_alma import models

    ids = torch.arange(4, 20)[None]
    base = models.load(None, engine.arguments().engine, 1, "float32")
    adapted = models.load_to_train(None, engine.arguments(*LORA).engine, 1)
    assert torch.equal(adapted(input_ids=ids).logits, base(input_ids=ids).logits)


def test_row_0_is_the_base_and_later_rows_have_the_adapters(engine, trained, tmp_path):
    before = engine.loss(tmp_path / "lora", ())
    assert before == engine.loss(tmp_path / "base", (), flags=())
    after = engine.loss(tmp_path / "trained", (str(trained),))
    assert after != before


def test_the_next_stage_goes_on_from_the_adapters(engine, trained, tmp_path):
    from transformers_alma import models

    model = models.load_to_train(str(trained), engine.arguments(*LORA).engine, 1)
    raw = models.load_to_train(str(trained / "raw"), engine.arguments(*LORA).engine, 1)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    for name, weight in raw.named_parameters():  # not from the average
        assert torch.equal(weight, dict(model.named_parameters())[name])
    out = tmp_path / "second"
    assert engine.train(out, checkpoint=str(trained), stage=1, t=2) == 0
    assert tiny.checksums(out / "weights") != tiny.checksums(trained)


def test_merged_weights_compute_what_base_and_adapters_do(engine, trained, tmp_path):
    from transformers import AutoModelForCausalLM

    from transformers_alma import models
    from transformers_alma.adapters import merged

    merged(trained, engine.base, tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = models.load(str(trained), engine.arguments(*LORA).engine, 1, "float32").eval()
    base = AutoModelForCausalLM.from_pretrained(engine.base)
    ids = torch.arange(4, 20)[None]
    logits = adapted(input_ids=ids).logits
    torch.testing.assert_close(whole(input_ids=ids).logits, logits, rtol=1e-5, atol=1e-5)
    assert (base(input_ids=ids).logits - logits).abs().max() > 1e-3
    assert not (tmp_path / "merged/adapter_config.json").exists()


def test_the_plan_tells_the_trained_parameters(engine):
    from transformers_alma import models

    whole, of_adapters = models.parameters_of(
        models.config_of(engine.base), engine.arguments(*LORA).engine
    )
    model = models.load_to_train(None, engine.arguments(*LORA).engine, 1)
    counts = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    assert of_adapters == sum(counts)
    assert of_adapters < whole


def test_without_peft_a_line_says_how_to_install_it(engine, monkeypatch):
    from transformers_alma import models

    find_spec = models.require_package.__globals__["importlib"].util.find_spec
    without = lambda name: None if name == "peft" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", without)
    with pytest.raises(UserError, match=r"--lora needs peft; pip install 'alma-macroscale\[lora\]"):
        models.parameters_of(models.config_of(engine.base), engine.arguments(*LORA).engine)


def test_layers_that_the_model_lacks_are_named(engine):
    from transformers_alma import models

    arguments = engine.arguments(*LORA, "--lora_target_modules", "c_attn")
    with pytest.raises(UserError, match="--lora_target_modules c_attn: .*not found"):
        models.parameters_of(models.config_of(engine.base), arguments.engine)
