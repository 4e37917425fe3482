"""`python -m data_prep.inspect`: statistics and verdicts are right."""

import random
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from alma.stream import Stream, read_index
from data_prep import similarity

from .conftest import make_documents
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
        lengths, length = [], 0
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


def test_groups_are_equal_shares_of_whole_documents(iid_stream):
    path = str(iid_stream / "megabatch_00/train")
    lengths = np.diff(similarity.open_part(path)[1], prepend=0)
    size = 3000
    cuts = np.unique([*similarity.group_ends(size), *similarity.group_ends(900)])
    counts = similarity.count_part(path, TOKENS + 4, cuts, 0)
    ids = np.fromfile(f"{path}.bin", np.uint16)
    assert counts.total.tolist() == np.bincount(ids, minlength=TOKENS + 4).tolist()
    assert counts.lengths.tolist() == lengths.tolist()
    for wanted in (size, 900):
        groups = similarity.groups_of(counts.tokens, cuts, wanted)
        assert groups.shape == (similarity.GROUPS, TOKENS + 4)
        assert abs(groups.sum(1) - wanted / similarity.GROUPS).max() <= lengths.max()


def test_divergence_is_that_of_scipy():
    one, other = np.random.default_rng(0).integers(0, 5, (2, 40))
    assert similarity.divergence(one, other) == pytest.approx(jensenshannon(one, other, base=2) ** 2)
    assert similarity.divergence(np.array([3, 0]), np.array([0, 9])) == pytest.approx(1)


# Are the mega-batches i.i.d.?


def test_a_stream_of_data_prep_is_iid(prepare, tmp_path, inspected):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(make_documents(3, 900)), "utf-8")
    out = prepare(path, out=tmp_path / "out", words=5000)
    code, text, _ = inspected(out)
    assert code == 0
    assert "Tokens: as i.i.d.;" in text
    first, *others = [
        line.split() for line in text.splitlines() if re.match(r"(mega|test)\w* +\d\.\d\d\b", line)
    ]
    assert first[0] == "megabatch_01"
    assert len(others) == 2
    ratios = [float(cell) for row in [first, *others] for cell in row[1:]]
    assert all(0.7 < ratio < 1.4 for ratio in ratios)


@pytest.mark.parametrize("odd", [0, 2, 3, None])
def test_a_part_with_another_vocabulary_is_reported(tmp_path, inspected, odd):
    """But for valid, which often has one source: it is shown, not judged. Repeated words do not matter."""
    parts = [random_documents(i, 200) for i in range(5)]
    if odd is not None:
        parts[odd] = random_documents(9, 200, low=24)
    text = inspected(write_stream(tmp_path / "out", parts))[1]
    verdict = next(line for line in text.splitlines() if line.startswith("Tokens:"))
    if odd in (0, 2):
        assert "NOT i.i.d., 3 of 6 pairs differ" in verdict
        assert f"megabatch_0{odd}" in verdict
        assert float(re.search(r"ratio ([\d.]+)", verdict)[1]) > 2
    else:
        assert "Tokens: as i.i.d.;" in verdict
    row = [line for line in text.splitlines() if line.startswith("valid ")][1]
    assert (min(map(float, row.split()[1:])) > 2) == (odd == 3)


def test_no_verdict_with_too_few_documents(tmp_path, inspected):
    out = write_stream(tmp_path / "out", [random_documents(i, 3) for i in range(4)])
    code, text, _ = inspected(out)
    assert code == 0
    assert "Tokens: cannot tell" in text


def test_no_verdict_where_a_few_long_documents_weigh_most(tmp_path, inspected):
    """Their sources' shares vary too much to tell; but what differs, differs."""
    rng = random.Random(0)
    long = [[[rng.choices(range(4, 4 + TOKENS), k=900)] for _ in range(8)] for _ in range(5)]
    parts = [random_documents(i, 200) + long[i][: 8 if i == 1 else 2] for i in range(5)]
    lengths = [sum(len(line) + 1 for line in document) + 1 for document in parts[1]]
    weight = sum(lengths) ** 2 / sum(length**2 for length in lengths)
    verdict = re.search("^Tokens:.*", inspected(write_stream(tmp_path / "few", parts))[1], re.MULTILINE)[0]
    assert f"cannot tell: the effective number of documents of megabatch_01 is {weight:.0f}, below" in verdict
    parts[2] = random_documents(9, 200, low=24)
    verdict = re.search("^Tokens:.*", inspected(write_stream(tmp_path / "odd", parts))[1], re.MULTILINE)[0]
    assert "NOT i.i.d., 3 of 6 pairs differ" in verdict


def test_it_starts_without_heavy_imports():
    heavy = "{'torch', 'fairseq', 'sentencepiece', 'matplotlib', 'scipy'}"
    code = f"import sys, data_prep.inspect; print({heavy} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
