"""Exported models compute in transformers what they do in fairseq; unsupported ones are one clear line."""

import json
import math
import os

import numpy as np
import pytest
import torch

from fairseq_alma.combine import combine
from fairseq_alma.hugging_face import export
from fairseq_alma.moe.layer import routings_of

DENSE = "--arch transformer_lm --decoder-normalize-before --decoder-learned-pos".split()
SIZES = "--decoder-output-dim 32 --decoder-input-dim 32 --decoder-ffn-embed-dim 64".split()
PAD, EOS, UNK = 1, 2, 3


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """The library, offline, with its copies of modeling files in a temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads: other tests fork
        yield pytest.importorskip("transformers")


@pytest.fixture
def load(transformers):
    """`load(path, ...)` as users do."""

    def run(path, **settings):
        return transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, **settings)

    return run


@pytest.fixture
def checkpoint(untrained):
    """`checkpoint(name, *flags, change=None)` -> (path, fairseq's model); `change(state)` sets weights."""

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
    """Set `parent` as `tree` does: roots 0 and 1; 2 split from 0, then 3 from 2, 4 from 0 and 5 from 1."""
    state["decoder.layers.1.fc1.router.parent"] = torch.tensor([-1, -1, 0, 2, 0, 1])
    state["decoder.layers.1.fc1.router.copies"][:2] = torch.tensor([1, 2])


MODELS = {
    "flat": ([], None),
    "preserve": ([], split_without_a_change),
    "tree": (["--moe-expert-count", 6], tree),
    "every layer": (["--moe-freq", 1, "--activation-fn", "relu", "--no-scale-embedding"], None),
    "umix": (["--members", 2], None),
    "dense": ([*DENSE, *SIZES, "--share-decoder-input-output-embed"], None),
    "untied": ([*DENSE, *SIZES, "--activation-fn", "gelu_accurate", "--decoder-layers", 3], None),
}


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_logits_equal_fairseqs(load, checkpoint, sample, tmp_path, kind):
    """For full blocks, and for sequences of different lengths with padding at the right."""
    flags, change = MODELS[kind]
    path, model = checkpoint("model.pt", *flags, change=change)
    export(str(path), tmp_path / "hf")
    exported = load(tmp_path / "hf")
    tokens = sample["net_input"]["src_tokens"]
    loads = 0
    for length in (64, 40, 1):
        tokens[0, length:] = PAD
        mask = tokens != PAD
        expected, extra = model(tokens)
        assert expected.std() > 0.5
        found = exported(tokens, attention_mask=mask.long()).logits
        torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)
        routings = routings_of((expected, extra)).values()
        loads += sum((routing.counts_E for routing in routings), torch.zeros(1))
    assert not routings or loads.all(), "an expert received no token"


def test_checkpoints_of_earlier_versions_are_exported(load, checkpoint, tmp_path):
    path, _ = checkpoint("model.pt", change=split_without_a_change)
    saved, router = torch.load(path, weights_only=True), "decoder.layers.1.fc1.router"
    saved["model"][f"{router}.log_multiplicity"] = saved["model"].pop(f"{router}.copies").float().log()
    del saved["model"][f"{router}.parent"]
    torch.save(saved, tmp_path / "old.pt")
    for name in ("model", "old"):
        export(str(tmp_path / f"{name}.pt"), tmp_path / name)
    new, old = (load(tmp_path / name).state_dict() for name in ("model", "old"))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in new)


@pytest.mark.parametrize("average", ["probs", "logits"])
@torch.no_grad()
def test_an_ensemble_of_different_sizes(load, checkpoint, sample, tmp_path, average):
    small = ["--moe-expert-count", 6, "--decoder-embed-dim", 16, "--decoder-layers", 3, "--seed", 2]
    (first, a), (second, b) = checkpoint("a.pt"), checkpoint("b.pt", *small)
    torch.save(combine([str(first), str(second)], average), tmp_path / "ens.pt")
    export(str(tmp_path / "ens.pt"), tmp_path / "hf")
    exported = load(tmp_path / "hf")
    tokens = sample["net_input"]["src_tokens"]
    logits = [model(tokens)[0] for model in (a, b)]
    expected = sum(each.softmax(-1) for each in logits) / 2
    if average == "logits":
        expected = (sum(logits) / 2).softmax(-1)
    found = exported(tokens).logits.softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert generated(exported, tokens[:2, :5]) == generated(exported, tokens[:2, :5], use_cache=False)
    exported.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again")(tokens).logits.softmax(-1), found)


