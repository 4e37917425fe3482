"""Sound inputs: stored, or made by the product itself, each once: SOUND/NAME."""

import bz2
import gzip
import json
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import zstandard

from alma.records import Run
from tests.broken_input import judge

TINY = (
    "--arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2 "
    "--moe-expert-count 2 --tokens-per-sample 32 --max-tokens 256 --lr 5e-3 --max-update 4 "
    "--log-format json --num-workers 0 --no-epoch-checkpoints"
)
SIZES = "--valid-words 300 --vocab-size 300 --workers 1"
GPT2 = "--bpe gpt2 --gpt2-encoder-json gpt2/encoder.json --gpt2-vocab-bpe gpt2/vocab.bpe"
DIGITS = "images --megabatches 3 --epochs 1 --hidden 4"
QWEN = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
}
"""Settings of a tiny model of transformers."""
INPUTS = Path(__file__).parent / "inputs"
"""Small inputs that are stored: experiments, GPT-2's files, a run whose training
failed on SLURM, and programs of SLURM."""
COMMANDS = {
    "stream": (f"data text=corpus --out stream --mega-batches 2 --words 2000 {SIZES}", "corpus"),
    "ordered": (
        "data a=corpus/help.txt b=corpus/notes.md.gz c=corpus/books.txt.zst --ordered "
        f"--out ordered {GPT2} --eval-words 200 --valid-words 100 --workers 1",
        "corpus",
        "gpt2",
    ),
    "own": (
        "data a=corpus/help.txt b=corpus/notes.md.gz c=corpus/books.txt.zst --ordered --out own "
        "--tokenizer qwen --eval-words 200 --valid-words 100 --workers 1",
        "corpus",
        "qwen",
    ),
    "runs/lm": (f"train stream --learner sm --out runs/lm -- {TINY}", "stream"),
    "models/a": (
        f"fairseq-train stream --task alma_lm {TINY} --save-dir models/a --save-interval-updates 1 "
        "--keep-interval-updates 3",
        "stream",
    ),
    "runs/sweep/sm_0": (f"{DIGITS} --save-stages --out runs/sweep/sm_0",),
    "runs/sweep/sm_1": (f"{DIGITS} --seed 1 --average .9 --out runs/sweep/sm_1",),
    "runs/sweep/gmoe_0": (f"{DIGITS} --learner gmoe --save-stages --out runs/sweep/gmoe_0",),
}
"""Inputs that one command makes: its words, and the inputs that it needs."""


class Sound:
    """The folder of sound inputs; `get(name)` makes one that is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Path:
        """The file or folder `name`. RuntimeError: the command that makes it fails."""
        path = self.folder / name
        done = self.folder / f".{name.replace('/', '_')}.done"
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if (INPUTS / name).exists():
                _copy(INPUTS / name, path)
            elif name in COMMANDS:
                words, *needs = COMMANDS[name]
                for need in needs:
                    self.get(need)
                self.call(words)
            else:
                MAKERS[name](self, path)
            done.touch()
        return path

    def copy(self, names: Sequence[str], folder: Path) -> None:
        """Copy inputs to the same names in `folder`."""
        folder.mkdir(exist_ok=True)
        for name in names:
            _copy(self.get(name), folder / name)

    def call(self, words: str, expected: int = 0) -> None:
        """Run a command in the folder. RuntimeError: it fails."""

        def main() -> None:  # it imports in the child only
            judge.main_of(words.split())()

        ended = judge.run(main, self.folder, self.folder / ".log", limited=False)
        if ended.code != expected:
            raise RuntimeError(f"{words}: exit code {ended.code}\n{ended.out}\n{ended.err}")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def _corpus(sound: Sound, folder: Path) -> None:
    """Python's documentation in every format."""
    import pyarrow
    from pyarrow import parquet

    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    starts = range(0, 1600, 400)
    documents = [
        f"{text[k : k + 250]}\n{text[k + 250 : k + 400]}" for text in texts for k in starts
    ]
    parts = [documents[k::8][:40] for k in range(8)]
    blocks = ["\n\n".join(part).encode() for part in parts]
    lines = []
    for part in parts:
        text = "".join(json.dumps({"text": document}) + "\n" for document in part)
        lines.append(text.encode())
    dated = [{"text": text, "date": f"20{20 + k}-05-17"} for k in range(3) for text in parts[k]]
    wiki = "".join(f'<doc id="{k}">\n{text}\n</doc>\n' for k, text in enumerate(parts[5]))
    head = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length:"
    crawl = "".join(f"{head} {len(text.encode())}\r\n\r\n{text}\r\n\r\n" for text in parts[4])
    (folder / "AA").mkdir(parents=True)
    for name, data in {
        "help.txt": blocks[0],
        "notes.md.gz": gzip.compress(blocks[1]),
        "books.txt.zst": zstandard.ZstdCompressor(write_checksum=True).compress(blocks[2]),
        "web.jsonl": lines[3],
        "web2.jsonl.gz": gzip.compress(lines[7]),
        "dated.jsonl": "".join(json.dumps(line) + "\n" for line in dated).encode(),
        "crawl.warc.wet": crawl.encode(),
        "AA/wiki_00.bz2": bz2.compress(wiki.encode()),
    }.items():
        (folder / name).write_bytes(data)
    parquet.write_table(pyarrow.table({"text": parts[6]}), folder / "table.parquet")


def _mnist(sound: Sound, folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * 15).astype("uint8")
    labels = digits.target.astype("uint8")
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for part, chosen in (("train", slice(0, 200)), ("t10k", slice(200, 300))):
        for name, array, code in (
            ("images-idx3", pixels[chosen], 3),
            ("labels-idx1", labels[chosen], 1),
        ):
            data = struct.pack(f">I{array.ndim}I", 0x800 + code, *array.shape) + array.tobytes()
            (raw / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(data))


def _qwen(sound: Sound, folder: Path) -> None:
    """A model of transformers with dropout and random weights, and its tokenizer."""
    import tokenizers
    import torch
    import transformers

    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = letters
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=QWEN["vocab_size"],
        initial_alphabet=letters.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    engine.train_from_iterator(topics.values(), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|end|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.Qwen2Config(**QWEN)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _digits(sound: Sound, folder: Path) -> None:
    """A run that stopped in its last stage: rows up to t = 2, a checkpoint of the stage before."""
    append = Run.append

    def stop(run, row) -> None:
        if row["t"] == 3:
            raise KeyboardInterrupt
        append(run, row)

    Run.append = stop  # type: ignore[method-assign, assignment]
    try:
        sound.call(f"{DIGITS} --save-interval 0 --out runs/digits", expected=130)
    finally:
        Run.append = append  # type: ignore[method-assign]


def _lm_half(sound: Sound, folder: Path) -> None:
    """The run of a language model before its last evaluation."""
    run = folder / "runs/lm"
    shutil.copytree(sound.get("runs/lm"), run)
    (run / "stage_01/result.json").unlink()
    lines = (run / "results.jsonl").read_text().splitlines(keepends=True)
    (run / "results.jsonl").write_text("".join(lines[:-1]))


MAKERS: dict[str, Callable[[Sound, Path], object]] = {
    "corpus": _corpus,
    "mnist": _mnist,
    "qwen": _qwen,
    "runs/digits": _digits,
    "half": _lm_half,
    "tokenizer.model": lambda sound, path: shutil.copy(sound.get("stream") / path.name, path),
}
"""Other inputs: what writes them to a path, whose parent is there."""
