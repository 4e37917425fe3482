"""The flags after `--` of the engine transformers, and what is refused before anything is made."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.transformers_alma.conftest import END, ROWS
from transformers_alma.arguments import FLAGS, EngineArguments, parse


def test_every_flag_of_training_arguments_has_its_place(transformers):
    """As transformers' next version may have others."""
    lists = yaml.safe_load(FLAGS.read_text())
    names = []
    for flags in lists.values():
        names += flags.split() if isinstance(flags, str) else flags
    assert len(names) == len(set(names))
    assert set(names) == {
        field.name for field in dataclasses.fields(transformers.TrainingArguments)
    }


def test_our_flags_are_not_those_of_training_arguments(transformers):
    """A flag of both would be read by one of them."""
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert not theirs & {field.name for field in dataclasses.fields(EngineArguments)}


def test_flags_reach_training_arguments():
    arguments = parse(
        "--lr_scheduler_type cosine --warmup-steps 3 --lora 4 --bf16 --use_cpu".split()
    )
    training = arguments.training_arguments(max_steps=7)
    assert (training.lr_scheduler_type, training.warmup_steps) == ("cosine", 3)
    assert (training.max_steps, training.bf16, training.save_total_limit) == (7, True, 1)
    assert training.train_sampling_strategy == "sequential"
    assert arguments.engine.lora == 4


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--learning-rat 1", "did you mean --learning-rate?"),
        ("--seed 3", "give --seed before the `--`"),
        ("--output_dir x", "give --out RUN before the `--`"),
        ("--output-dir x", "give --out RUN before the `--`"),
        ("--first_token 3", "leave it out, `alma train` sets it"),
        ("--save_total_limit 0", "a restart needs the last checkpoint; give 1"),
        ("--save_strategy epoch", "give --save_steps N"),
        ("--save_steps .5", "give a number of updates"),
        ("--block_size 1", "give 2 or more"),
        ("--block_size 65", "the model has 64 positions: give 64 or less"),
        ("--max_steps many", "invalid int value: 'many'"),
        ("--dtype half", "choose from float32, bfloat16"),
        ("--lora_alpha 3", "need --lora R"),
        ("--lora 3 --random_weights", "adapters need a trained model"),
        ("--per_device_train_batch_size 0", "at least 1"),
        ("--deepspeed x", "give --fsdp full_shard"),
        ("--load_best_model_at_end", "the last weights are deployed"),
    ],
)
def test_what_cannot_be_is_one_line(words, error, train, llama, own_stream, tmp_path):
    out = tmp_path / "run"
    printed = train(
        own_stream, "--init", llama, "--learner", "sm", "--out", out, "--", *words.split(), code=2
    )
    assert error in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--learner gmoe", "needs models of fairseq, and transformers trains"),
        ("--learner umix", "give sm, ens or gens"),
        ("--learner sm --grow-experts 2", "--grow-experts needs --learner gmoe"),
        ("--learner sm --schedule continuous", "--lr_scheduler_type constant_with_warmup"),
        ("--learner sm --average last:3", "give a decay such as .999, or poly:8"),
        ("--learner sm --budget updates=3", "give `-- --max_steps N`"),
        ("--learner sm --context-window 3", "leave it out"),
        ("--learner sm --engine fairseq", "--engine transformers` trains it"),
        ("--learner sm --trainer true", "--init is for the training of fairseq"),
        ("--learner sm --update-multiplier 2", "give --max_steps after the `--`"),
    ],
)
def test_options_that_the_engine_lacks(words, error, train, llama, own_stream, tmp_path):
    out = tmp_path / "run"
    command = [own_stream, "--init", llama, "--out", out, *words.split(), "--"]
    assert error in train(*command, "--num_train_epochs", "1", code=2)
    assert not out.exists()


def damaged(folder: Path, out: Path, damage: str) -> Path:
    """A copy of a folder with a fault."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    weights = out / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    if damage == "half the weights":
        state = load_file(weights)
        state.pop("model.layers.1.mlp.up_proj.weight")
        save_file(state, weights, metadata={"format": "pt"})
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    if damage == "another type":
        config["model_type"] = "t5"
    if damage == "code":
        config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
        (out / "mine.py").write_text("raise SystemExit('code was run')")
    if damage == "other tokens":
        text = (out / "tokenizer.json").read_text()
        (out / "tokenizer.json").write_text(text.replace("<|3|>", "<|three|>"))
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        ("no weights", "no weights (*.safetensors or pytorch_model*.bin)"),
        ("half the weights", "1 of its weights are missing, such as model.layers.1.mlp"),
        ("cut", "transformers cannot load it"),
        ("another type", "model_type t5 is no causal language model"),
        ("code", "transformers cannot load it"),
        ("other tokens", "its tokenizer.json is not that of"),
    ],
)
def test_a_folder_that_is_not_whole(damage, error, train, llama, own_stream, tmp_path):
    folder = damaged(llama, tmp_path / "folder", damage)
    out = tmp_path / "run"
    words = ["--init", folder, "--learner", "sm", "--out", out, "--", "--max_steps", "2"]
    printed = train(own_stream, *words, "--use_cpu", code=2)
    assert error in printed
    assert not list(out.rglob("*.safetensors"))


def test_a_stream_in_other_tokens_is_refused(train, make, stream, own_stream, tmp_path):
    """Of fairseq; and of a tokenizer with more tokens than the model has rows."""
    command = ["--learner", "sm", "--out", tmp_path / "run", "--", "--max_steps", "2"]
    folder = make("Llama")
    assert "are not those of a model of Hugging Face" in train(
        stream, "--init", folder, *command, code=2
    )
    small = make("Llama", vocab_size=ROWS // 2)
    assert "resize_token_embeddings" in train(own_stream, "--init", small, *command, code=2)
    assert END < ROWS // 2


def test_a_model_that_changes_under_a_run_ends_it(train, llama, own_stream, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "folder")
    words = ["--init", folder, "--learner", "sm", "--out", tmp_path / "run", "--stages", "1"]
    flags = ["--", "--max_steps", "2", "--use_cpu"]
    train(own_stream, *words, *flags)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    printed = train(own_stream, *words[:-1], "2", *flags, code=2)
    assert "init_sha256" in printed


def test_random_weights_of_the_seed(train, make, own_stream, tmp_path):
    """Members of an ensemble then start apart, and row 0 is their mean."""
    from alma.records import Run

    folder = make("Llama")
    (folder / "model.safetensors").unlink()
    flags = ["--", "--max_steps", "2", "--use_cpu", "--random_weights"]
    for name, learner in {"one": ["sm"], "two": ["ens", "--members", "2"]}.items():
        words = ["--init", folder, "--stages", "1", "--learner", *learner, "--out", tmp_path / name]
        train(own_stream, *words, *flags)
    one, two = (Run.read(tmp_path / name).rows for name in ("one", "two"))
    assert one[0]["value"] != two[0]["value"]
    assert two[1]["parameters"] == 2 * one[1]["parameters"]
