"""A small corpus of made-up text, and a way to run the command line in this process."""

import random
import sys
from pathlib import Path

import pytest

from data_prep import __main__ as cli

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]


def make_documents(seed: int, number: int, longest: int = 8) -> list[str]:
    """`number` different documents of 1 to `longest` lines of 1 to 12 words."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choices(SYLLABLES, k=rng.choice([1, 1, 2, 2, 3])))

    def line() -> str:
        return " ".join(word() for _ in range(rng.randint(1, 12)))

    return [
        f"document{seed}x{n} " + "\n".join(line() for _ in range(rng.randint(1, longest)))
        for n in range(number)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """alpha.txt and web.txt, with duplicates within and across them."""
    alpha, web = make_documents(1, 300), make_documents(2, 200)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "alpha.txt").write_text("\n\n".join(alpha + alpha[:20] + web[:10]), "utf-8")
    (folder / "web.txt").write_text("\n\n".join(web + alpha[50:60]) + "\n", "utf-8")
    return folder


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch):
    """Call the command with arguments; small sizes unless they say otherwise."""

    def call(*arguments: object, out: Path, **flags: object) -> Path:
        defaults = {"mega_batches": 3, "words": 1500, "valid_words": 300, "vocab_size": 120, "workers": 1}
        options = {"out": out, **defaults, **flags}
        line = [str(argument) for argument in arguments]
        for name, value in options.items():
            if value is not None:
                line += [f"--{name.replace('_', '-')}", str(value)]
        monkeypatch.setattr(sys, "argv", ["data_prep", *line])
        cli.main()
        return out

    return call
