"""Stands for the evaluation: the perplexity is the first digits of the fake model."""

import argparse
import json
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--untrained", action="store_true")
parser.add_argument("--path", type=Path)
parser.add_argument("--out", type=Path)
parser.add_argument("--moe-expert-count", type=int)
args, unknown = parser.parse_known_args()
if "--nonsense" in unknown:
    parser.error("unrecognized arguments: --nonsense")

state = None if args.untrained else json.loads(args.path.read_text())
experts = state["experts"] if state else args.moe_expert_count
training = state and {
    "updates": state["updates"],
    "tokens": 100 * state["updates"],
    "flops": 1e12 * state["updates"],
    "growth_flops": 1e9,
    "seconds": time.time(),
    "peak_memory_bytes": 1000,
}
result = {
    "nll": 6.2,
    "perplexity": int(state["model"][:6], 16) / 1000 if state else 5000.0,
    "tokens": 1000,
    "words": 800,
    "bytes": None,
    "perplexity_per_word": 2000.0,
    "bits_per_byte": None,
    "parameters": 1000 * experts,
    "eval_flops_per_example": 1e6,
    "experts": {"1": {"share": [1 / experts] * experts, "loss": [6.2] * experts}},
    "expert_count": experts,
    "training": training,
}
temporary = args.out.with_suffix(".temporary")
temporary.write_text(json.dumps(result))
temporary.replace(args.out)
