"""An update of a small Switch Transformer by fairseq-train, beside a plain PyTorch loop of the same
model.

Both train two Switch layers on random tokens: 4 experts, capacity factor 1, 2,048 tokens an update,
vocabulary 400, fp32, one thread, Adam with its fused kernel, clipping at norm 1. The loop has no
statistics, checkpoints, data loading or seeds. `speed` is the loop's time over that of
fairseq-train.

Shapes: B batch, T time, S = B * T tokens, D width, E experts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.streams import write_stream
from benchmarks.timing import Rows, one_thread, seconds, spread

BATCH = 32
TIME = 64
VOCABULARY = 400
HEADS = 2
EXPERTS = 4
UPDATES = {16: 400, 256: 40}
"""Of a measurement, by width; fairseq's log has ten intervals of them."""


class PlainSwitch(nn.Module):
    """A Switch FFN as in the paper: a loop over experts; x (S, D) to (S, D) and the balance
    loss."""

    def __init__(self, dim: int):
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        ffns = (
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(EXPERTS)
        )
        self.experts = nn.ModuleList(ffns)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.router(x).softmax(-1)
        gate, chosen = probs.max(-1)
        y = torch.zeros_like(x)
        counts = []
        for expert, ffn in enumerate(self.experts):
            rows = (chosen == expert).nonzero().squeeze(1)
            counts.append(len(rows))
            rows = rows[: len(x) // EXPERTS]
            y = y.index_copy(0, rows, ffn(x[rows]) * gate[rows, None])
        return y, EXPERTS * torch.dot(torch.tensor(counts) / len(x), probs.mean(0))


class PlainBlock(nn.Module):
    """A pre-LN block; x (B, T, D) to (B, T, D) and the balance loss."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ffn = PlainSwitch(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(self.norm1(x)).view(BATCH, TIME, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        y, balance = self.ffn(self.norm2(x).flatten(0, 1))
        return x + y.view(x.shape), balance


class PlainModel(nn.Module):
    """Tokens (B, T) to logits (B, T, V) and the sum of the balance losses; tied output weights."""

    def __init__(self, dim: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(TIME, dim)
        self.blocks = nn.ModuleList([PlainBlock(dim), PlainBlock(dim)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions.weight
        total = torch.zeros(())
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return F.linear(self.norm(x), self.tokens.weight), total


def plain(dim: int, updates: int) -> float:
    """Seconds an update of the plain loop."""
    torch.manual_seed(0)
    model = PlainModel(dim)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, (0.9, 0.98), fused=True)
    text = torch.randint(VOCABULARY, (updates, BATCH, TIME + 1))

    def train() -> None:
        for batch in text:
            logits, balance = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return seconds(train) / updates


def through_fairseq(dim: int, updates: int, folder: Path, flags: str) -> float:
    """Seconds an update of fairseq-train: the median of its log's intervals but the first two."""
    words = f"{folder} --task alma_lm --arch switch_gmoe_tiny --decoder-layers 2"
    words += f" --decoder-embed-dim {dim} --decoder-attention-heads {HEADS}"
    words += f" --moe-freq 1 --moe-expert-count {EXPERTS} --dropout 0 --cpu"
    words += f" --tokens-per-sample {TIME} --batch-size {BATCH}"
    words += " --optimizer adam --lr 2e-3 --num-workers 0"
    words += f" --max-update {updates} --log-interval {updates // 10} --log-format json --no-save"
    words += f" --disable-validation --save-dir {folder}/none {flags}"
    done = subprocess.run(
        [sys.executable, "-m", "fairseq_cli.train", *words.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # one thread, as the loop
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    logged = [line.split("train_inner | ")[1] for line in lines if "train_inner | " in line]
    return 1 / median(float(json.loads(line)["ups"]) for line in logged[2:])


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each width and criterion; fairseq-train and the loop in turn."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_stream(Path(folder), 400_000, 200, VOCABULARY - 4)
        for dim, updates in tqdm(UPDATES.items(), disable=None, unit="width"):
            plain(dim, updates // 10)  # fills the allocator
            for flags in ("", "--criterion chunked_cross_entropy"):
                pairs = [
                    (through_fairseq(dim, updates, Path(folder), flags), plain(dim, updates))
                    for _ in range(repeats)
                ]
                row = {"D": dim, "flags": flags or "cross_entropy"}
                row["fairseq-train, ms"] = spread([1000 * ours for ours, _ in pairs])
                row["plain loop, ms"] = spread([1000 * loop for _, loop in pairs])
                row["speed"] = spread([loop / ours for ours, loop in pairs])
                rows.append(row)
    return rows
