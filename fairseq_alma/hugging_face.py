"""Convert a checkpoint to a directory that Hugging Face transformers loads (see
`fairseq_alma.export`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import SinusoidalPositionalEmbedding
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from alma.card import CARD
from alma.errors import UserError
from alma.files import filled
from alma.options import flag_of
from alma.stream import SPECIALS, Stream
from fairseq_alma import modeling_alma
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.initial import ACTIVATIONS, BOS, EOS, PAD, UNK, model_rows, to_gpt2
from fairseq_alma.switch_lm import SwitchLanguageModel

_CODE = Path(modeling_alma.__file__)
_AUTO_MAP = {
    "AutoConfig": f"{_CODE.stem}.AlmaConfig",
    "AutoModel": f"{_CODE.stem}.AlmaModel",
    "AutoModelForCausalLM": f"{_CODE.stem}.AlmaForCausalLM",
}
"""The classes that transformers loads for a model, in the file beside its weights."""


def read_model(path: str, weights: str = "trained") -> modeling_alma.AlmaForCausalLM:
    """The model of a checkpoint; `weights`: as `checkpoint.with_weights`.

    UserError: missing, damaged, without a weight average, or a model that modeling_alma.py does not
    support.
    """
    (state,) = memory_map_members([path], weights)
    with reading(path):  # a KeyError: the config or the weights are incomplete
        options = state["cfg"]["model"]
        task = state["cfg"]["task"]
        _check_supported(path, options)
        saved = dict(state["model"])
        for name in ("embed_tokens", "output_projection"):
            key = f"{PREFIX}{name}.weight"
            saved[key] = model_rows(saved[key], task.get("end_token", -1))
        # Positions start at PAD + 1 in both, and modeling_alma.py has sinusoids as a table, too.
        rows = (options.get("max_target_positions") or task["tokens_per_sample"]) + PAD + 1
        width = options["decoder_embed_dim"]
        sinusoids = SinusoidalPositionalEmbedding.get_embedding(rows, width, PAD)
        positions = saved.setdefault(f"{PREFIX}embed_positions.weight", sinusoids)
        config = modeling_alma.AlmaConfig(
            vocab_size=len(saved[f"{PREFIX}embed_tokens.weight"]),
            hidden_size=width,
            num_hidden_layers=options["decoder_layers"],
            num_attention_heads=options["decoder_attention_heads"],
            intermediate_size=options["decoder_ffn_embed_dim"],
            hidden_act=ACTIVATIONS[options["activation_fn"]],
            max_position_embeddings=len(positions) - PAD - 1,
            num_experts=options.get("moe_expert_count", 0),
            decoder_sparse_step=options.get("moe_freq", 1),
            scale_embedding=not options["no_scale_embedding"],
            tie_word_embeddings=bool(options["share_decoder_input_output_embed"]),
            **_special_settings(task),
        )
        with torch.device("meta"):
            model = modeling_alma.AlmaForCausalLM(config)
        try:
            model.load_state_dict(_renamed(saved), strict=True, assign=True)
        except RuntimeError as error:
            problem = str(error).split("\n")[1].strip()
            supported = "switch_gmoe* and transformer_lm* with --decoder-normalize-before"
            raise UserError(f"{path}: {problem} Export supports {supported}") from error
    model.tie_weights()
    return model


def _check_supported(path: str, options: dict[str, Any]) -> None:
    """Raise a UserError for an option of the model that modeling_alma.py does not support.

    Checks only options that leave the names and shapes of the weights unchanged; others fail when
    the weights are loaded.
    """
    kind = options["_name"]
    arch = ARCH_MODEL_REGISTRY.get(kind, MODEL_REGISTRY.get(kind))
    if arch not in (TransformerLanguageModel, SwitchLanguageModel):
        raise UserError(f"{path} is a {kind}: export supports switch_gmoe* and transformer_lm*")
    names = (
        "decoder_xformers_att_config",
        "quant_noise_pq",
        "quant_noise_scalar",
        "no_token_positional_embeddings",
    )
    problems = [f"with {flag_of(name)}" for name in names if options.get(name)]
    activation = options["activation_fn"]
    if activation not in ACTIVATIONS:
        problems.append(f"with --activation-fn {activation}")
    if options.get("members", 1) > 1:
        problems.append("as a UMix of several models")
    if problems:
        raise UserError(f"{path} was trained {problems[0]}, which export does not support")


def _special_settings(task: dict[str, Any]) -> dict[str, Any]:
    """The ids of bos, eos and padding, and the classes that transformers loads.

    Text starts as in training: with bos if --add-bos-token was given, else with eos, as a stream
    does.
    """
    end = task.get("end_token", -1)
    if end >= 0:
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    else:
        begin = BOS if task.get("add_bos_token") else EOS
        ids = {"bos_token_id": begin, "eos_token_id": EOS, "pad_token_id": PAD}
    return {**ids, "auto_map": _AUTO_MAP}


def _renamed(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of fairseq's decoder under the names of modeling_alma.py."""
    renamed = {}
    for key, value in saved.items():
        name = key.removeprefix(PREFIX)
        if name == "version":
            continue
        if not name.startswith("output_projection."):
            name = f"biogpt.{name}"
        renamed[name] = value
    return renamed


