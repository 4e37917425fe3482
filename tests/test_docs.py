"""README.md, CONTRIBUTING.md and docs/: links, paths, tables of keys and learners are true.

tests/pages has the tests of the commands.
"""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launcher import read_requests as read_with_stand_in

from alma.__main__ import TOOLS
from alma.records import MACHINE_FIELDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in ROOT.glob("docs/*.md")
}
PAGES |= {
    name: (ROOT / name).read_text("utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "log/README.md")
}
TYPES = {
    "boolean": bool,
    "integer": int,
    "list": list,
    "null": type(None),
    "object": dict,
    "string": str,
    "number": (int, float),
}
"""Types in the tables of docs/outputs.md."""


def section(name: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(
        r"^#+ ", PAGES[name].split(f"# {heading}\n")[1], maxsplit=1, flags=re.MULTILINE
    )[0]


@pytest.mark.parametrize("name", ["docs/index.md", "docs/images.md", "docs/language.md"])
def test_tables_of_learners_are_complete(name):
    from alma.learners import LEARNERS, text_learners
    from vision.learners import LEARNERS as IMAGES

    assert set(LEARNERS) == {*IMAGES, *text_learners()}
    expected = {
        "docs/index.md": LEARNERS,
        "docs/images.md": IMAGES,
        "docs/language.md": text_learners(),
    }
    assert set(re.findall(r"^\| `(\w+)` \|", section(name, "Learners"), re.MULTILINE)) == set(
        expected[name]
    )


def documented(heading: str) -> dict[str, tuple[str, set[str]]]:
    """Keys in a table of docs/outputs.md: their type,
    and all names in backticks in the row's last cell."""
    rows = [line.strip("|").split("|") for line in section("docs/outputs.md", heading).splitlines()]
    keys = [
        (key, cells) for cells in rows for key in re.findall(r"`(\w+)`", cells[0]) if len(cells) > 1
    ]
    assert keys, heading
    return {
        key: (cells[1].strip(), set(re.findall(r"`([\w-]+)`", cells[-1]))) for key, cells in keys
    }


def assert_described(
    objects: Iterable[dict[str, Any]], *headings: str, unseen: Iterable[str] = ()
) -> None:
    """The keys of the objects are exactly those of the tables, except `unseen`,
    with the types there."""
    tables = {key: entry for heading in headings for key, entry in documented(heading).items()}
    seen = set()
    for key, value in (item for entry in objects for item in entry.items()):
        kinds = tuple(TYPES[words.split()[0]] for words in tables[key][0].split(" or "))
        assert isinstance(value, bool) == (bool in kinds), key
        assert any(isinstance(value, kind) for kind in kinds), (key, value)
        seen.add(key)
    assert seen == tables.keys() - set(unseen)


def test_documented_keys_of_image_runs(tmp_path):
    from tests.vision.test_weeks import arrive
    from vision import MegaBatchStream, run
    from vision.data import load
    from vision.image_files import ImageSource
    from vision.scenarios import make_stream, read_periods

    settings = {
        "moe": {"average": 0.5, "command": "alma images"},
        "ens": {},
        "gens": {"experts": 2},
        "gmoe": {"lr_scheduler": "linear"},
        "umix": {"replay_share": 0.5, "replay_from": "recent", "amp": "bf16", "no_tf32": True},
        "ff": {"replay": True, "seed": 1},
    }
    stream = MegaBatchStream("digits", 3)
    small = {"hidden": 2, "epochs": 1}
    runs = [run(stream, "gens", tmp_path / "several", new_members=2, **small)]
    for name, changes in settings.items():
        runs.append(run(stream, name, tmp_path / name, **small, **changes))
    classes = make_stream(load("digits"), 3, 0, "classes")
    runs.append(run(classes, "sm", tmp_path / "drift", **small))
    arrive(tmp_path / "shop", 1, 2)
    stream = read_periods(ImageSource(str(tmp_path / "shop"), "week"), None)
    runs.append(run(stream, "sm", tmp_path / "weeks", arch="mlp", **small))
    infos = [run.info for run in runs]
    rows = [row for run in runs for row in run.rows]
    of_text = ["stages", "processes", "gpus", "tokens_per_update", "test_periods"]
    assert_described(infos, "run.json", unseen=[*of_text, "tf32"])
    of_torchvision = ["weights"]
    configs = (info["config"] for info in infos)
    assert_described(configs, "config, all runs", "config, images", unseen=of_torchvision)
    assert_described(rows, "results.jsonl")
    assert_described((row["extra"] for row in rows), "extra, images", unseen=["memory_of"])
    extra = documented("extra, images")
    for row in rows:
        for key in ("valid", "flops", "growth"):
            assert (row["extra"].get(key) or {}).keys() <= extra[key][1]


def keys_in(path: str, *functions: str) -> set[str]:
    """Constant keys of the dictionaries that the functions of a file write out."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
    chosen = [
        node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in functions
    ]
    assert {node.name for node in chosen} == set(functions)
    parts = [part for node in chosen for part in ast.walk(node) if isinstance(part, ast.Dict)]
    keys = [key for part in parts for key in part.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def test_documented_keys_of_text_runs():
    from slurm.engine.machine import Machine
    from slurm.lm.placement import place
    from slurm.lm.plan import make_plan
    from slurm.lm.record import measured_fields

    ensemble = "--from-scratch --context-window 4 --name N --update-multiplier 2 --members 2"
    continuous = "--schedule continuous --average .9 --replay-share .5 --replay-from recent"
    commands = [
        f"S --learner ens --out R {ensemble} -- --max-update 2",
        "S --learner gens --new-members 2 --out R",
        "S --learner gmoe --out R",
        f"S --learner sm --out R {continuous}",
        "S --learner sm --out R --init M --cutoff 2023 --no-tf32",
    ]
    requests = [request for words in commands for request in read_with_stand_in(words.split())]
    requests = [place(request, Machine((10**10,) * 2, None)) for request in requests]
    requests += read_with_stand_in("S --learner sm --out R --trainer T --budget updates=2".split())
    of_engine = {"engine": "transformers", "settings": requests[0].settings | {"words": []}}
    requests.append(dataclasses.replace(requests[0], **of_engine))
    configs = [make_plan(request, 3).config for request in requests]
    data = keys_in("slurm/lm/record.py", "identity")
    assert_described(configs, "config, all runs", "config, text", unseen=data)
    assert data <= documented("config, text").keys()

    path = "fairseq_alma/stage_record.py"
    nested = {"loss", "share", "test"}
    training = dict.fromkeys({*keys_in(path, "training_record"), "tf32"}, 1)
    measured = dict.fromkeys(keys_in(path, "describe", "measure") - nested, 1) | {
        "training": [training]
    }
    row = measured_fields(measured, [True])
    extra = documented("extra, text")
    # with --average or --cutoff, if the stream drifts,
    # if another run of the launch has the same training
    at_times = "raw matrix matrix_experts matrix_periods matrix_seen scores shared_with".split()
    assert row["extra"].keys() | set(at_times) == extra.keys()
    assert training.keys() - MACHINE_FIELDS == extra["training"][1]


def test_every_figure_is_on_the_page_with_its_number_of_runs():
    from slurm.reproduce import index

    for name, record in index().items():
        small, paper = record["runs"]
        assert re.search(rf"\| `{name}` \| {small}, {paper} \|", PAGES["docs/reproduce.md"]), name


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_of_a_page_exist(name):
    text = re.sub(r"^```.*?^```", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    images = [(path, "") for path in re.findall(r'src="(?!http)([^"]*)"', text)]
    for path, anchor in images + re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", text):
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), path
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        )
        assert not anchor or anchor in map(slug, headings), (path, anchor)
    folders = [ROOT]
    tops = {path.name for path in ROOT.iterdir()} - {"build", "data", "demo_out", "runs"}
    for path in re.findall(r"`([\w./]+(?:\.py|\.yaml|/)|log/[\w./-]+)`", text):
        existing = [folder / path for folder in folders if (folder / path).exists()]
        assert existing or (path.endswith("/") and Path(path).parts[0] not in tops), path
        # `plan.py` after `data_prep/formats.py`
        folders = [ROOT, *(place.parent for place in existing)]


@pytest.mark.thorough
def test_the_web_site_is_built_and_needs_no_network(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, *"-m mkdocs build -s -q --site-dir".split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text("utf-8")
        )
        assert not [address for address in loaded if "canonical" not in address], page.name
    commands = (tmp_path / "cli.html").read_text("utf-8")
    assert all(f"alma {name} (" in re.sub(r"<[^>]*>", "", commands) for name in TOOLS)


def test_entries_of_the_log_are_short_and_in_its_table():
    entries = {path.relative_to(ROOT / "log").as_posix(): path for path in ROOT.glob("log/*/*.md")}
    rows = re.findall(r"^\| .*?\]\(([^)]*)\)", PAGES["log/README.md"], re.MULTILINE)
    assert set(rows) == entries.keys()
    for name, path in entries.items():
        assert len(path.read_text("utf-8").splitlines()) <= 40, name
        assert "**Question.**" in path.read_text("utf-8"), name
