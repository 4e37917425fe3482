"""What the reader of a page has and a test has not, small and made up: text, images, models."""

import gzip
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.alma.matrix_data import WORDS, records, write_records
from tests.byte_level import byte_level
from tests.vision.test_weeks import picture


def _words(chance: random.Random, number: int) -> list[str]:
    return ["".join(chance.choices("abcdefghiklmnoprstu", k=5)) for _ in range(number)]


def _texts(name: str, count: int) -> list[str]:
    """So many texts of 40 words, with words of their own for each name."""
    chance = random.Random(name)
    words = _words(random.Random("common"), 200) + _words(chance, 50)
    return [" ".join(chance.choices(words, k=40)) for _ in range(count)]


def _dated_lines(name: str, dates: list[str], count: int) -> bytes:
    """JSON lines, `count` for each date."""
    records = []
    for date in dates:
        for text in _texts(f"{name} {date}", count):
            records.append(json.dumps({"date": date, "text": text}))
    return "\n".join(records).encode() + b"\n"


def _months(year: int, first: int, last: int) -> list[str]:
    return [f"{year}-{month:02d}-10" for month in range(first, last + 1)]


def text_files(folder: Path, _: pytest.FixtureRequest) -> None:
    """Text without dates: files and folders under the names that the pages use."""
    import zstandard

    for name in ("wiki", "books", "webdocs"):
        (folder / f"{name}.txt").write_text("\n\n".join(_texts(name, 400)) + "\n")
    wiki = (folder / "wiki.txt").read_bytes()
    (folder / "wiki.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(wiki))
    for name in ("wiki", "books", "crawl23", "crawl24", "crawl25", "books24"):
        (folder / name).mkdir()
        (folder / name / "part.txt").write_text("\n\n".join(_texts(f"{name} part", 400)) + "\n")
    for name in ("crawl", "crawl2"):
        lines = [json.dumps({"text": text}) for text in _texts(name, 400)]
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "cc/a").mkdir(parents=True)
    for number in range(3):
        records = []
        for text in _texts(f"cc {number}", 200):
            body = text.encode()
            head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(body)}\r\n\r\n"
            records.append(head.encode() + body + b"\r\n\r\n")
        file = folder / f"cc/a/{number}.wet.gz"
        file.write_bytes(gzip.compress(b"".join(records)))


def dated_files(folder: Path, _: pytest.FixtureRequest) -> None:
    """Text with dates: news by year, a crawl by month, in one file and in one for each month."""
    years = [f"{year}-06-10" for year in range(2018, 2025)]
    (folder / "news.jsonl.gz").write_bytes(gzip.compress(_dated_lines("news", years, 120)))
    newer = _dated_lines("news", ["2025-06-10"], 120)
    (folder / "news2025.jsonl.gz").write_bytes(gzip.compress(newer))
    crawl = _dated_lines("crawl", _months(2026, 1, 4), 120)
    (folder / "crawl.jsonl.gz").write_bytes(gzip.compress(crawl))
    newer = _dated_lines("crawl", _months(2026, 5, 5), 120)
    (folder / "crawl-next.jsonl.gz").write_bytes(gzip.compress(newer))


def service(folder: Path, _: pytest.FixtureRequest) -> None:
    """The folder of a service with a crawl of three months and the files that it copies."""
    place = folder / "service"
    place.mkdir()
    for month in (1, 2, 3):
        crawl_of_month(place, month)
    examples = Path(__file__).parents[2] / "examples/monthly"
    for name in ("month.sh", "text.yaml"):
        shutil.copy2(examples / name, place)


def crawl_of_month(place: Path, month: int) -> None:
    """The crawl of a month of 2026."""
    lines = _dated_lines("crawl", _months(2026, month, month), 200)
    (place / f"crawl-2026-{month:02d}.jsonl.gz").write_bytes(gzip.compress(lines))


def april(folder: Path, _: pytest.FixtureRequest) -> None:
    """The crawl of the next month, for cron to add."""
    crawl_of_month(folder / "service", 4)


def may(folder: Path, _: pytest.FixtureRequest) -> None:
    """The month after it, in the stream."""
    place = folder / "service"
    crawl_of_month(place, 5)
    crawl = "crawl=crawl-*.jsonl.gz"
    command = ["alma", "data", crawl, "--append", "--out", "stream"]
    subprocess.run(command, cwd=place, check=True, capture_output=True)


