"""Exported models compute in transformers what they do in fairseq;
unsupported ones are one clear line."""

import functools
import json
import os
import stat

import numpy as np
import pytest
import torch

from alma.errors import UserError
from fairseq_alma.export import checkpoint_of
from fairseq_alma.moe.layer import routings_of
from tests.fairseq_alma.shared import changed

DENSE = "--arch transformer_lm --decoder-normalize-before --decoder-learned-pos".split()
SIZES = "--decoder-output-dim 32 --decoder-input-dim 32 --decoder-ffn-embed-dim 64".split()
PAD = 1
EOS = 2
UNK = 3


@pytest.fixture(scope="module", autouse=True)
def transformers(tmp_path_factory):
    """The library, offline, with its copies of modeling files in a temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads: other tests fork
        yield pytest.importorskip("transformers")


@pytest.fixture
def export():
    """`export(path, out, tokenizer=None)`, as `alma export` calls it."""
    from fairseq_alma.hugging_face import export

    return export


@pytest.fixture
def load(transformers):
    """`load(path, ...)` as users do."""

    return functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True
    )


@pytest.fixture
def checkpoint(untrained):
    """`checkpoint(name, *flags, change=None)` -> (path, fairseq's model);
    `change(state)` sets weights."""

    def run(name, *flags, change=None):
        @torch.no_grad()
        def spread(model):
            for key, parameter in model.named_parameters():  # no 0 or 1 may hide a mistake
                scale = 0.1 if "embed" in key or "router" in key else 0.3
                parameter.add_(scale * torch.randn_like(parameter))
            if change:
                state = model.state_dict()
                change(state)
                model.load_state_dict(state)

        return untrained(name, *flags, change=spread)[:2]

    return run


def split_without_a_change(state):
    """Set `copies` as `preserve` does."""
    state["decoder.layers.1.fc1.router.copies"] = torch.tensor([3, 3, 2, 1])


def tree(state):
    """Set `parent` as `tree` does: roots 0 and 1;
    2 split from 0, then 3 from 2, 4 from 0 and 5 from 1."""
    state["decoder.layers.1.fc1.router.parent"] = torch.tensor([-1, -1, 0, 2, 0, 1])
    state["decoder.layers.1.fc1.router.copies"][:2] = torch.tensor([1, 2])


MODELS = {
    "flat": ([], None),
    "preserve": ([], split_without_a_change),
    "tree": (["--moe-expert-count", 6], tree),
    "every layer": (["--moe-freq", 1, "--activation-fn", "relu", "--no-scale-embedding"], None),
    "dense": ([*DENSE, *SIZES, "--share-decoder-input-output-embed"], None),
    "sinusoidal": ([*DENSE[:3], *SIZES], None),
    "untied": ([*DENSE, *SIZES, "--activation-fn", "gelu_accurate", "--decoder-layers", 3], None),
}


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_logits_equal_fairseqs(load, export, checkpoint, sample, tmp_path, kind):
    """For full blocks, and for sequences of different lengths with padding at the right."""
    flags, change = MODELS[kind]
    path, model = checkpoint("model.pt", *flags, change=change)
    export(path, tmp_path / "hf")
    exported = load(tmp_path / "hf")
    tokens = sample["net_input"]["src_tokens"]
    loads = 0
    for length in (64, 40, 1):
        tokens[0, length:] = PAD
        mask = tokens != PAD
        expected, extra = model(tokens)
        assert expected.std() > 0.5
        logits = exported(tokens, attention_mask=mask.long()).logits
        torch.testing.assert_close(logits[mask], expected[mask], atol=1e-5, rtol=1e-5)
        routings = routings_of((expected, extra)).values()
        loads += sum((routing.counts_E for routing in routings), torch.zeros(1))
    assert not routings or loads.all(), "an expert received no token"


def generated(model, prompts, **settings):
    answers = model.generate(prompts, max_new_tokens=12, do_sample=False, **settings)
    return answers[:, prompts.size(1) :].tolist()


@torch.no_grad()
def greedy(model, prompt, steps=12):
    """fairseq's greedy continuation without a cache."""
    tokens = prompt
    while len(tokens) < len(prompt) + steps and (tokens == prompt or tokens[-1] != EOS):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0][0, -1].argmax())]
    return tokens[len(prompt) :]


def test_generation_with_a_cache_equals_fairseqs_greedy_continuation(
    load, export, checkpoint, tmp_path
):
    """For single prompts, and for a batch of two lengths, the shorter prompt padded at the left."""
    flags, change = MODELS["tree"]
    path, model = checkpoint("model.pt", *flags, change=change)
    export(path, tmp_path / "hf")
    exported = load(tmp_path / "hf")
    prompts = [[EOS, 17, 200, 31, 8, 999, 45], [EOS, 400, 12]]
    expected = [greedy(model, prompt) for prompt in prompts]
    assert len({*expected[0], *expected[1]}) > 4, "the model only repeats itself"
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generated(exported, torch.tensor([prompt])) == [tokens]
    batch = torch.tensor([prompts[0], [PAD] * 4 + prompts[1]])
    mask = (batch != PAD).long()
    with torch.no_grad():
        alone = model(torch.tensor(prompts[1:]))[0][0]
        torch.testing.assert_close(
            exported(batch, attention_mask=mask).logits[1, 4:], alone, atol=1e-5, rtol=1e-5
        )
    batched = generated(exported, batch, attention_mask=mask)
    assert [[t for t in row if t != PAD] for row in batched] == expected


