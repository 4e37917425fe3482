"""Sound inputs, made by the product itself, each once: SOUND/NAME."""

import bz2
import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import zstandard

from tests.broken_input import judge

TINY = (
    "--arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2 "
    "--moe-expert-count 2 --tokens-per-sample 32 --max-tokens 256 --lr 5e-3 --max-update 4 --log-format json "
    "--num-workers 0 --no-epoch-checkpoints"
)
DENSE = TINY.replace("switch_gmoe_tiny", "transformer_lm").replace("--moe-expert-count 2 ", "")
"""The same without experts: another architecture."""
SIZES = "--valid-words 300 --vocab-size 300 --workers 1"
GPT2 = "--bpe gpt2 --gpt2-encoder-json gpt2/encoder.json --gpt2-vocab-bpe gpt2/vocab.bpe"
LAUNCH = f"train stream --learner sm --out runs/lm -- {TINY}"
DIGITS = "images --megabatches 3 --epochs 1 --hidden 4"


class Sound:
    """The folder of sound inputs; `get(name)` makes one that is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Path:
        """The file or folder `name`."""
        path = self.folder / name
        done = self.folder / f".{name.replace('/', '_')}.done"
        if not done.exists():
            if path.is_dir():
                shutil.rmtree(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            MAKERS[name](self)
            done.touch()
        return path

    def copy(self, names: Sequence[str], folder: Path) -> None:
        """Copy inputs to the same names in `folder`."""
        folder.mkdir(exist_ok=True)
        for name in names:
            source, target = self.get(name), folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)

    def call(self, words: str, *needs: str, expected: int = 0) -> None:
        """Run a command in the folder. RuntimeError: it fails."""
        for name in needs:
            self.get(name)
        main = judge.main_of(words.split())
        ended = judge.run(main, self.folder, self.folder / ".log", limited=False)
        if ended.code != expected:
            raise RuntimeError(f"{words}: exit code {ended.code}\n{ended.out}\n{ended.err}")


def _documents() -> list[str]:
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    return [f"{text[k : k + 250]}\n{text[k + 250 : k + 400]}" for text in texts for k in range(0, 1600, 400)]


def _corpus(sound: Sound) -> None:
    import pyarrow
    from pyarrow import parquet

    folder = sound.folder / "corpus"
    (folder / "AA").mkdir(parents=True)
    parts = [_documents()[k::8][:40] for k in range(8)]
    blocks = ["\n\n".join(part).encode() for part in parts]
    lines = [
        "".join(json.dumps({"text": each, "id": k}) + "\n" for k, each in enumerate(part)) for part in parts
    ]
    docs = ["".join(f'<doc id="{k}">\n{each}\n</doc>\n' for k, each in enumerate(part)) for part in parts]
    heads = [
        f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(d.encode())}\r\n\r\n{d}\r\n\r\n"
        for d in parts[4]
    ]
    packer = zstandard.ZstdCompressor(write_checksum=True)
    for name, data in {
        "help.txt": blocks[0],
        "notes.md.gz": gzip.compress(blocks[1]),
        "books.txt.zst": packer.compress(blocks[2]),
        "web.jsonl": lines[3].encode(),
        "web2.jsonl.gz": gzip.compress(lines[7].encode()),
        "crawl.warc.wet": "".join(heads).encode(),
        "AA/wiki_00.bz2": bz2.compress(docs[5].encode()),
    }.items():
        (folder / name).write_bytes(data)
    parquet.write_table(
        pyarrow.table({"text": parts[6], "id": list(range(len(parts[6])))}), folder / "table.parquet"
    )


def _gpt2(sound: Sound) -> None:
    from tokenizers import pre_tokenizers

    folder = sound.folder / "gpt2"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("\u0120", "a")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))


def _order(sound: Sound) -> None:
    (sound.folder / "order.yaml").write_text("- help\n- [notes, books]\n- web\n")


def _preprocessed(sound: Sound) -> None:
    stream, folder = sound.get("stream"), sound.folder / "preprocessed"
    folder.mkdir()
    shutil.copy(stream / "dict.txt", folder)
    for suffix in (".bin", ".idx"):
        shutil.copy(stream / f"megabatch_00/train{suffix}", folder)
        shutil.copy(stream / f"valid{suffix}", folder)


def _tokenizer(sound: Sound) -> None:
    shutil.copy(sound.get("stream") / "tokenizer.model", sound.folder)


def _mnist(sound: Sound, packed: bool = False) -> None:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels, labels = (found.images * 15).astype("uint8"), found.target.astype("uint8")
    raw = sound.folder / ("mnist_gz" if packed else "mnist") / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, chosen in (("train", slice(0, 200)), ("t10k", slice(200, 300))):
        for name, array, code in (("images-idx3", pixels[chosen], 3), ("labels-idx1", labels[chosen], 1)):
            data = struct.pack(f">I{array.ndim}I", 0x800 + code, *array.shape) + array.tobytes()
            path = raw / f"{part}-{name}-ubyte{'.gz' * packed}"
            path.write_bytes(gzip.compress(data) if packed else data)


def _cifar(sound: Sound) -> None:
    import pickle

    folder = sound.folder / "cifar/cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(
            pickle.dumps({"data": [bytes(3072)], "labels": [0], "label_names": ["a"]})
        )


def _pictures(sound: Sound) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for label in "ab":
            folder = sound.folder / "pictures" / part / label
            folder.mkdir(parents=True)
            for k, suffix in enumerate(("png", "jpg", "bmp", "webp", "tif", "ppm")):
                Image.fromarray(rng.integers(0, 255, (9, 8, 3), np.uint8)).save(folder / f"{k}.{suffix}")


def _digits(sound: Sound) -> None:
    """A run that stopped in its last stage: rows up to t = 2, a checkpoint of the stage before."""
    from alma.records import Run

    append = Run.append

    def stop(run, row) -> None:
        if row["t"] == 3:
            raise KeyboardInterrupt
        append(run, row)

    Run.append = stop  # type: ignore[method-assign, assignment]
    sound.call(f"{DIGITS} --save-interval 0 --out runs/digits", expected=130)
    Run.append = append  # type: ignore[method-assign]


def _sweep(sound: Sound) -> None:
    for learner in ("sm", "gmoe"):
        for seed in (0, 1):
            out = f"runs/sweep/{learner}_{seed}"
            more = "--average .9" if learner == "sm" and seed else "--scenario rotated" * (seed == 1)
            sound.call(f"{DIGITS} --learner {learner} --save-stages --seed {seed} {more} --out {out}")


def _lm(sound: Sound) -> None:
    """Both stages of a language model."""
    sound.call(LAUNCH, "stream")


def _lm_half(sound: Sound) -> None:
    """The run before its last evaluation."""
    shutil.copytree(sound.get("runs/lm"), sound.folder / "half/runs/lm")
    run = sound.folder / "half/runs/lm"
    (run / "stage_01/result.json").unlink()
    lines = (run / "results.jsonl").read_text().splitlines(keepends=True)
    (run / "results.jsonl").write_text("".join(lines[:-1]))


def _models(sound: Sound) -> None:
    """Two members, their checkpoints in a row, and an ensemble."""
    for k, flags in (("a", "--save-interval-updates 1 --keep-interval-updates 3"), ("b", "--seed 2")):
        words = f"fairseq-train stream --task alma_lm {TINY} --save-dir models/{k} {flags}"
        sound.call(words, "stream")


def _dense(sound: Sound) -> None:
    sound.call(f"fairseq-train stream --task alma_lm {DENSE} --save-dir dense", "stream")


def _jobs(sound: Sound) -> None:
    """A run submitted to SLURM: one training failed, its evaluation waits."""
    run = sound.folder / "runs/jobs"
    (run / "stage_00").mkdir(parents=True)
    log = {"loss": "5.1", "ppl": "34.2", "num_updates": "4", "ups": "2"}
    text = f"2026-01-01 00:00:00 | INFO | train_inner | {json.dumps(log)}\nRuntimeError: out of memory\n"
    (run / "stage_00/train.log").write_text(text)
    entries = []
    for k, (kind, marker) in enumerate((("train", "trained.json"), ("evaluate", "result.json"))):
        entry = {"name": f"stage 0, {kind}", "kind": kind, "stage": 0, "directory": "stage_00"}
        entry |= {"marker": f"stage_00/{marker}", "updates": 4 if not k else None, "job": f"7{k}"}
        entries.append(entry | {"log": f"runs/jobs/slurm_{k}.out", "needs": [0] if k else []})
    (run / "jobs.json").write_text(json.dumps({"version": 1, "units": entries}))
    (run / "slurm_0.out").write_text(text)


def _experiments(sound: Sound) -> None:
    folder = sound.folder / "experiments"
    (folder / "sizes").mkdir(parents=True)
    (folder / "images.yaml").write_text(
        "learner: [sm, ens]\nwaiting-time: 1\nmegabatches: 3\n"
        "runs:\n- {lr: 0.5}\n- {learner: gmoe, router: flat}\n"
    )
    (folder / "one.yaml").write_text("learner: sm\nmegabatches: 2\nepochs: 1\nhidden: 4\n")
    (folder / "text.yaml").write_text(
        "learner: gmoe\ngrow-experts: 1\nsize: small\nflags:\n  dropout: [0, 0.1]\n"
    )
    flags = TINY.replace("--no-epoch-checkpoints", "").split("--")[1:]
    lines = "".join(f"  {name}: {value}\n" for name, value in (flag.split() for flag in flags))
    (folder / "sizes/small.yaml").write_text(f"seed: 1\nflags:\n{lines}")
    (folder / "lines.json").write_text(json.dumps([["stream", "--task", "alma_lm", *TINY.split()]]))


def _slurm(sound: Sound) -> None:
    folder = sound.folder / "bin"
    folder.mkdir()
    for name, answer in (("squeue", "70|RUNNING|node1|0|None|"), ("sacct", ""), ("scancel", "")):
        (folder / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        os.chmod(folder / name, 0o755)


MAKERS: dict[str, Callable[[Sound], object]] = {
    "corpus": _corpus,
    "gpt2": _gpt2,
    "order.yaml": _order,
    "stream": lambda s: s.call(
        f"data text=corpus --out stream --mega-batches 2 --words 2000 {SIZES}", "corpus"
    ),
    "ordered": lambda s: s.call(
        "data a=corpus/help.txt b=corpus/notes.md.gz c=corpus/books.txt.zst --ordered --out ordered "
        f"{GPT2} --eval-words 200 --valid-words 100 --workers 1",
        "corpus",
        "gpt2",
    ),
    "tokenizer.model": _tokenizer,
    "preprocessed": _preprocessed,
    "mnist": _mnist,
    "mnist_gz": lambda sound: _mnist(sound, packed=True),
    "cifar": _cifar,
    "pictures": _pictures,
    "runs/digits": _digits,
    "runs/sweep": _sweep,
    "runs/lm": _lm,
    "half": _lm_half,
    "runs/jobs": _jobs,
    "models": _models,
    "dense": _dense,
    "experiments": _experiments,
    "bin": _slurm,
}
"""How each input is made."""
