"""`alma export RUN` and `alma generate`: the models, the weights and the tokenizer of a run."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fairseq_alma.run_models import checkpoints_of

FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 32 --max-tokens 512 --lr 1e-2 --max-update 6 --warmup-updates 1
    --no-epoch-checkpoints --num-workers 0 --cpu
""".split()


@pytest.fixture
def launched(forked, stream, tmp_path):
    """`launched(options)`: the folder of a run of two stages."""

    def run(*options: str):
        forked.launch(stream, "--out", tmp_path / "run", "--stages", "2", *options, "--", *FLAGS)
        return tmp_path / "run"

    return run


@pytest.fixture
def printed(start):
    """`printed(run, prompt, ...)`: what `alma generate` prints."""

    def run(*words) -> str:
        done = start("continue", *words).wait()
        assert done.code == 0, done.output
        return done.output.splitlines()[-1]  # after fairseq's log

    return run


def test_export_and_generate_take_the_model_that_a_run_evaluates(
    launched, start, printed, stream, tmp_path, monkeypatch
):
    """Here the weight average after the cool-down of the last stage."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    transformers = pytest.importorskip("transformers")
    options = "--learner sm --schedule continuous --cooldown .5 --average poly:4".split()
    run = launched(*options)
    assert checkpoints_of(run) == [str(run / "stage_01" / "cooldown" / "checkpoint_last.pt")]
    done = start("export", run, "--out", tmp_path / "hf").wait()
    assert done.code == 0, done.output
    average = torch.load(checkpoints_of(run)[0], weights_only=True)["extra_state"]["ema"]
    found = load_file(tmp_path / "hf" / "model.safetensors")["members.0.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(found, average["decoder.layers.0.self_attn.k_proj.weight"])

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    prompt = tokenizer("The first", return_tensors="pt")
    greedy = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(greedy[0], skip_special_tokens=True)
    assert printed(run, "The  first", "--temperature", 0, "--max-new-tokens", 8) == expected
    texts = [printed(run, "The first", "--max-new-tokens", 30, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("The first") and "<unk>" not in text for text in texts)


def test_an_ensemble_generates_and_is_combined_before_export(launched, start, printed, tmp_path):
    run = launched("--learner", "gens")
    paths = checkpoints_of(run)
    assert [path.split("/")[-2] for path in paths] == ["stage_00", "stage_01"]
    assert printed(run, "The", "--max-new-tokens", 5).startswith("The")
    error = start("export", run, "--out", tmp_path / "hf").wait().error
    assert error.startswith(f"{run} deploys 2 models: combine them by `alma combine {' '.join(paths)} --out")
    assert start("combine", *paths, "--out", tmp_path / "ens.pt").wait().code == 0
    assert start("export", tmp_path / "ens.pt", "--out", tmp_path / "hf").wait().code == 0
    (run / "stage_01" / "result.json").unlink()
    assert checkpoints_of(run) == paths[:1]
    (run / "stage_00" / "result.json").unlink()
    error = start("continue", run, "The").wait().error
    assert error == f"{run}: no stage has finished yet; see `alma status {run}`"


@pytest.mark.parametrize("kind", ["stream", "gpt2_stream"])
def test_fairseq_reads_and_writes_text_with_the_streams_tokenizer(start, train, kind, request, tmp_path):
    stream = request.getfixturevalue(kind)
    train(tmp_path / "run", data=stream)
    (tmp_path / "input.txt").write_text("The first object\n", "utf-8")
    bpe = ("--bpe", "sentencepiece", "--sentencepiece-model", stream / "tokenizer.model")
    if kind == "gpt2_stream":
        bpe = ("--bpe", "gpt2", "--gpt2-encoder-json", stream / "encoder.json")
        bpe += ("--gpt2-vocab-bpe", stream / "vocab.bpe")
    flags = ["--task", "alma_lm", "--path", tmp_path / "run" / "checkpoint_last.pt", *bpe]
    length = ("--beam", 1, "--max-len-b", 20)
    done = start("interactive", stream, *flags, *length, "--input", tmp_path / "input.txt").wait()
    assert done.code == 0, done.output
    assert "<unk>" not in done.output
    (text,) = re.findall(r"^D-0\t\S+\t(.*)$", done.output, re.MULTILINE)
    assert text.startswith("The first object")
    subset = ("--gen-subset", "valid", "--sample-break-mode", "eos", "--prefix-size", 3, "--batch-size", 16)
    done = start("generate", stream, *flags, *length, *subset, "--skip-invalid-size-inputs-valid-test").wait()
    assert done.code == 0, done.output
    texts = re.findall(r"^D-\d+\t\S+\t(.*)$", done.output, re.MULTILINE)
    assert len(texts) > 10
    assert not [each for each in texts if "\u2581" in each]
