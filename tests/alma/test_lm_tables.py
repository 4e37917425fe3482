"""The paper's language-model tables: every cell, on runs with known numbers."""

import csv
import re

import pytest

from alma.report.lm import tables as lm_tables
from alma.report.lm.entries import find_entries
from alma.report.lm.reference import reference
from alma.report.results import find_runs

from .synthetic import ROOT, lm_run, rename_metric, report

BASE = (38.6, 6.3)  # millions of shared parameters, and of each expert
LARGE = (95.7, 28.34)
PAPER = reference()


def make_run(directory, values, learner="sm", w=1, size=BASE, experts=4, members=None, **config):
    """`lm_run` with the parameters of a `size`: (shared, per expert) in millions."""
    counts = [experts] * len(values) if not isinstance(experts, list) else experts
    member_counts = [members] * len(values) if not isinstance(members, list) else members
    millions = [
        (size[0] + size[1] * (e or 0)) * (m or 1)
        for e, m in zip(counts, member_counts, strict=True)
    ]
    config = {"arch": "switch_gmoe_large" if size is LARGE else "switch_gmoe"} | config
    return lm_run(directory, values, learner, w, experts, members, millions, **config)


def tables_of(*places):
    """Tables by file name, remarks, and lines on missing tables."""
    entries, remarks = find_entries(find_runs(places))
    tables, missing = lm_tables.tables(entries)
    return tables, remarks, missing


def table2(place):
    """Lines of Table 2 as text, without the header."""
    return tables_of(place)[0]["table2"].cells[1:]


@pytest.fixture(scope="module")
def paper_runs(tmp_path_factory):
    """Runs with the settings of the paper's Table 2, for both sizes, each 1 perplexity worse."""
    place = tmp_path_factory.mktemp("paper")
    grown = {"gens": (4, [1, 2, 3, 4]), "gmoe": ([4, 6, 8, 12], None)}
    for size, shape in (("base", BASE), ("large", LARGE)):
        lines = [line for line in PAPER if line.size == size]
        for i, line in enumerate(line for line in lines if line.learner not in grown):
            experts, _, members = line.experts.partition("@")
            values = [line.perplexity.get(t, 99) + 1 for t in range(1, 5)]
            fields = (
                {} if line.update_multiplier == 1 else {"update_multiplier": line.update_multiplier}
            )
            fields |= {"w": line.waiting_time, "experts": int(experts)}
            fields |= {"members": int(members)} if members else {}
            make_run(place / f"{size}{i}", values, line.learner, size=shape, **fields)
        for learner, (experts, members) in grown.items():
            diagonal = [line.perplexity for line in lines if line.learner == learner]
            values = [diagonal_value[t] + 1 for t, diagonal_value in enumerate(diagonal, start=1)]
            settings = {"size": shape, "experts": experts, "members": members}
            make_run(place / f"{size}{learner}", values, learner, **settings)
    return place


def test_table_2_has_the_papers_layout_and_numbers(paper_runs):
    tables, remarks, missing = tables_of(paper_runs)
    assert (remarks, missing) == ([], [])
    table = tables["table2"]
    assert table.cells[0][:4] == ["setting", "# experts", "base |θ|", "base t=1"]
    assert table.cells[0][-1] == "large t=4"
    lines = table.cells[1:]
    with open(ROOT / "alma/report/lm/table2.csv") as file:
        expected = list(csv.DictReader(file))
    assert [line[1] for line in lines] == [line["experts"] for line in expected]
    assert [line[0] for line in lines][:3] == ["SM_w1"] * 3
    assert [line[0] for line in lines][3:7] == [
        "SM_w3",
        "SM_w3 (3x steps)",
        "SM_w4",
        "SM_w4 (4x steps)",
    ]
    assert [line[0] for line in lines][-8:] == ["gEns_w1", "", "", "", "gMoE_w1", "", "", ""]
    for line, published in zip(lines, expected, strict=True):
        numbers = list(published.values())[4:]
        for cell, number in zip(line[2:], numbers, strict=True):
            if number.endswith("M"):
                ours = cell.removesuffix(f" [{number}]")
                assert ours != cell
                assert float(ours[:-1]) == pytest.approx(float(number[:-1]), rel=0.03)
            elif number in ("", "*"):  # the paper's w = 3 has no second stage
                assert cell in (number, "100.00")
            else:
                assert cell == f"{float(number) + 1:.2f} [{number}]"
    assert "42 of 42 rows match" in table.note


