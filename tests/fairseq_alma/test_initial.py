"""--init: a run starts from the model itself,
and a model that is exported is the one that was trained."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alma.errors import UserError
from alma.records import Run
from alma.stream import Stream
from fairseq_alma import check, initial
from tests.byte_level import byte_level
from tests.conftest import ROOT

END = 7  # not the first id, so that a row that is off by one shows
BLOCK = 48
FLAGS = (
    f"--tokens-per-sample {BLOCK} --max-tokens 384 --max-update 3 --lr 1e-2 --num-workers 0 --cpu"
).split()


TOKENIZER = {"bos_token": "<|0|>", "pad_token": "<|1|>", "eos_token": f"<|{END}|>"}
TOKENIZER |= {"padding_side": "left", "model_max_length": 48}
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads: other tests fork
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def make(transformers, text, tmp_path_factory):
    """`make(**settings)` -> a folder with a GPT-2 of random weights, in several files,
    and its tokenizer."""
    special = [f"<|{i}|>" for i in range(END + 1)]
    engine = byte_level([(text / "help.txt").read_text("utf-8")], 300, special)

    def run(**settings):
        folder = tmp_path_factory.mktemp("gpt2")
        sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(bos_token_id=END, eos_token_id=END, **(sizes | settings))
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config)
        with torch.no_grad():
            for parameter in model.parameters():  # no 0 or 1 may hide a mistake
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder, max_shard_size="60KB")
        engine.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        (folder / "chat_template.jinja").write_text(CHAT)
        (folder / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
        return folder

    return run


@pytest.fixture(scope="module")
def folder(make):
    model = make()
    assert len(list(model.glob("*.safetensors"))) > 2
    return model


@pytest.fixture(scope="module")
def stream(folder, text, tmp_path_factory):
    """A stream in the ids of the folder, with two mega-batches."""
    out = tmp_path_factory.mktemp("own") / "stream"
    words = (
        "--mega-batches 2 --words 4000 --eval-words 2000 --valid-words 1000 --seed 1 --workers 1"
    )
    command = [sys.executable, "-m", "data_prep", f"help={text}/help.txt", "--tokenizer", folder]
    subprocess.run([*command, *words.split(), "--out", out], check=True, cwd=ROOT)
    return out


def test_a_trainer_reads_the_ids_of_the_model(folder, stream, transformers):
    """Those of its tokenizer, and its end of text after each document."""
    from slurm.lm import trainer

    of_stream = Stream.load(stream)
    (part,) = trainer._text_parts(of_stream, [of_stream.test])
    ids = part.read_tokens()
    assert (part.end_token, trainer._dictionary(of_stream)) == (END, 300)
    with pytest.raises(UserError, match="without the model's end of text; make it again"):
        trainer._dictionary(dataclasses.replace(of_stream, end_token=None))
    ends = np.flatnonzero(ids == END)
    assert (len(ends), ends[-1]) == (of_stream.test.documents, len(ids) - 1)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    first = ids[: ends[0]]
    assert tokenizer(tokenizer.decode(first)).input_ids == first.tolist()


@torch.no_grad()
def loss(model, stream) -> float:
    """Of transformers' `model`, in nats a token, on the blocks that fairseq evaluates."""
    ids = np.fromfile(stream / "test.bin", np.uint16).astype(np.int64)
    targets = torch.from_numpy(np.where(ids == 2, END, ids - 4))
    inputs = torch.cat([torch.tensor([END]), targets[:-1]])
    total = 0.0
    for block, target in zip(inputs.split(BLOCK), targets.split(BLOCK), strict=True):
        logits = model(block[None]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
    return total / len(targets)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, []),
        ({"tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu"}, []),
        ({"tie_word_embeddings": False}, ["--arch", "switch_gmoe", "--moe-expert-count", 1]),
        ({}, ["--arch", "switch_gmoe", "--moe-expert-count", 5, "--moe-freq", 1]),
    ],
)
def test_the_loss_at_t_0_is_that_of_transformers(
    make, stream, transformers, evaluate, settings, flags
):
    folder = make(**settings)
    expected = loss(transformers.GPT2LMHeadModel.from_pretrained(folder), stream)
    assert expected > 6, "not that of a model that has learned nothing"
    result = evaluate("--untrained", "--init", folder, *FLAGS, *flags, data=stream)
    assert result["nll"] == pytest.approx(expected, abs=1e-5)
    shares = [share for layer in result["experts"].values() for share in layer["share"]]
    assert min(shares, default=1) > 0, "an expert gets no token"