def test_features_the_loss_and_gradient_checkpointing(
    load, transformers, export, checkpoint, sample, tmp_path
):
    path, _ = checkpoint("model.pt")
    export(path, tmp_path / "hf")
    model = load(tmp_path / "hf")
    tokens = sample["net_input"]["src_tokens"]
    base = transformers.AutoModel.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    output = model(tokens, labels=tokens)
    features = base(tokens).last_hidden_state
    torch.testing.assert_close(
        model.output_projection(features), output.logits, atol=1e-6, rtol=1e-5
    )
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()(tokens, labels=tokens, use_cache=True).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


@pytest.mark.parametrize("kind", ["stream", "gpt2_stream"])
def test_a_trained_model_and_its_tokenizer(
    start, load, transformers, kind, request, tiny, text, tmp_path
):
    stream = request.getfixturevalue(kind)
    run = tmp_path / "run"
    out = tmp_path / "hf"
    assert start("train", stream, *tiny, "--save-dir", run).wait().code == 0
    flags = ["--out", out, "--tokenizer", stream]
    finished = start("export", run / "checkpoint_last.pt", *flags).wait()
    assert finished.code == 0, finished.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    ids = np.fromfile(stream / "test.bin", np.uint16)
    lines = [item for item in np.split(ids, np.flatnonzero(ids == EOS) + 1) if UNK not in item]
    expected = np.concatenate(lines).tolist()
    assert len(expected) > 4_000
    decoded = tokenizer.decode(expected)
    assert tokenizer(decoded, add_special_tokens=False).input_ids == expected
    original = {line for file in text.iterdir() for line in file.read_text().splitlines()}
    assert set(decoded.splitlines()) <= original | {""}

    model = load(out)
    assert model.generation_config.eos_token_id == EOS
    batch = tokenizer(["The first", "A"], return_tensors="pt", padding=True)
    assert batch.input_ids[:, -1].tolist() != [EOS, EOS]
    assert batch.input_ids[0, 0] == EOS, "text starts as in training"
    answers = tokenizer.batch_decode(
        model.generate(**batch, max_new_tokens=8), skip_special_tokens=True
    )
    assert [answer[:length] for answer, length in zip(answers, (9, 1), strict=True)] == [
        "The first",
        "A",
    ]


LINES = [
    " two  spaces\tand a tab ",
    "lines\n\n and documents\n",
    "\u2581 the mark of spaces \u2581\u2581x",
    "unknown \U0001f40d\U0001f40d characters: 漢字 漢",
    "tags <s> </s> <unk> ---- ======= aaaaaaaaaaaa ababababab",
    "no-break\xa0space and\u2009thin\x85one",
]


@pytest.mark.parametrize("kind", ["stream", "gpt2_stream"])
def test_the_tokenizer_equals_sentencepiece_and_gpt2_line_by_line(
    export, checkpoint, transformers, kind, request, tmp_path
):
    import sentencepiece
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    stream = request.getfixturevalue(kind)
    path, _ = checkpoint("model.pt")
    export(path, tmp_path / "hf", stream)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    if kind == "stream":
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(stream / "tokenizer.model"))
    else:
        bpe = get_encoder(str(stream / "encoder.json"), str(stream / "vocab.bpe"))
    for text in LINES:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        expected = []
        for line in lines:
            expected.append(EOS)
            if kind == "stream":
                expected += [UNK if piece == 0 else piece + 1 for piece in pieces.encode(line)]
            else:
                expected += [token + 4 for token in bpe.encode(line)]
        assert tokenizer(text).input_ids == expected
        if kind != "stream":
            assert tokenizer.decode(expected[1:]) == "\n".join(lines)


def mutated(*names, **model):
    """A change of a checkpoint: weights without `names`, other settings of the `model`."""

    def change(state):
        for name in names:
            state["model"].pop(f"decoder.{name}")
        state["cfg"]["model"].update(model)

    return change