def test_one_size_with_all_learners_seeds_and_waiting(tmp_path):
    for seed, shift in enumerate((0, 1, 2)):
        make_run(
            tmp_path / f"sm{seed}", [30.0 + shift, 28.0, 26.0], seed=seed, arch="switch_gmoe_tiny"
        )
    tiny = {"arch": "switch_gmoe_tiny"}
    make_run(tmp_path / "ens", [29.0, 27.0, 25.0], "ens", members=3, **tiny)
    make_run(tmp_path / "umix", [0, 27.5, 25.5], "umix", w=2, members=2, **tiny)
    make_run(tmp_path / "gens", [31.0, 30.0, 29.0], "gens", members=[1, 2, 3], **tiny)
    make_run(tmp_path / "gmoe", [0, 33.0, 31.0], "gmoe", w=2, experts=[4, 4, 6], **tiny)
    make_run(tmp_path / "moe", [1234.5, 33.5, 33.25], "moe", experts=8, from_scratch=True, **tiny)
    make_run(tmp_path / "dense", [40.0, 39.0, 38.0], experts=None, arch="transformer_lm")
    tables, _, missing = tables_of(tmp_path)
    assert tables["table2"].cells[0][2::4] == ["transformer_lm |θ|", "tiny |θ|"]
    tiny_cells = [[*line[:2], *line[6:]] for line in tables["table2"].cells[1:]]
    assert tiny_cells == [
        ["SM_w1", "dense", "", "", "", ""],
        [
            "SM_w1",
            "4",
            "63.8M [65M]",
            "31.00 ±1.00 [28.57]",
            "28.00 ±0.00 [27.45]",
            "26.00 ±0.00 [26.91]",
        ],
        ["Ens_w1", "4@3", "191M", "29.00", "27.00", "25.00"],
        ["UMix_w2", "4@2", "128M", "*", "27.50", "25.50"],
        ["gEns_w1", "4@1", "63.8M [65M]", "31.00 [28.57]", "", ""],
        ["", "4@2", "128M [130M]", "", "30.00 [26.27]", ""],
        ["", "4@3", "191M [195M]", "", "", "29.00 [25.41]"],
        ["gMoE_w2", "4", "63.8M", "*", "33.00", ""],
        ["", "6", "76.4M", "", "", "31.00"],
        ["MoE_w1 (from scratch)", "8", "89M", "1,234.50", "33.50", "33.25"],
    ]
    assert tables["table2"].cells[1][2:6] == ["38.6M", "40.00", "39.00", "38.00"]
    star, spread, matched = tables["table2"].note.splitlines()
    assert star.startswith("* the learner waits")
    assert spread.startswith("± is the sample standard deviation")
    assert "4 of 10 rows match" in matched
    assert missing == [
        "Table 1 left out: no run with waiting_time = update_multiplier = 3 or 4 has a counterpart "
        "of the same learner, size and number of experts with both 1"
    ]


def test_sizes_are_named_by_the_dimensions_that_differ(tmp_path):
    for width in ("8", "16"):
        flags = ["--decoder-layers", "2", "--decoder-embed-dim", width]
        make_run(tmp_path / width, [30.0], fairseq_flags=flags)
    tables, *_ = tables_of(tmp_path)
    assert set(tables["table2"].cells[0][2::2]) == {"base embed-dim=8 |θ|", "base embed-dim=16 |θ|"}


def test_equal_names_are_extended_by_differences(tmp_path):
    flags = ["--fp16", "--lr", "1e-3", "--decoder-layers", "2"]
    make_run(tmp_path / "a", [30.0], fairseq_flags=flags)
    make_run(tmp_path / "b", [20.0], fairseq_flags=["--lr=2e-3", "--decoder-layers=2"])
    make_run(
        tmp_path / "c", [10.0], experts=8, fairseq_flags=["--lr", "3e-3", "--decoder-layers", "2"]
    )
    for name, growth in (("d", [2]), ("e", [4])):
        make_run(
            tmp_path / name, [9.0, 8.0], "gmoe", experts=[4, 4 + growth[0]], grow_experts=growth
        )
    tables, *_ = tables_of(tmp_path)
    assert (
        tables["table2_B1"].title
        == "Table 2: test perplexity of base layers=2 after mega-batch t, B = 1"
    )
    assert [line[:2] for line in tables["table2_B1"].cells[1:]] == [
        ["SM_w1", "8"],
        ["SM_w1 fp16 lr=1e-3", "4"],
        ["SM_w1 lr=2e-3", "4"],
    ]
    grown = [line[:2] for line in tables["table2_B2"].cells[1:]]
    assert grown[:2] == [["gMoE_w1 grow_experts=2", "4"], ["", "6"]]
    assert grown[2:] == [["gMoE_w1 grow_experts=4", "4"], ["", "8"]]