def generated(model, prompts, **settings):
    settings = {"max_new_tokens": 12, "do_sample": False} | settings
    return model.generate(prompts, **settings)[:, prompts.size(1) :].tolist()


@torch.no_grad()
def greedy(model, prompt, steps=12):
    """fairseq's greedy continuation without a cache."""
    tokens = prompt
    while len(tokens) < len(prompt) + steps and (tokens == prompt or tokens[-1] != EOS):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0][0, -1].argmax())]
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["tree", "untied"])
def test_generation_with_a_cache_equals_fairseqs_greedy_continuation(load, checkpoint, tmp_path, kind):
    """For single prompts, and for a batch of two lengths, the shorter prompt padded at the left."""
    flags, change = MODELS[kind]
    path, model = checkpoint("model.pt", *flags, change=change)
    export(str(path), tmp_path / "hf")
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


def test_the_loss_gradients_and_too_many_tokens(load, checkpoint, sample, tmp_path):
    path, _ = checkpoint("model.pt")
    export(str(path), tmp_path / "hf")
    model = load(tmp_path / "hf")
    tokens = sample["net_input"]["src_tokens"]
    output = model(tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="65 tokens are too many: at most 64"):
        model(torch.cat((tokens, tokens[:, :1]), dim=1))


@pytest.mark.parametrize("kind", ["flat", "untied", "umix"])
def test_features_resized_embeddings_and_gradient_checkpointing(
    load, transformers, checkpoint, sample, tmp_path, kind
):
    flags, change = MODELS[kind]
    path, _ = checkpoint("model.pt", *flags, change=change)
    export(str(path), tmp_path / "hf")
    model, tokens = load(tmp_path / "hf"), sample["net_input"]["src_tokens"]
    base = transformers.AutoModel.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    features = base(tokens).last_hidden_state
    assert features.shape == (4, 64, 32 * len(model.members))
    with torch.no_grad():
        logits = sum(
            each.logits(part) for each, part in zip(model.members, features.split(32, -1), strict=True)
        )
        torch.testing.assert_close(logits / len(model.members), model(tokens).logits, atol=1e-6, rtol=1e-5)
        before = model(tokens).logits
    losses = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model.train()(tokens, labels=tokens, use_cache=True).loss.backward()
        losses.append([each.grad.clone() for each in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0])
    with pytest.raises(ValueError, match="static caches are not supported: leave cache_implementation out"):
        model.eval().generate(tokens[:1, :5], max_new_tokens=3, cache_implementation="static")
    if kind == "umix":
        with pytest.raises(ValueError, match="an ensemble's embeddings cannot be resized"):
            model.resize_token_embeddings(1010)
        return
    model.resize_token_embeddings(1010)
    with torch.no_grad():
        resized = model(tokens).logits
    assert resized.size(-1) == 1010
    torch.testing.assert_close(resized[..., :1004], before)
    model.save_pretrained(tmp_path / "resized")
    torch.testing.assert_close(load(tmp_path / "resized")(tokens).logits, resized)