def test_in_two_stages_and_out(folder, stream, transformers, forked, start, tmp_path):
    run = tmp_path / "run"
    out = tmp_path / "hf"
    words = [stream, "--init", folder, "--learner", "sm", "--out"]
    forked.launch(*words, run, "--", *FLAGS, "--criterion", "chunked_cross_entropy")
    saved = torch.load(run / "stage_01" / "checkpoint_best.pt", weights_only=True)["model"]
    assert not saved["decoder.embed_tokens.weight"][[0, 1, 3]].any(), (
        "ids that no text has were trained"
    )

    exported = start("export", run, "--out", out).wait()
    assert exported.code == 0, exported.output
    assert "trust_remote_code" not in exported.output
    assert not list(out.glob("*.py"))
    model, tokenizer = (
        kind.from_pretrained(out)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    assert type(model) is transformers.GPT2LMHeadModel
    assert (len(tokenizer), model.config.vocab_size, model.config.n_positions) == (300, 300, 64)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == END
    settings = {name: getattr(tokenizer, name) for name in TOKENIZER}
    assert (settings, tokenizer.chat_template) == (TOKENIZER, CHAT)
    assert (model.config.bos_token_id, model.config.pad_token_id) == (0, 1)
    generation = model.generation_config
    assert (generation.bos_token_id, generation.temperature) == (0, 0.25)
    before = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    lines = "It's  one\n\n line\nand more"
    assert tokenizer(lines).input_ids == before(lines).input_ids
    assert tokenizer.decode(tokenizer(lines).input_ids) == lines
    last = json.loads((run / "stage_01" / "result.json").read_text())
    assert loss(model, stream) == pytest.approx(last["nll"], abs=1e-5)
    assert last["nll"] < json.loads((run / "untrained.json").read_text())["nll"] - 0.1

    from fairseq import checkpoint_utils

    path = str(run / "stage_01" / "checkpoint_best.pt")
    (language_model,), *_ = checkpoint_utils.load_model_ensemble_and_task([path])
    ids = torch.randint(300, (3, 64))
    with torch.no_grad():
        logits = model(ids).logits
        expected = language_model.eval()(ids + 4)[0]
    ids_but_end = [i for i in range(300) if i != END]
    torch.testing.assert_close(
        logits[..., ids_but_end], expected[..., 4:][..., ids_but_end], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(logits[..., END], expected[..., 2], atol=1e-5, rtol=0)

    again = tmp_path / "again"  # a checkpoint as the model, and growth from one expert
    grown = "--learner gmoe --grow-experts 1 --stages 1 --out".split()
    forked.launch(stream, "--init", path, *grown, again, "--", *FLAGS, "--moe-expert-count", "1")
    first = json.loads((again / "untrained.json").read_text())
    assert first["nll"] == pytest.approx(last["nll"], abs=1e-6)
    with pytest.raises(UserError, match=r"init_sha256: \w+… -> \w+…"):  # another model at a restart
        forked.launch(
            stream, "--init", folder, *grown, again, "--", *FLAGS, "--moe-expert-count", "1"
        )
    config = Run.read(run).config
    assert (config["init"], len(config["init_sha256"])) == (folder.name, 64)


def test_an_index_beside_the_weights_is_of_an_older_model(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    whole = {
        name: value + 1 for path in copy.glob("*-of-*") for name, value in load_file(path).items()
    }
    save_file(whole, copy / "model.safetensors")  # as transformers does where shards were
    weights = initial.read(str(copy))[1]
    assert torch.equal(weights["layer_norm.weight"], whole["transformer.ln_f.weight"])


def test_a_model_is_read_once_for_all_runs_and_not_kept(folder, stream, build, monkeypatch):
    reads = []
    monkeypatch.setattr(initial, "sha256_file", lambda path: reads.append(path.name) or "0")
    initial.read.cache_clear()
    for seed in (1, 2):
        check.resolve(
            [*map(str, [stream, "--task", "alma_lm", "--init", folder, *FLAGS, "--seed", seed])]
        )
    assert reads == sorted(path.name for path in folder.glob("*.safetensors"))
    build("--init", str(folder), data=stream)
    assert len(reads) == len(list(folder.glob("*.safetensors")))
    assert not initial.read.cache_info().currsize


def wider(folder):
    """One more row than the tokenizer has ids."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 301}))
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        if "transformer.wte.weight" in weights:
            weights["transformer.wte.weight"] = torch.zeros(301, 32)
            save_file(weights, path)


def edit(name, old, new):
    """A change of a file of the folder."""

    def change(folder):
        path = folder / name
        path.write_text(path.read_text().replace(old, new))

    return change


def remove(name):
    return lambda folder: next(iter(folder.glob(name))).unlink()


def truncate(folder):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def another_head(folder):
    """An output layer that is not the embeddings, though config.json ties them."""
    path = min(folder.glob("*.safetensors"))
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(300, 32)}, path)


REFUSED = {
    "no object": (
        lambda folder: (folder / "config.json").write_text("[]"),
        [],
        "it should be an object",
    ),
    "no end": (
        edit("config.json", '"eos_token_id": 7', '"eos_token_id": null'),
        [],
        "eos_token_id: Expected",
    ),
    "heads": (
        edit("config.json", '"n_head": 2', '"n_head": 3'),
        [],
        "n_embd 32 is no multiple of n_head 3",
    ),
    "shape": (
        edit("config.json", '"n_positions": 64', '"n_positions": 99'),
        [],
        r"wpe.weight: .*\[99, 32\]",
    ),
    "fewer layers": (
        edit("config.json", '"n_layer": 2', '"n_layer": 1'),
        [],
        "config.json has no h.1",
    ),
    "another head": (another_head, [], "lm_head.weight is not wte.weight"),
    "no last norm": (
        None,
        ["--no-decoder-final-norm"],
        "--no-decoder-final-norm True: .* has False",
    ),
    "positions": (
        None,
        ["--tokens-per-sample", 65],
        "65: .* has 64 positions: give --tokens-per-sample 64",
    ),
    "no transformer": (None, ["-a", "lstm_lm"], "--arch: .* is a transformer_lm, and this is none"),
    "convolutions": (
        None,
        ["--arch", "lightconv_lm"],
        "--arch: .* is a transformer_lm, and this is none",
    ),
    "flag": (None, ["--decoder-layers", 3], "--decoder-layers 3: .* has 2: leave the flag out"),
    "other tokenizer": (
        edit("tokenizer.json", '"merges"', ' "merges"'),
        [],
        "make a stream by `alma data",
    ),
    "rows": (wider, [], "its 300 tokens are not the 301 of .* by its resize_token_embeddings"),
    "llama": (
        edit("config.json", '"gpt2"', '"llama"'),
        [],
        "model_type is llama, and fairseq computes gpt2: `alma train --engine transformers`",
    ),
    "layers": (
        edit("config.json", '"n_layer": 2', '"n_layer": 3'),
        [],
        r"no whole GPT-2 \(KeyError: 'h.2",
    ),
    "epsilon": (
        edit("config.json", "1e-05", "1e-06"),
        [],
        "layer_norm_epsilon is 1e-06, and fairseq computes 1e-05: `alma train --engine trans",
    ),
    "damaged": (truncate, [], r"no whole GPT-2 \(SafetensorError"),
    "no shard": (remove("*2-of*.safetensors"), [], r"no whole GPT-2 \(FileNotFoundError"),
    "no config": (remove("config.json"), [], r"no whole GPT-2 \(FileNotFoundError"),
    "no model": (shutil.rmtree, [], "no such checkpoint"),
    "another": (None, ["--init-sha256", "0"], "--init-sha256 0: .* has [0-9a-f]{64}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_one_line(folder, stream, tmp_path, capsys, kind):
    change, flags, line = REFUSED[kind]
    copy = shutil.copytree(folder, tmp_path / "model")
    if change:
        change(copy)
    with pytest.raises(SystemExit, match="2"):
        check.resolve(list(map(str, [stream, "--task", "alma_lm", "--init", copy, *FLAGS, *flags])))
    assert re.fullmatch(f"error: .*{line}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_of_other_tokens_is_one_line(
    beside, stream, untrained, tiny, tmp_path, capsys
):
    """Of as many: only dict.txt tells them apart, that beside the checkpoint or that of its
    stream."""
    path, _, _ = untrained("model.pt")
    other = shutil.copytree(stream, tmp_path / "other")
    first, second, *rest_lines = (other / "dict.txt").read_text("utf-8").splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([second, first, *rest_lines]), "utf-8")
    data, home = (other, stream) if not beside else (stream, tmp_path)
    if beside:
        shutil.move(other / "dict.txt", tmp_path)
    words = list(map(str, [data, *tiny, "--init", path]))
    with pytest.raises(SystemExit, match="2"):
        check.resolve(words)
    line = (
        f"error: {data}: its tokens are not those of {path}, which {home} has: "
        "make a stream by `alma data"
    )
    assert capsys.readouterr().err.startswith(line)
    words[0] = str(stream if not beside else tmp_path)
    check.resolve(words)


def test_a_stream_in_other_ids_is_one_line(folder, request, capsys):
    words = [request.getfixturevalue("gpt2_stream"), "--task", "alma_lm", "--init", folder, *FLAGS]
    with pytest.raises(SystemExit, match="2"):
        check.resolve(list(map(str, words)))
    assert "its 1,000 tokens are not the 300 of" in capsys.readouterr().err


def test_a_model_that_normalises_after_its_layers_starts_no_mixture(untrained, stream, capsys):
    path, _, _ = untrained("dense.pt", "--arch", "transformer_lm")
    words = [
        str(stream),
        "--task",
        "alma_lm",
        "--init",
        str(path),
        "--tokens-per-sample",
        "16",
        "--cpu",
    ]
    check.resolve(words)
    with pytest.raises(SystemExit, match="2"):
        check.resolve([*words, "--arch", "switch_gmoe"])
    assert "train the model with --decoder-normalize-before" in capsys.readouterr().err
