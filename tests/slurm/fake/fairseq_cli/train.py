"""Stand-in for fairseq-train: a model is a number, an update hashes and saves it.

FAKE_CRASH=stage:update:how: fail there; `how` is `user`, `python` or `kill`. FAKE_SLEEP: seconds
per update. FAKE_PIDS: file for the process id. SIGUSR1 ends it after the current update, to be run
again.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

logging.basicConfig(
    format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", stream=sys.stdout, level=20
)
parser = argparse.ArgumentParser()
parser.add_argument("data")
for name in ("--save-dir", "--finetune-from-model"):
    parser.add_argument(name, type=Path)
for name in ("--stage", "--max-update", "--moe-expert-count", "--seed", "--distributed-rank"):
    parser.add_argument(name, type=int, default=0)
parser.add_argument("--schedule")
args, _ = parser.parse_known_args()


signals: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))


def crash(how: str) -> None:
    """Fail as real children do."""
    if how == "user":
        print("error: stream/train.bin: truncated; copy it again", file=sys.stderr)
        sys.exit(2)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("CUDA error: out of luck")


def save(state: dict, name: str) -> None:
    """Write a checkpoint atomically; of several processes the first one writes, as in fairseq."""
    if args.distributed_rank:
        return
    temporary = args.save_dir / "temporary"
    temporary.write_text(json.dumps(state))
    temporary.replace(args.save_dir / name)


with open(os.environ["FAKE_PIDS"], "a") as file:
    file.write(f"{os.getpid()}\n")
logging.getLogger("fairseq_cli.train").info("model: SwitchLanguageModel")
logging.getLogger("fairseq.trainer").info("begin training epoch 1")
print(f"GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
print(f"threads: {os.environ.get('OMP_NUM_THREADS')}", flush=True)
last = args.save_dir / "checkpoint_last.pt"
if last.exists():
    state = json.loads(last.read_text())
else:
    parent = (
        json.loads(args.finetune_from_model.read_text())
        if args.finetune_from_model
        else {"model": ""}
    )
    updates = parent["updates"] if args.schedule == "continuous" and args.finetune_from_model else 0
    state = {"model": parent["model"], "updates": updates, "experts": args.moe_expert_count}
while state["updates"] < args.max_update:
    at, _, how = os.environ.get("FAKE_CRASH", "").rpartition(":")
    if at == f"{args.stage}:{state['updates']}":
        crash(how)
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    text = f"{state['model']} {args.stage} {state['updates']} {args.seed}"
    state |= {"model": hashlib.sha256(text.encode()).hexdigest(), "updates": state["updates"] + 1}
    save(state, "checkpoint_last.pt")
    stats = {
        "epoch": 1,
        "loss": "8.9",
        "ppl": "478",
        "wps": "3100",
        "num_updates": str(state["updates"]),
    }
    logging.getLogger("train_inner").info(json.dumps(stats))
    if signals and state["updates"] < args.max_update:
        sys.exit(os.EX_TEMPFAIL)
save(state, "checkpoint_best.pt")
