"""A small synthetic corpus, and a way to run the command line in this process."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from data_prep import __main__ as cli
from data_prep import compressed, inspect

from .small_streams import random_documents, write_stream

FEW = settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],  # without shrinking, which would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LETTERS = str.maketrans("0123456789x.-", "bdfgklmnprsta")  # the tokenizer knows them all
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


def make_documents(seed: int, number: int, longest: int = 8) -> list[str]:
    """`number` distinct documents of 1 to `longest` lines of 1 to 12 words."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choices(SYLLABLES, k=rng.choice([1, 1, 2, 2, 3])))

    def line() -> str:
        return " ".join(word() for _ in range(rng.randint(1, 12)))

    documents = []
    for n in range(number):
        lines = [line() for _ in range(rng.randint(1, longest))]
        documents.append(f"document{seed}x{n} " + "\n".join(lines))
    return documents


def edited(text: str, words: int, seed: int) -> str:
    """The text with some of its words replaced."""
    rng = random.Random(seed)
    text_words = text.split(" ")
    for at in rng.sample(range(len(text_words)), min(words, len(text_words))):
        text_words[at] = f"new{rng.random()}"
    return " ".join(text_words)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """alpha.txt and web.txt, with duplicates within and across them."""
    alpha = make_documents(1, 300)
    web = make_documents(2, 200)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "alpha.txt").write_text("\n\n".join(alpha + alpha[:20] + web[:10]), "utf-8")
    (folder / "web.txt").write_text("\n\n".join(web + alpha[50:60]) + "\n", "utf-8")
    return folder


@pytest.fixture
def near(tmp_path) -> list[str]:
    """Sources a, b and c; the later ones have edited copies of documents of earlier ones."""
    folder = tmp_path / "near"
    folder.mkdir()
    old: list[str] = []
    for number, name in enumerate("abc"):
        new = [text.translate(LETTERS) for text in make_documents(number, 40, 30)]
        edited_texts = [
            edited(text, 1, seed).translate(LETTERS) for seed, text in enumerate(new[:12])
        ]
        copies = [
            edited(text, seed % 4, seed).translate(LETTERS) for seed, text in enumerate(old[::2])
        ]
        old += new + edited_texts + copies
        (folder / f"{name}.txt").write_text("\n\n".join([*new, *edited_texts, *copies]), "utf-8")
    return [f"{name}={folder / name}.txt" for name in "abc"]


def run(main: Callable[[], None], *words: object) -> None:
    """Run a command with these words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["alma", *map(str, words)])
        main()


def make(*arguments: object, out: Path, **flags: object) -> Path:
    """`alma data` with these arguments; sizes are small by default."""
    defaults = {
        "mega_batches": 3,
        "words": 1500,
        "valid_words": 300,
        "vocab_size": 120,
        "workers": 1,
    }
    options = {"out": out, **defaults, **flags}
    settings = {
        name.replace("_", "-"): value for name, value in options.items() if value is not None
    }
    run(cli.main, *arguments, *(f"--{name}={value}" for name, value in settings.items()))
    return out


@pytest.fixture
def prepare() -> Callable[..., Path]:
    return make


def outcome(main: Callable[[], None], captured: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; `captured`: capsys or capfd."""
    captured.readouterr()
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    return code, *captured.readouterr()


@pytest.fixture
def inspected(capsys):
    """Run the command; returns exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        words = arguments if "--workers" in arguments else (*arguments, "--workers", 1)
        return outcome(lambda: run(inspect.main, *words), capsys)

    return call


@pytest.fixture
def iid_stream(tmp_path):
    """Three mega-batches of 200 documents, all i.i.d."""
    sizes = (200, 200, 200, 40, 150)
    return write_stream(tmp_path / "stream", [random_documents(i, n) for i, n in enumerate(sizes)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Limits documents to 20 bytes; the argument is the size of blocks."""
    monkeypatch.setattr(compressed, "MAX_DOCUMENT_BYTES", 20)
    return lambda size: monkeypatch.setattr(compressed, "BLOCK", size)
