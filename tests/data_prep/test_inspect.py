"""`python -m data_prep.inspect`: statistics are right."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from alma.stream import Stream, read_index
from data_prep import similarity

from .small_streams import TOKENS, random_documents, write_stream


def cells(text: str, name: str) -> list[str]:
    """The first row of the part `name`."""
    return next(line.split()[1:] for line in text.splitlines() if line.startswith(f"{name} "))


# The table


def test_the_table_against_a_slow_count(corpus, prepare, tmp_path, inspected, monkeypatch):
    out = prepare(corpus / "alpha.txt", corpus / "web.txt", out=tmp_path / "out")
    monkeypatch.setattr(similarity, "_BLOCK", 97)  # documents and items cross the borders of blocks
    code, text, _ = inspected(out)
    assert code == 0
    stream = Stream.load(out)
    for part in stream.parts:
        ids = np.fromfile(f"{stream.path(part)}.bin", np.uint16).tolist()
        sizes = read_index(f"{stream.path(part)}.idx")[0].tolist()
        lengths = []
        length = 0
        for size in sizes:
            length += size
            if size == 1:
                lengths.append(length)
                length = 0
        lengths.sort()
        row = cells(text, part.name)
        assert row[:4] == [
            f"{part.words:,}",
            f"{len(ids):,}",
            f"{len(ids) / part.words:.3f}",
            f"{len(lengths):,}",
        ]
        middle = (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
        assert row[4] == f"{middle:,.0f}"
        assert sum(n <= int(row[5]) for n in lengths) == pytest.approx(0.95 * len(lengths), abs=3)
        assert row[6] == str(lengths[-1])
        assert row[7] == f"{ids.count(3) / len(ids):.3%}"
        assert row[8:] == [f"{part.sources[name] / part.words:.1%}" for name in ("alpha", "web")]


def test_halves_have_equal_numbers_of_tokens_of_whole_documents(iid_stream):
    path = str(iid_stream / "megabatch_00/train")
    lengths = np.diff(similarity.open_part(path)[1], prepend=0)
    counts = similarity.count_part(path, TOKENS + 4, 1500, 0)
    ids = np.fromfile(f"{path}.bin", np.uint16)
    assert counts.total.tolist() == np.bincount(ids, minlength=TOKENS + 4).tolist()
    assert counts.lengths.tolist() == lengths.tolist()
    assert abs(counts.tokens[:2].sum(1, dtype=int) - 1500).max() <= lengths.max()


def test_divergence_is_that_of_scipy():
    one, other = np.random.default_rng(0).integers(0, 5, (2, 40))
    assert similarity.divergence(one, other) == pytest.approx(
        jensenshannon(one, other, base=2) ** 2
    )
    assert similarity.divergence(np.array([3, 0]), np.array([0, 9])) == pytest.approx(1)


@pytest.mark.parametrize("odd", [0, 2, None])
def test_a_megabatch_with_another_vocabulary_is_far_from_all_others(tmp_path, odd):
    """And equal ones have a ratio of about 1: repeated words within documents do not matter."""
    parts = [random_documents(i, 200) for i in range(5)]
    if odd is not None:
        parts[odd] = random_documents(9, 200, low=24)
    stream = Stream.load(write_stream(tmp_path / "out", parts))
    counts = [
        similarity.count_part(stream.path(part), TOKENS + 4, 1500, number).tokens
        for number, part in enumerate(stream.megabatches)
    ]
    for i, j in itertools.combinations(range(3), 2):
        ratio = similarity.compare(counts[i], counts[j])
        assert ratio > 2 if odd in (i, j) else 0.7 < ratio < 1.4


def test_too_few_documents_have_no_ratio(tmp_path):
    stream = Stream.load(write_stream(tmp_path / "out", [random_documents(i, 1) for i in range(4)]))
    path = stream.path(stream.megabatches[0])
    counts = similarity.count_part(path, TOKENS + 4, stream.megabatches[0].tokens // 2, 0)
    assert similarity.compare(counts.tokens, counts.tokens) is None


def test_it_starts_without_heavy_imports():
    heavy = "{'torch', 'fairseq', 'sentencepiece', 'matplotlib', 'scipy'}"
    code = f"import sys, data_prep.inspect; print({heavy} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
