"""Stand-in for fairseq_alma.check: the flags in the tests,
with the defaults of fairseq and alma_lm."""

import argparse
import json
import sys
from typing import NoReturn

ARCHS = {
    "switch_gmoe": (6, 512, 8),
    "switch_gmoe_base": (6, 512, 8),
    "switch_gmoe_large": (12, 768, 12),
    "switch_gmoe_tiny": (4, 128, 4),
    "transformer_lm": (6, 512, 8),
    "lstm_lm": (1, 512, 0),
}
ON = (
    "cpu fp16 bf16 memory-efficient-fp16 memory-efficient-bf16 no-epoch-checkpoints "
    "checkpoint-activations offload-activations moe-expert-parallel "
    "share-decoder-input-output-embed decoder-learned-pos "
    "store-ema no-save no-last-checkpoints decoder-normalize-before no-decoder-final-norm "
    "skip-remainder-batch grouped-shuffling"
).split()
NUMBERS = """
    max-update=120000 max-epoch=0 tokens-per-sample=512 max-tokens= batch-size=
    required-batch-size-multiple=8 decoder-layers= decoder-embed-dim= decoder-ffn-embed-dim=
    decoder-attention-heads= max-target-positions= distributed-world-size=1 warmup-updates=500
    total-num-update= megabatch-words=0 megabatch-tokens=0 megabatch-seed=1 num-workers=0
    log-interval=100 save-interval-updates=5000 keep-interval-updates=1
""".split()
TEXTS = """
    optimizer=adam lr=1e-3 lr-scheduler= schedule=stage ema-decay=0.9999 ema-poly=
    adam-betas=(0.9,0.98) adam-eps=1e-8 clip-norm=1.0
    gpt2-encoder-json=https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/encoder.json
    dropout=0.1 attention-dropout=0.0 criterion=cross_entropy sample-break-mode=none log-format=
    update-freq= tensorboard-logdir= weight-decay=0.0 grow-noise=0.1 warmup-init-lr=
    checkpoint-suffix= ddp-backend=pytorch_ddp zero-sharding=none init=
""".split()
"""NAME=DEFAULT; without a default: None."""


class Refused(Exception):
    """Flags that fairseq-train would refuse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(
            message.removeprefix("argument ").replace(
                "unrecognized arguments:", "unrecognized argument"
            )
        )


def resolve(words: list[str]) -> dict:
    """Arch and settings, as `python -m fairseq_alma.check` prints them."""
    parser = _Parser(allow_abbrev=False)
    add = parser.add_argument
    add("data")
    add("--task", required=True)
    add("--arch", "-a", default="switch_gmoe", choices=ARCHS)
    for name in ON:
        add(f"--{name}", action="store_true")
    for kind, options in ((int, NUMBERS), (str, TEXTS)):
        for name, _, default in (option.partition("=") for option in options):
            names = (f"--{name}", "--max-sentences") if name == "batch-size" else (f"--{name}",)
            add(*names, type=kind, default=default or None)
    args, remaining = parser.parse_known_args(words)
    model_parser = _Parser(allow_abbrev=False)
    switch = args.arch.startswith("switch_")
    if switch:
        for name, default in (("moe-expert-count", 4), ("moe-freq", 2), ("members", 1)):
            model_parser.add_argument(f"--{name}", type=int, default=default)
    if args.criterion == "chunked_cross_entropy":
        model_parser.add_argument("--loss-chunk-tokens", type=int, default=1024)
    flags = vars(args) | vars(model_parser.parse_args(remaining))
    if args.max_epoch and not any(word.startswith("--max-update") for word in words):
        flags["max_update"] = 0
    layers, dim, heads = ARCHS[args.arch]
    flags["checkpoint_suffix"] = flags["checkpoint_suffix"] or ""
    flags["decoder_layers"] = flags["decoder_layers"] or layers
    flags["decoder_embed_dim"] = flags["decoder_embed_dim"] or dim
    flags["decoder_attention_heads"] = flags["decoder_attention_heads"] or heads
    ffn = 4 * flags["decoder_embed_dim"] if switch else 2048
    flags["decoder_ffn_embed_dim"] = flags["decoder_ffn_embed_dim"] or ffn
    flags["decoder_input_dim"] = flags["decoder_output_dim"] = (
        flags["decoder_embed_dim"] if switch else 512
    )
    if switch:
        flags |= {"decoder_learned_pos": True, "share_decoder_input_output_embed": True}
        flags["decoder_normalize_before"] = True
    if flags["batch_size"] is None and flags["max_tokens"] is None:
        flags["batch_size"], flags["update_freq"] = 8, flags["update_freq"] or "3"
    usual = "fixed" if flags["schedule"] == "continuous" else "polynomial_decay"
    flags["lr_scheduler"] = flags["lr_scheduler"] or usual
    flags["total_num_update"] = flags["total_num_update"] or flags["max_update"]
    flags["update_freq"] = [int(number) for number in (flags["update_freq"] or "1").split(",")]
    for name in ("lr", "attention_dropout", "dropout", "grow_noise", "ema_decay"):
        flags[name] = [float(flags[name])] if name == "lr" else float(flags[name])
    flags["no_epoch_checkpoints"] = True
    flags["init_sha256"] = "0f" if flags["init"] else ""
    if not switch:
        flags["moe_expert_parallel"] = None
    settings = {
        f"--{name.replace('_', '-')}": value for name, value in flags.items() if name != "data"
    }
    return {"arch": args.arch, "settings": settings}


if __name__ == "__main__":
    try:
        print(json.dumps([resolve(words) for words in json.load(sys.stdin)]))
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(2)
