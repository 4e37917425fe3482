"""Convert a checkpoint to a directory that Hugging Face transformers loads (see `fairseq_alma.export`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from alma.errors import UserError
from alma.files import filled
from alma.stream import Stream
from fairseq_alma import modeling_alma
from fairseq_alma.checkpoint import PREFIX, memory_map_members, reading
from fairseq_alma.switch_lm import SwitchLanguageModel

BOS, PAD, EOS, UNK = range(4)  # ids of fairseq's special tokens
_CODE = Path(modeling_alma.__file__)
_ACTIVATIONS = {  # fairseq's name -> transformers' name
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}


def read_model(path: str, weights: str = "trained") -> modeling_alma.AlmaForCausalLM:
    """The model of a checkpoint; `weights`: as `checkpoint.with_weights`.

    UserError: missing, damaged, without a weight average, or a model that modeling_alma.py does not support.
    """
    (state,) = memory_map_members([path], weights)
    with reading(path):  # a KeyError: the config or the weights are incomplete
        options, saved = state["cfg"]["model"], state["model"]
        # What names and shapes of weights do not show, and modeling_alma.py does not compute:
        kind = options["_name"]
        arch = ARCH_MODEL_REGISTRY.get(kind, MODEL_REGISTRY.get(kind))
        if arch not in (TransformerLanguageModel, SwitchLanguageModel):
            raise UserError(f"{path} is a {kind}: export supports switch_gmoe* and transformer_lm")
        flags = ("decoder_xformers_att_config", "quant_noise_pq", "quant_noise_scalar")
        problems = [f"with --{flag}" for flag in flags if options.get(flag)]
        if options["activation_fn"] not in _ACTIVATIONS:
            problems.append(f"with --activation-fn {options['activation_fn']}")
        if options.get("members", 1) > 1:
            problems.append("as a UMix of several models")
        if problems:
            problem = problems[0].replace("_", "-")
            raise UserError(f"{path} was trained {problem}, which export does not support")
        # Text starts as in training: with bos if --add-bos-token was given, else with eos, as a stream does.
        begin = BOS if state["cfg"]["task"].get("add_bos_token") else EOS
        special: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": EOS, "pad_token_id": PAD}
        kinds = {"Config": "Config", "Model": "Model", "ModelForCausalLM": "ForCausalLM"}
        special["auto_map"] = {f"Auto{auto}": f"{_CODE.stem}.Alma{name}" for auto, name in kinds.items()}
        # Positions start at PAD + 1 in both.
        positions = saved.get(f"{PREFIX}embed_positions.weight", ())
        config = modeling_alma.AlmaConfig(
            vocab_size=len(saved[f"{PREFIX}embed_tokens.weight"]),
            hidden_size=options["decoder_embed_dim"],
            num_hidden_layers=options["decoder_layers"],
            num_attention_heads=options["decoder_attention_heads"],
            intermediate_size=options["decoder_ffn_embed_dim"],
            hidden_act=_ACTIVATIONS[options["activation_fn"]],
            max_position_embeddings=max(0, len(positions) - PAD - 1),
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
            raise UserError(
                f"{path}: {problem} Export supports switch_gmoe* and transformer_lm with learned positions "
                "and --decoder-normalize-before"
            ) from error
    model.tie_weights()
    return model


def tokenizer_of(directory: Path, config: Any) -> PreTrainedTokenizerFast:
    """A stream's tokenizer for transformers; `config`: the model's.

    Ids are those of the stream, in which eos ends every line: a newline is eos. Text starts as in training
    (see `read_model`). UserError: not a stream, damaged, another vocabulary, not BPE.
    """
    stream = Stream.load(directory)
    stream.check([])
    if {"tokenizer.json", "vocab.json"} & stream.files.keys():
        what = "its tokenizer is a model's own, whose ids are 4 lower, and cannot be exported"
        raise UserError(f"{directory}: {what}; use that of the model")
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
    if len(tokens) + 4 != config.vocab_size:
        raise UserError(
            f"{directory} has a dictionary of {len(tokens) + 4:,} entries, the checkpoint of "
            f"{config.vocab_size:,}: give the stream that the model was trained on"
        )
    special = {"<s>": BOS, "<pad>": PAD, "\n": EOS, "<unk>": UNK}
    if clash := special.keys() & set(tokens):
        raise UserError(f"{directory}: the token {clash.pop()} has the name of a special token")
    vocabulary = special | {token: i + 4 for i, token in enumerate(tokens)}
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
    made.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, vocabulary[begin])]
    )
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
    model = read_model(path, weights)
    converted = tokenizer_of(tokenizer, model.config) if tokenizer else None
    with filled(out, "config.json", (OSError, SafetensorError)) as folder:
        model.save_pretrained(folder)
        shutil.copyfile(_CODE, folder / _CODE.name)
        if converted:
            converted.save_pretrained(folder)