def history_of_git(folder: Path, _: pytest.FixtureRequest) -> None:
    """What `git clone https://github.com/git/git` gets: six years, 100 commits a year.

    Each year has words of its own. `~/linux` is such a repository, too.
    """
    chance = random.Random(1)
    common = _words(chance, 200)
    lines = []
    for year in range(2008, 2014):
        words = common + _words(chance, 50)
        for number in range(100):
            message = " ".join(chance.choices(words, k=40))
            seconds = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) + number * 86_400 * 3
            who = f"A <a@b> {seconds} +0000"
            lines.append(f"commit refs/heads/main\nauthor {who}\ncommitter {who}\n")
            lines.append(f"data {len(message)}\n{message}\n")
    repository = folder / "linux"
    git = ["git", "-C", str(repository)]
    repository.mkdir()
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "fast-import", "--quiet"], input="".join(lines).encode(), check=True)
    redirection = f'[url "{repository}"]\n\tinsteadOf = https://github.com/git/git\n'
    (folder / ".gitconfig").write_text(redirection)


def _stream(folder: Path, name: str, option: str) -> None:
    """A stream with mega-batches of 1,500 words."""
    sizes = "--words 1500 --eval-words 300 --valid-words 200 --vocab-size 300"
    sources = []
    for source in ("a", "b"):
        file = folder / f".{source}.txt"
        file.write_text("\n\n".join(_texts(source, 140)) + "\n")
        sources.append(f"{source}={file}")
    command = ["alma", "data", *sources, "--out", name, *sizes.split(), *option.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def stream(folder: Path, _: pytest.FixtureRequest) -> None:
    """The stream of a page that makes none: four mega-batches."""
    _stream(folder, "stream", "--mega-batches 4")


def stream_of_average(folder: Path, _: pytest.FixtureRequest) -> None:
    """The stream that docs/results/average.md names."""
    _stream(folder, "STREAM", "--mega-batches 4")


def drifting_stream(folder: Path, _: pytest.FixtureRequest) -> None:
    """The stream of experiments/streams/drift.sh: two sources, one after the other."""
    _stream(folder, "drift_domains", "--ordered")


def gpt2_units(folder: Path, request: pytest.FixtureRequest) -> None:
    """encoder.json and vocab.bpe of GPT-2's kind."""
    for file in request.getfixturevalue("gpt2_files"):
        shutil.copy2(file, folder)


def ids_of_gpt2(folder: Path, request: pytest.FixtureRequest) -> None:
    """`data-bin`: the output of fairseq-preprocess on text in GPT-2's ids."""
    gpt2_units(folder, request)
    engine = pytest.importorskip("tokenizers").ByteLevelBPETokenizer(
        str(folder / "encoder.json"), str(folder / "vocab.bpe")
    )
    for name, count in (("train", 100), ("valid", 20), ("test", 20)):
        lines = []
        for text in _texts(name, count):
            lines.append(" ".join(map(str, engine.encode(text).ids)))
        (folder / f"{name}.ids").write_text("\n".join(lines) + "\n")
    command = "fairseq-preprocess --only-source --destdir data-bin --workers 1"
    files = [f"--{name}pref={name}.ids" for name in ("train", "valid", "test")]
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)


def gpt2_model(folder: Path, _: pytest.FixtureRequest) -> None:
    """`hub/`, from which the stand-in of `hf download` copies: a GPT-2 of width 16."""
    transformers = pytest.importorskip("transformers")
    engine = byte_level(_texts("gpt2", 50), 300, ["<|endoftext|>"])
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "hub")
    engine.save(str(folder / "hub/tokenizer.json"))