def as_gpt2(model: modeling_alma.AlmaForCausalLM) -> GPT2LMHeadModel:
    """Convert a dense model to GPT-2.

    If fairseq scales the input embeddings, they no longer equal the output layer's weights, so the
    two are untied.
    """
    old = model.config
    scale = old.hidden_size**0.5 if old.scale_embedding else 1.0
    same_names = [*GPT2Config.attribute_map, "vocab_size"]
    same_names += ["bos_token_id", "eos_token_id", "pad_token_id"]
    config = GPT2Config(**{name: getattr(old, name) for name in same_names})
    config.n_inner = old.intermediate_size
    config.activation_function = old.hidden_act
    config.tie_word_embeddings = old.tie_word_embeddings and scale == 1
    state = {name.removeprefix("biogpt."): value for name, value in model.state_dict().items()}
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(config)
    gpt2.load_state_dict(to_gpt2(state, config.n_layer, scale), strict=True, assign=True)
    gpt2.tie_weights()
    return gpt2


def tokenizer_of(directory: Path, config: Any) -> PreTrainedTokenizerFast:
    """A stream's tokenizer for transformers; `config`: the model's.

    Token ids are the stream's. A newline becomes eos, which ends every line of a stream. Text
    starts as in training (see `_special_settings`). Raises UserError if `directory` is no stream or
    damaged, or if its tokenizer is not BPE or has another vocabulary than the model.
    """
    stream = Stream.load(directory)
    stream.check([])
    if {"tokenizer.json", "vocab.json"} & stream.files.keys():
        return _tokenizer_of_model(stream, config)
    is_gpt2 = "vocab.bpe" in stream.files
    if is_gpt2:
        tokens, merges = _gpt2_merges(directory)
    else:
        tokens, merges = _sentencepiece_merges(directory)
    entries = len(tokens) + SPECIALS
    if entries != config.vocab_size:
        problem = f"a dictionary of {entries:,} entries, the checkpoint of {config.vocab_size:,}"
        remedy = "give the stream that the model was trained on"
        raise UserError(f"{directory} has {problem}: {remedy}")
    special = {"<s>": BOS, "<pad>": PAD, "\n": EOS, "<unk>": UNK}
    clash = special.keys() & set(tokens)
    if clash:
        raise UserError(f"{directory}: the token {clash.pop()} has the name of a special token")
    vocabulary = special | {token: i + SPECIALS for i, token in enumerate(tokens)}
    tokenizer = _bpe_tokenizer(vocabulary, merges, is_gpt2)
    begin = "<s>" if config.bos_token_id == BOS else "\n"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"],
        pair=[begin, "$A", "$B"],
        special_tokens=[(begin, vocabulary[begin])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token="\n",
        pad_token="<pad>",
        padding_side="left",  # so that a batch of prompts can be continued
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _tokenizer_of_model(stream: Stream, config: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the model of --init, which the stream has, with its settings.

    Text starts with the end of another one if the settings name no first token. UserError: of
    another model.
    """
    ends = config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    of_fairseq = stream.vocab_size + SPECIALS  # a model that was trained from scratch
    is_fairseqs = config.vocab_size == of_fairseq and config.pad_token_id == PAD
    if is_fairseqs or config.vocab_size < stream.vocab_size or stream.end_token not in ends:
        problem = "its tokenizer is of a model, from which the checkpoint does not start"
        raise UserError(f"{stream.directory}: {problem}: leave out --tokenizer")
    kind = PreTrainedTokenizerFast if "tokenizer.json" in stream.files else GPT2Tokenizer
    tokenizer = kind.from_pretrained(stream.directory)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stream.end_token)
    if tokenizer.bos_token is None:
        tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


def _with_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, stream: Path
) -> None:
    """Give a model the special tokens of its tokenizer, and the generation settings of a stream."""
    if (stream / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(stream)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        number = getattr(tokenizer, name)
        if name != "eos_token_id":  # a model may end its texts in several ways
            setattr(model.config, name, number)
        if getattr(model.generation_config, name) is None:
            setattr(model.generation_config, name, number)


def _gpt2_merges(directory: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens of a stream with GPT-2's tokenizer, in the order of their ids, and its merges."""
    ids = json.loads((directory / "encoder.json").read_bytes())
    tokens = sorted(ids, key=ids.__getitem__)
    lines = (directory / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]
    return tokens, [(first, second) for first, second in map(str.split, lines)]


def _sentencepiece_merges(directory: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """As `_gpt2_merges`, for a SentencePiece model; raises UserError if it is not BPE."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    tokens = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    if any(pieces.get_score(i + 3) != -i for i in range(len(tokens))):  # BPE: ranks of merges
        problem = "is not a BPE model: only those can be exported"
        raise UserError(f"{directory}/tokenizer.model {problem}")
    vocabulary = set(tokens)
    merges = []
    for token in tokens:
        for cut in range(1, len(token)):
            prefix = token[:cut]
            suffix = token[cut:]
            if prefix in vocabulary and suffix in vocabulary:
                merges.append((prefix, suffix))
    return tokens, merges


def _bpe_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], is_gpt2: bool
) -> Tokenizer:
    """A BPE tokenizer that cuts text as data_prep does, with GPT-2's bytes or SentencePiece's
    mark."""
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    if is_gpt2:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.normalizer = normalizers.Sequence(spaces)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    mark = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([*spaces, *mark])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.Fuse(),
            decoders.Replace("\n ", "\n"),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def export(
    path: str,
    out: Path,
    tokenizer: Path | None = None,
    weights: str = "trained",
    card: str | None = None,
) -> None:
    """Write the model of the checkpoint `path`, a stream's `tokenizer`, and a model's `card` into
    the directory `out`.

    UserError: as `read_model` and `tokenizer_of`; the disk is full.
    """
    transformers_logging.disable_progress_bar()
    read = read_model(path, weights)
    is_dense = not read.config.num_experts
    model = as_gpt2(read) if is_dense else read
    converted = None
    if tokenizer:
        converted = tokenizer_of(tokenizer, model.config)
        _with_settings(model, converted, tokenizer)
    (out / _CODE.name).unlink(missing_ok=True)  # left by an earlier export
    with filled(out, "config.json", (OSError, SafetensorError)) as folder:
        model.save_pretrained(folder)
        if not is_dense:
            shutil.copyfile(_CODE, folder / _CODE.name)
        if converted:
            converted.save_pretrained(folder)
        if card:
            (folder / CARD).write_text(card)