@pytest.mark.parametrize("kind", ["stream", "gpt2_stream"])
def test_a_trained_model_and_its_tokenizer(start, load, transformers, kind, request, tiny, text, tmp_path):
    stream = request.getfixturevalue(kind)
    run, out = tmp_path / "run", tmp_path / "hf"
    assert start("train", stream, *tiny, "--save-dir", run).wait().code == 0
    flags = ["--out", out, "--tokenizer", stream]
    finished = start("export", run / "checkpoint_last.pt", *flags).wait()
    assert finished.code == 0, finished.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    ids = np.fromfile(stream / "test.bin", np.uint16)
    lines = [item for item in np.split(ids, np.flatnonzero(ids == EOS) + 1) if UNK not in item]
    known = np.concatenate(lines).tolist()
    assert len(known) > 4_000
    decoded = tokenizer.decode(known)
    assert tokenizer(decoded, add_special_tokens=False).input_ids == known
    original = {line for file in text.iterdir() for line in file.read_text().splitlines()}
    assert set(decoded.splitlines()) <= original | {""}

    model = load(out)
    assert model.generation_config.eos_token_id == EOS
    batch = tokenizer(["The first", "A"], return_tensors="pt", padding=True)
    assert batch.input_ids[:, -1].tolist() != [EOS, EOS]
    assert batch.input_ids[0, 0] == EOS, "text starts as in training"
    answers = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8), skip_special_tokens=True)
    assert [answer[:length] for answer, length in zip(answers, (9, 1), strict=True)] == ["The first", "A"]


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
    checkpoint, transformers, kind, request, tmp_path
):
    import sentencepiece
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    stream = request.getfixturevalue(kind)
    path, _ = checkpoint("model.pt")
    export(str(path), tmp_path / "hf", stream)
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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--layernorm-embedding"], "was trained with --layernorm-embedding, which export does not support"),
        (["--decoder-output-dim", "16"], "with --decoder-output-dim other than --decoder-embed-dim"),
        (["--moe-eval-capacity-token-fraction", "0.5"], "with --moe-eval-capacity-token-fraction"),
        ([*DENSE[:3], *SIZES], "without --decoder-learned-pos"),
        ([*DENSE[:2], *SIZES, DENSE[3]], "without --decoder-normalize-before"),
    ],
)
def test_unsupported_options_are_refused(start, untrained, tmp_path, flags, line):
    path, _, _ = untrained("model.pt", *flags)
    assert line in start("export", path, "--out", tmp_path / "hf").wait().error
    assert not (tmp_path / "hf").exists()


def test_bad_input_is_one_clear_line(start, checkpoint, stream, tmp_path):
    path, _ = checkpoint("model.pt")

    def error(path, *flags, **settings):
        return start("export", path, "--out", tmp_path / "hf", *flags, **settings).wait().error

    def changed(name, change):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, tmp_path / name)
        return tmp_path / name

    (tmp_path / "half.pt").write_bytes(path.read_bytes()[:2000])
    assert "half.pt: truncated" in error(tmp_path / "half.pt")
    arch = changed("l.pt", lambda state: state["cfg"]["model"].update(_name="lightconv_lm"))
    assert "l.pt is a lightconv_lm: export supports" in error(arch)
    less = changed("m.pt", lambda state: state["model"].pop("decoder.layers.1.fc1.b1"))
    assert "m.pt: layers.1.ffn.b1 is absent, expected (4, 128)" in error(less)
    none = changed("n.pt", lambda state: state["model"].pop("decoder.embed_tokens.weight"))
    assert "n.pt: not a fairseq checkpoint" in error(none)
    heads = changed("h.pt", lambda state: state["cfg"]["model"].update(decoder_attention_heads=-math.inf))
    assert "h.pt: not a fairseq checkpoint (ValueError: num_attention_heads is -inf" in error(heads)
    extra = changed("x.pt", lambda state: state["model"].update({"decoder.gain": torch.zeros(1)}))
    assert "x.pt: gain is (1,), expected no such weight" in error(extra)
    assert "no finished stream here" in error(path, "--tokenizer", tmp_path)

    def cut(state):
        for name in ("embed_tokens", "output_projection"):
            name = f"decoder.{name}.weight"
            state["model"][name] = state["model"][name][:-8]

    smaller = changed("v.pt", cut)
    assert "has a dictionary of 1,004 entries, the checkpoint of 996" in error(smaller, "--tokenizer", stream)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "file").touch()
    assert "is not a folder" in start("export", path, "--out", tmp_path / "file").wait().error
    assert "model.safetensors: cannot be written" in error(path, file_bytes=50_000)
    assert sorted(os.listdir(tmp_path / "hf")) == ["generation_config.json", "modeling_alma.py"]


def test_config_json_uses_transformers_names(checkpoint, tmp_path):
    path, _ = checkpoint("model.pt", "--moe-expert-count", 6)
    export(str(path), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 6}
    expected |= {"intermediate_size": 128, "vocab_size": 1004, "max_position_embeddings": 64}
    expected |= {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "dtype": "float32"}
    assert expected.items() <= config.items()