def hub_folder(folder: Path, _: pytest.FixtureRequest) -> None:
    """`news_hub/`, a data set as on the Hub: two splits in Parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "news_hub/data").mkdir(parents=True)
    for split, count in (("train", 400), ("test", 20)):
        table = pyarrow.table({"content": _texts(f"news {split}", count)})
        parquet.write_table(table, folder / f"news_hub/data/{split}-00000-of-00001.parquet")


def chats(folder: Path, request: pytest.FixtureRequest) -> None:
    """Chats in two forms, and a tokenizer with a chat template."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    gpt2_model(folder, request)
    template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "hub/tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "models").mkdir(exist_ok=True)
    (folder / "hub").rename(folder / "models/qwen")
    turns = []
    lines = []
    for question, answer in zip(_texts("question", 300), _texts("answer", 300), strict=True):
        turns.append(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
        lines.append(
            json.dumps(
                {
                    "conversations": [
                        {"from": "human", "value": f"{question}?"},
                        {"from": "gpt", "value": answer},
                    ]
                }
            )
        )
    parquet.write_table(pyarrow.table({"messages": turns}), folder / "chats.parquet")
    (folder / "sharegpt.jsonl").write_text("\n".join(lines) + "\n")


def matrices(folder: Path, _: pytest.FixtureRequest) -> None:
    """`accuracy.csv` and `scores.csv`: six models, a month apart, on the same six months."""
    for name, metric in (("accuracy", "accuracy"), ("scores", "score")):
        lines = [f"trained_until,tested_on,{metric}"]
        for model in range(1, 7):
            for month in range(1, 7):
                value = 0.8 + 0.005 * model - 0.02 * max(0, month - model)
                lines.append(f"2024-{model:02d},2024-{month:02d},{value:.4f}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def models_by_month(folder: Path, _: pytest.FixtureRequest) -> None:
    """`models/news-2024-01` to `-04`, tiny ones of Hugging Face, and `news.jsonl`, four months."""
    pytest.importorskip("transformers")
    from tests.transformers_alma.tiny import TOKENS, make_model, make_tokenizer

    write_records(folder / "news.jsonl", records())
    for month in range(1, 5):
        place = folder / "models" / f"news-2024-{month:02}"
        make_model(place, vocab_size=TOKENS)
        make_tokenizer(place, " ".join(WORDS))


def mnist(folder: Path, _: pytest.FixtureRequest) -> None:
    """The files of MNIST: 1,200 and 300 of scikit-learn's digits, 28 x 28 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    scaled = np.kron(digits.images[:1500] * 15, np.ones((1, 3, 3)))
    pixels = np.pad(scaled, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target[:1500].astype(np.uint8)
    raw = folder / "data/MNIST/raw"
    raw.mkdir(parents=True)
    parts = {"train": slice(0, 1200), "t10k": slice(1200, 1500)}
    for part, chosen in parts.items():
        for kind, array in (("images", pixels[chosen]), ("labels", labels[chosen])):
            head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            file = raw / f"{part}-{kind}-idx{array.ndim}-ubyte"
            file.write_bytes(head + array.tobytes())
    (folder / "DATA").symlink_to("data")


def image_folder(folder: Path, _: pytest.FixtureRequest) -> None:
    """`images/` with classes of 120 and 30 pictures, and pictures of the reader's own."""
    chance = np.random.RandomState(0)

    def write(file: Path, level: int) -> None:
        picture(file, chance.randint(0, level, (12, 10, 3), np.uint8))

    for name, level in (("cat", 200), ("dog", 255)):
        for part, count in (("train", 120), ("test", 30)):
            for number in range(count):
                write(folder / f"images/{part}/{name}/{number}.png", level)
    write(folder / "photos/a.jpg", 200)
    write(folder / "more/photo.jpg", 255)


def run_by_week(folder: Path, _: pytest.FixtureRequest) -> None:
    """`runs/monthly`, a run on four weeks of digits."""
    commands = (
        "python examples/weekly_digits.py shop --weeks 1-4",
        "alma images --data-root shop --by week --arch mlp --hidden 4 --epochs 1 --no-augment "
        "--out runs/monthly",
    )
    for command in commands:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def boxes_by_week(folder: Path, _: pytest.FixtureRequest) -> None:
    """`shelves.jsonl`: two weeks of pictures, each with a box."""
    chance = np.random.RandomState(0)
    records = []
    for week in (1, 2):
        for number in range(10):
            label = ("circle", "square")[number % 2]
            name = f"shelves/{week}_{number}.png"
            picture(folder / name, chance.randint(0, 255, (16, 16, 3), np.uint8))
            record = {"path": name, "label": label, "date": f"2026-01-{7 * week:02d}"}
            records.append(record | {"boxes": [[2, 2, 12, 12]]})
    lines = [json.dumps(record) for record in records]
    (folder / "shelves.jsonl").write_text("\n".join(lines) + "\n")


Material = Callable[[Path, pytest.FixtureRequest], None]
