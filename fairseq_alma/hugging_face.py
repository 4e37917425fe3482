"""Convert a checkpoint to a directory that Hugging Face transformers loads (see `fairseq_alma.export`)."""

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
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from alma.errors import UserError
from alma.files import filled
from alma.options import flag_of
from alma.stream import SPECIALS, Stream
from fairseq_alma import modeling_alma
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.initial import ACTIVATIONS, BOS, EOS, PAD, UNK, model_rows, to_gpt2
from fairseq_alma.switch_lm import SwitchLanguageModel

_CODE = Path(modeling_alma.__file__)


def read_model(path: str, weights: str = "trained") -> modeling_alma.AlmaForCausalLM:
    """The model of a checkpoint; `weights`: as `checkpoint.with_weights`.

    UserError: missing, damaged, without a weight average, or a model that modeling_alma.py does not support.
    """
    (state,) = memory_map_members([path], weights)
    with reading(path):  # a KeyError: the config or the weights are incomplete
        options, task, saved = state["cfg"]["model"], state["cfg"]["task"], dict(state["model"])
        # What names and shapes of weights do not show, and modeling_alma.py does not compute:
        kind = options["_name"]
        arch = ARCH_MODEL_REGISTRY.get(kind, MODEL_REGISTRY.get(kind))
        if arch not in (TransformerLanguageModel, SwitchLanguageModel):
            raise UserError(f"{path} is a {kind}: export supports switch_gmoe* and transformer_lm*")
        flags = ["decoder_xformers_att_config", "quant_noise_pq", "quant_noise_scalar"]
        flags.append("no_token_positional_embeddings")
        problems = {f"with {flag_of(flag)}": options.get(flag) for flag in flags}
        activation = options["activation_fn"]
        problems[f"with --activation-fn {activation}"] = activation not in ACTIVATIONS
        problems["as a UMix of several models"] = options.get("members", 1) > 1
        for problem in filter(problems.get, problems):
            raise UserError(f"{path} was trained {problem}, which export does not support")
        end = task.get("end_token", -1)
        for name in ("embed_tokens", "output_projection"):
            saved[f"{PREFIX}{name}.weight"] = model_rows(saved[f"{PREFIX}{name}.weight"], end)
        # Text starts as in training: with bos if --add-bos-token was given, else with eos, as a stream does.
        ids = (BOS if task.get("add_bos_token") else EOS, EOS, PAD) if end < 0 else (end, end, None)
        special: dict[str, Any] = {"bos_token_id": ids[0], "eos_token_id": ids[1], "pad_token_id": ids[2]}
        kinds = {"Config": "Config", "Model": "Model", "ModelForCausalLM": "ForCausalLM"}
        special["auto_map"] = {f"Auto{auto}": f"{_CODE.stem}.Alma{name}" for auto, name in kinds.items()}
        # Positions start at PAD + 1 in both, and sinusoids are a table, too.
        rows = (options.get("max_target_positions") or task["tokens_per_sample"]) + PAD + 1
        sinusoids = SinusoidalPositionalEmbedding.get_embedding(rows, options["decoder_embed_dim"], PAD)
        positions = saved.setdefault(f"{PREFIX}embed_positions.weight", sinusoids)
        config = modeling_alma.AlmaConfig(
            vocab_size=len(saved[f"{PREFIX}embed_tokens.weight"]),
            hidden_size=options["decoder_embed_dim"],
            num_hidden_layers=options["decoder_layers"],
            num_attention_heads=options["decoder_attention_heads"],
            intermediate_size=options["decoder_ffn_embed_dim"],
            hidden_act=ACTIVATIONS[activation],
            max_position_embeddings=len(positions) - PAD - 1,
            num_experts=options.get("moe_expert_count", 0),
            decoder_sparse_step=options.get("moe_freq", 1),
            scale_embedding=not options["no_scale_embedding"],
            tie_word_embeddings=bool(options["share_decoder_input_output_embed"]),
            **special,
        )
        renamed = {}
        for name, value in saved.items():
            name = name.removeprefix(PREFIX)
            renamed[name if name.startswith("output_projection.") else f"biogpt.{name}"] = value
        renamed.pop("biogpt.version", None)
        with torch.device("meta"):
            model = modeling_alma.AlmaForCausalLM(config)
        try:
            model.load_state_dict(renamed, strict=True, assign=True)
        except RuntimeError as error:
            problem = str(error).split("\n")[1].strip()
            known = "switch_gmoe* and transformer_lm* with --decoder-normalize-before"
            raise UserError(f"{path}: {problem} Export supports {known}") from error
    model.tie_weights()
    return model