REFUSED = {
    "layernorm-embedding": (
        [*DENSE, *SIZES, "--layernorm-embedding"],
        None,
        "Unexpected key(s) in",
    ),
    "input-dim": (
        ["--decoder-input-dim", "16", "--decoder-output-dim", "16"],
        None,
        "project_in_dim",
    ),
    "umix": (
        ["--members", "2"],
        None,
        "was trained as a UMix of several models, which export does not",
    ),
    "post-norm": ([*DENSE[:2], *SIZES, DENSE[3]], None, "layer_norm.weight"),
    "lightconv": ([], mutated(_name="lightconv_lm"), "is a lightconv_lm: export supports"),
    "heads": ([], mutated(decoder_embed_dim=16), "size mismatch for biogpt."),
    "absent": (
        [],
        mutated("layers.1.fc1.b1"),
        'Missing key(s) in state_dict: "biogpt.layers.1.fc1.b1"',
    ),
    "no embedding": ([], mutated("embed_tokens.weight"), "not a fairseq checkpoint"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_transformers_would_compute_otherwise_are_one_line(
    export, untrained, tmp_path, kind
):
    flags, change, line = REFUSED[kind]
    path, _, _ = untrained("model.pt", *flags)
    if change:
        changed(path, path, change)
    with pytest.raises(UserError) as error:
        export(path, tmp_path / "hf")
    assert str(error.value).startswith(str(path))
    assert line in str(error.value)
    assert not (tmp_path / "hf").exists()


def test_bad_input_is_one_clear_line(start, export, checkpoint, stream, tmp_path):
    path, _ = checkpoint("model.pt")
    (tmp_path / "half.pt").write_bytes(path.read_bytes()[:2000])
    half = start("export", tmp_path / "half.pt", "--out", tmp_path / "hf").wait()
    assert "half.pt: truncated" in half.error
    with pytest.raises(UserError, match="no finished stream here"):
        export(path, tmp_path / "hf", tmp_path)

    def cut(state):
        for name in ("embed_tokens", "output_projection"):
            name = f"decoder.{name}.weight"
            state["model"][name] = state["model"][name][:-8]

    changed(path, tmp_path / "v.pt", cut)
    with pytest.raises(UserError, match="has a dictionary of 1,004 entries, the checkpoint of 996"):
        export(tmp_path / "v.pt", tmp_path / "hf", stream)
    assert not (tmp_path / "hf").exists()
    full = start("export", path, "--out", tmp_path / "hf", file_bytes=50_000).wait()
    assert "hf: cannot be written" in full.error
    assert not os.listdir(tmp_path / "hf")


def test_the_files_are_readable_and_config_json_uses_transformers_names(
    export, checkpoint, tmp_path
):
    path, _ = checkpoint("model.pt", "--moe-expert-count", 6)
    export(path, tmp_path / "hf")
    modes = {file.name: stat.filemode(file.stat().st_mode) for file in (tmp_path / "hf").iterdir()}
    assert set(modes) >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_alma.py",
    }
    assert len(set(modes.values())) == 1
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts": 6,
    }
    expected |= {"intermediate_size": 128, "vocab_size": 1004, "max_position_embeddings": 64}
    expected |= {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "dtype": "float32"}
    assert expected.items() <= config.items()


RUN = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2
    --tokens-per-sample 32 --max-tokens 512 --lr 1e-2 --max-update 6 --warmup-updates 1
    --no-epoch-checkpoints --num-workers 0 --cpu
""".split()


def test_a_run_gives_the_model_that_it_evaluates_and_its_tokenizer(
    forked, start, load, stream, tmp_path
):
    """Here the weight average of the last stage, or of the stage at --t."""
    options = "--learner sm --schedule continuous --average poly:4 --stages 2".split()
    run = tmp_path / "run"
    forked.launch(stream, "--out", run, *options, "--", *RUN)
    for stage, words in ((1, ()), (0, ("--t", 1)), (1, ("--t", 2))):
        out = tmp_path / f"hf_{stage}_{len(words)}"
        done = start("export", run, "--out", out, *words).wait()
        assert done.code == 0, done.output
        file = run / f"stage_{stage:02d}/checkpoint_last.pt"
        average = torch.load(file, weights_only=True)["extra_state"]["ema"]
        exported = load(out).state_dict()["biogpt.layers.0.self_attn.k_proj.weight"]
        assert torch.equal(exported, average["decoder.layers.0.self_attn.k_proj.weight"])
        assert (out / "tokenizer.json").is_file()
    (run / "stage_00/checkpoint_last.pt").unlink()
    problems = {3: "has models after mega-batches 1 to 2", 1: "missing: restore it, or export"}
    for t, problem in problems.items():
        done = start("export", run, "--out", tmp_path / "hf", "--t", t).wait()
        assert (done.code, problem in done.output) == (2, True), done.output


def test_a_run_without_a_single_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no stage has finished yet; see `alma status '.*/my run'`"):
        checkpoint_of(tmp_path / "my run")
    for member in ("a", "b"):
        (tmp_path / "stage_00" / member).mkdir(parents=True)
        (tmp_path / "stage_00" / member / "trained.json").write_text(
            '{"checkpoint": "checkpoint_best.pt"}'
        )
    (tmp_path / "stage_00" / "result.json").write_text('{"training": [{}, {}]}')
    with pytest.raises(UserError, match=r"deploys an ensemble of 2 models.*b/checkpoint_best\.pt"):
        checkpoint_of(tmp_path)
    (tmp_path / "stage_00" / "result.json").write_text("{")
    with pytest.raises(UserError, match="damaged .*: delete it and rerun `alma train`"):
        checkpoint_of(tmp_path)