def test_other_protocols_have_no_number_of_the_paper(tmp_path):
    for name, value in (("replay", True), ("from_scratch", True), ("update_multiplier", 2)):
        make_run(tmp_path / name, [30.0, 29.0], **{name: value})
    cells = [(line[0], *line[3:]) for line in table2(tmp_path)]
    protocols = ("2x steps", "from scratch", "replay")
    assert cells == [(f"SM_w1 ({protocol})", "30.00", "29.00") for protocol in protocols]
    make_run(tmp_path / "gens" / "two", [30.0], "gens", new_members=2)
    assert [line[0] for line in table2(tmp_path / "gens")] == ["gEns_w1 (2 new members)"]


@pytest.mark.parametrize(
    ("millions", "matches"), [(63.1, True), (63.0, False), (66.9, True), (67.0, False)]
)
def test_sizes_match_to_3_percent(tmp_path, millions, matches):
    make_run(tmp_path, [30.0], size=(millions, 0))
    assert table2(tmp_path)[0][3] == ("30.00 [28.57]" if matches else "30.00")


def test_table_1_pairs_iid_with_sequential(paper_runs, tmp_path):
    make_run(tmp_path / "umix", [5.0, 6.0, 7.0, 8.0], "umix", members=2)
    make_run(tmp_path / "umix4", [0, 0, 0, 4.0], "umix", w=4, members=2, update_multiplier=4)
    make_run(
        tmp_path / "umix8", [0, 0, 0, 3.0], "umix", w=4, members=2, experts=8, update_multiplier=4
    )
    tables, *_ = tables_of(paper_runs, tmp_path)
    assert tables["table1"].cells == [
        ["method", "# experts", "k=3 i.i.d.", "k=3 seq.", "k=4 i.i.d.", "k=4 seq."],
        ["base SM", "8", "25.21", "25.74", "", ""],
        ["base SM", "12", "", "", "23.87", "24.78"],
        ["large SM", "8", "19.48", "20.64", "", ""],
        ["large SM", "12", "", "", "18.70", "19.98"],
        ["base Ens", "4@2", "25.30 [24.30]", "25.57 [24.57]", "25.13 [24.13]", "25.35 [24.35]"],
        ["large Ens", "4@2", "19.04 [18.04]", "20.14 [19.14]", "18.84 [17.88]", "19.92 [18.92]"],
        ["base UMix", "4@2", "", "", "4.00", "8.00"],
    ]
    assert "2 of 7 rows" in tables["table1"].note


def test_table_1_takes_the_most_similar_sequential_run(tmp_path):
    for name, rate, value in (("a", "1", 20.0), ("b", "2", 21.0)):
        make_run(tmp_path / name, [30.0, 29.0, value], fairseq_flags=["--lr", rate])
    make_run(tmp_path / "c", [0, 0, 19.0], w=3, update_multiplier=3, fairseq_flags=["--lr", "2"])
    assert tables_of(tmp_path)[0]["table1"].cells[1][2:4] == ["19.00", "21.00"]


@pytest.mark.parametrize(
    ("iid", "sequential"),
    [({"update_multiplier": 1}, {}), ({}, {"rows": 3}), ({}, {"learner": "umix"})],
)
def test_without_a_pair_one_line_says_what_is_missing(tmp_path, iid, sequential):
    iid = {"update_multiplier": 3, **iid}
    sequential = {"learner": "ens", "members": 2, **sequential}
    make_run(tmp_path / "iid", [0, 0, 20.0], "ens", w=3, members=2, **iid)
    make_run(tmp_path / "seq", [23.0, 22.0, 21.0], **sequential)
    tables, _, (missing,) = tables_of(tmp_path)
    assert tables.keys() == {"table2"}
    assert missing.startswith("Table 1 left out: ")


def test_runs_without_perplexity_have_a_remark(tmp_path):
    make_run(tmp_path / "a", [30.0, 20.0])
    images = rename_metric(make_run(tmp_path / "b", [0.3, 0.2], dataset="digits"), "error")
    assert tables_of(tmp_path)[1] == [f"not a perplexity run, left out: {images.directory}"]


def test_command_prints_and_writes_the_tables(paper_runs, tmp_path):
    done = report(paper_runs, "--table", "lm", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Table 2: test perplexity after mega-batch t, B = 4"
    assert re.split(r" {2,}", lines[2])[:4] == ["SM_w1", "4", "63.8M [65M]", "29.57 [28.57]"]
    assert "Table 1: test perplexity of i.i.d. against sequential training" in done.stdout
    assert "Test perplexity after" not in done.stdout  # instead of the general table
    assert sorted(path.name for path in (tmp_path / "out").glob("table*")) == [
        "table1.md",
        "table2.md",
    ]
    markdown = (tmp_path / "out/table2.md").read_text()
    assert "| SM_w3 | 8 | 89M [91M] | \\* | \\* | 26.18 [25.18] |" in markdown
    assert "base \\|θ\\|" in markdown
    assert markdown.strip() in (tmp_path / "out/report.md").read_text()