def as_gpt2(model: modeling_alma.AlmaForCausalLM) -> GPT2LMHeadModel:
    """A dense model as GPT-2. Embeddings that are scaled differ from those of the output layer."""
    old, scale = model.config, model.config.hidden_size**0.5 if model.config.scale_embedding else 1.0
    same = [*GPT2Config.attribute_map, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"]
    config = GPT2Config(**{name: getattr(old, name) for name in same})
    config.n_inner, config.activation_function = old.intermediate_size, old.hidden_act
    config.tie_word_embeddings = old.tie_word_embeddings and scale == 1
    state = {name.removeprefix("biogpt."): value for name, value in model.state_dict().items()}
    with torch.device("meta"):
        made = GPT2LMHeadModel(config)
    made.load_state_dict(to_gpt2(state, config.n_layer, scale), strict=True, assign=True)
    made.tie_weights()
    return made


def tokenizer_of(directory: Path, config: Any) -> PreTrainedTokenizerFast:
    """A stream's tokenizer for transformers; `config`: the model's.

    Ids are those of the stream, in which eos ends every line: a newline is eos. Text starts as in training
    (see `read_model`). UserError: not a stream, damaged, another vocabulary, not BPE.
    """
    stream = Stream.load(directory)
    stream.check([])
    if {"tokenizer.json", "vocab.json"} & stream.files.keys():
        if config.pad_token_id is not None or stream.vocab_size != config.vocab_size:
            what = "its tokenizer is of a model, from which the checkpoint does not start"
            raise UserError(f"{stream.directory}: {what}: leave out --tokenizer")
        kind = PreTrainedTokenizerFast if "tokenizer.json" in stream.files else GPT2Tokenizer
        given = kind.from_pretrained(stream.directory)
        given.bos_token = given.eos_token = given.convert_ids_to_tokens(config.eos_token_id)
        return given
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    if gpt2 := "vocab.bpe" in stream.files:
        ids = json.loads((directory / "encoder.json").read_bytes())
        tokens = sorted(ids, key=ids.__getitem__)
        lines = (directory / "vocab.bpe").read_text("utf-8").split("\n")[1:-1]
        merges = [(left, right) for left, right in map(str.split, lines)]
    else:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
        tokens = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
        if any(pieces.get_score(i + 3) != -i for i in range(len(tokens))):  # BPE scores are ranks of merges
            raise UserError(f"{directory}/tokenizer.model is not a BPE model: only those can be exported")
        known = set(tokens)
        cuts = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
        merges = [(left, right) for left, right in cuts if left in known and right in known]
    if len(tokens) + SPECIALS != config.vocab_size:
        what = f"a dictionary of {len(tokens) + SPECIALS:,} entries, the checkpoint of {config.vocab_size:,}"
        raise UserError(f"{directory} has {what}: give the stream that the model was trained on")
    special = {"<s>": BOS, "<pad>": PAD, "\n": EOS, "<unk>": UNK}
    if clash := special.keys() & set(tokens):
        raise UserError(f"{directory}: the token {clash.pop()} has the name of a special token")
    vocabulary = special | {token: i + SPECIALS for i, token in enumerate(tokens)}
    if gpt2:
        made = Tokenizer(models.BPE(vocabulary, merges))
        made.normalizer = normalizers.Sequence(spaces)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
        mark = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence([*spaces, *mark])
        steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Replace("\n ", "\n")]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    begin = "<s>" if config.bos_token_id == BOS else "\n"
    one, two, special_tokens = [begin, "$A"], [begin, "$A", "$B"], [(begin, vocabulary[begin])]
    made.post_processor = processors.TemplateProcessing(one, two, special_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=begin,
        eos_token="\n",
        pad_token="<pad>",
        padding_side="left",  # so that a batch of prompts can be continued
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def export(path: str, out: Path, tokenizer: Path | None = None, weights: str = "trained") -> None:
    """Write the model of the checkpoint `path`, and a stream's `tokenizer`, into the directory `out`.

    UserError: as `read_model` and `tokenizer_of`; the disk is full.
    """
    transformers_logging.disable_progress_bar()
    read = read_model(path, weights)
    model = read if read.config.num_experts else as_gpt2(read)
    converted = tokenizer_of(tokenizer, model.config) if tokenizer else None
    (out / _CODE.name).unlink(missing_ok=True)  # of an earlier export
    with filled(out, "config.json", (OSError, SafetensorError)) as folder:
        model.save_pretrained(folder)
        if model is read:
            shutil.copyfile(_CODE, folder / _CODE.name)
        if converted:
            converted.save_pretrained(folder)
