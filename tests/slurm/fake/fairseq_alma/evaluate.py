"""Stand-in for fairseq_alma.evaluate: the perplexity is the mean of the first digits of the fake
models.

FAKE_UNTRAINED: the evaluation of the untrained model fails. FAKE_TF32: trainings had TF32.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--untrained", "--valid"):
    parser.add_argument(name, action="store_true")
for name, default in (("--path", ""), ("--seeds", "0"), ("--weights", "trained")):
    parser.add_argument(name, default=default)
parser.add_argument("--out", type=Path)
parser.add_argument("--moe-expert-count", type=int)
args, _ = parser.parse_known_args()
if args.untrained and "FAKE_UNTRAINED" in os.environ:
    print("error: stream/test.bin: truncated; copy it again", file=sys.stderr)
    sys.exit(2)

states = [json.loads(Path(path).read_text()) for path in args.path.split(":") if path]
experts = states[0]["experts"] if states else args.moe_expert_count
members = len(states) or len(args.seeds.split(","))
training = [
    {
        "updates": state["updates"],
        "tokens": 100 * state["updates"],
        "flops": 1e12 * state["updates"],
        "growth_flops": 1e9,
        "validation_flops": 5e8,
        "seconds": time.time(),
        "peak_memory_bytes": 1000,
    }
    for state in states
]
if "FAKE_TF32" in os.environ:
    for costs in training:
        costs["tf32"] = True
values = [int(state["model"][:6], 16) / 1000 for state in states] or [5000.0]
result = {
    "nll": 6.2,
    "perplexity": sum(values) / len(values),
    "tokens": 1000,
    "words": 800,
    "bytes": None,
    "perplexity_per_word": 2000.0,
    "bits_per_byte": None,
    "parameters": 1000 * experts * members,
    "eval_flops_per_example": 1e6,
    "experts": {"1": {"share": [1 / experts] * experts, "loss": [6.2] * experts}},
    "members": members,
    "expert_count": experts,
    "training": training,
    **({"raw": {"nll": 6.3, "perplexity": 544.6}} if args.weights != "trained" else {}),
    **({"valid": {"loss": 6.1, "perplexity": 400.0}} if args.valid else {}),
}
temporary = args.out.with_suffix(".temporary")
temporary.write_text(json.dumps(result))
temporary.replace(args.out)
