"""The commands of the pages are known here, and their programs accept them.

Each block is in the table of tests/pages/ways.py, and each command is parsed by the program that it
calls. tests/pages/test_run_*.py type the blocks.
"""

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from alma.__main__ import TOOLS
from alma.errors import UserError
from tests.pages.blocks import BLOCKS, ROOT, SHELLS, blocks_of, commands_of
from tests.pages.ways import WAYS, Parse, Run, RunBy, SameAs
from tests.small_folders import make_qwen

FAIRSEQ = {
    "fairseq-train": "get_training_parser",
    "fairseq-eval-lm": "get_eval_lm_parser",
    "fairseq-interactive": "get_generation_parser",
    "fairseq-generate": "get_generation_parser",
}
"""Commands of fairseq, and the functions of fairseq.options that make their parsers."""
SHELL = set("cd date eval echo flock git hf ln mkdir pip python3 set source sudo".split())
SHELL |= {"light/bin/alma", "light/bin/pip"}
"""Commands that are not parsed."""
SCRIPTS = re.compile(r"examples/|month\.sh$|/srv/service/")
"""Scripts, which have tests of their own."""

Words = list[str]
COMMANDS = [
    words
    for block in BLOCKS
    # tests/test_extend.py runs those of docs/extend*.md, which add what they name
    if block.kind in SHELLS and not block.page.startswith("docs/extend")
    for words in commands_of(re.sub(r"^0 6 2 \* \* ", "", block.text))
]


def test_each_block_has_one_entry_of_the_table_in_its_order():
    for page in {block.page for block in BLOCKS} | WAYS.keys():
        blocks = [block for block in BLOCKS if block.page == page]
        starts = list(WAYS.get(page, {}))
        for block, start in zip(blocks, starts, strict=False):
            assert block.text.startswith(start), (
                f"{block} is not the block `{start}` of tests/pages/ways.py: give it an entry there"
            )
        unknown = [f"{block}: {block.text}" for block in blocks[len(starts) :]]
        assert not unknown, f"without an entry in tests/pages/ways.py: {unknown}"
        assert len(starts) == len(blocks), f"{page} has no block {starts[len(blocks) :]}"


def test_a_block_is_found_whatever_its_shell_and_its_indent():
    page = "text\n```bash\na b\n```\n  ```sh\n  c\n  ```\n```console\nd\n```\n```text\ne\n```\n"
    page += "<!-- run -->\n```python\nf\n```\n```python\ng\n```\n"
    texts = [block.text.split() for block in blocks_of("page", page)]
    assert texts == [["a", "b"], ["c"], ["d"], ["f"]]


def test_what_does_not_run_says_why_or_who_runs_it():
    ways = [(page, way) for page, entries in WAYS.items() for way in entries.values()]
    kinds = Counter(type(way) for _, way in ways)
    assert kinds[Parse] <= 8, "let the block run, or replace another one that does not"
    for _, way in ways:
        if isinstance(way, Parse):
            assert len(way.reason.split()) > 1
            for name in re.findall(r"tests/\S+\.py", way.reason):
                assert (ROOT / name).exists(), name
        elif isinstance(way, RunBy):
            assert way.names in (ROOT / way.test).read_text("utf-8"), way


def test_a_block_that_is_typed_on_another_page_is_there():
    for page, entries in WAYS.items():
        for start, way in entries.items():
            if not isinstance(way, SameAs):
                continue
            (block,) = (
                block for block in BLOCKS if block.page == page and block.text.startswith(start)
            )
            typed: list[Words] = []
            others = [other for other in BLOCKS if other.page == way.page]
            for other, other_way in zip(others, WAYS[way.page].values(), strict=True):
                if isinstance(other_way, Run):
                    typed += commands_of(other.text)
            for words in commands_of(block.text):
                assert words in typed, (str(block), words)


def module_of(words: Words) -> tuple[str | None, Words]:
    """The module that a command starts, None if it starts none, and its arguments."""
    if words[0] == "alma" and words[1] in TOOLS:
        return TOOLS[words[1]].module, words[2:]
    if words[:2] == ["python", "-m"]:
        package = importlib.util.find_spec(words[2])
        is_package = package is not None and package.submodule_search_locations is not None
        return f"{words[2]}.__main__" if is_package else words[2], words[3:]
    return None, words


def arguments_of(*modules: str) -> Iterator[Words]:
    """The arguments of every command that starts one of the modules."""
    for words in COMMANDS:
        module, arguments = module_of(words)
        if module in modules:
            yield arguments


SPECIAL = {"slurm.launch", "slurm.sweep", "vision.run", "data_prep.__main__", "benchmarks.__main__"}
"""Modules with a test of their own below."""


def is_known(words: Words) -> bool:
    """Whether a command is parsed by a test below, or has another test."""
    program = words[0]
    if program in SHELL | FAIRSEQ.keys() | {"make", "pytest"}:
        return True
    if words[:2] in (["alma", "--help"], ["alma", "--version"]):
        return True
    if any(SCRIPTS.search(word) for word in words[:2]):
        return True
    return module_of(words)[0] in {tool.module for tool in TOOLS.values()} | SPECIAL


def test_every_command_is_of_a_kind_that_is_tested_here():
    makefile = (ROOT / "Makefile").read_text()
    for words in COMMANDS:
        assert is_known(words), words
        for word in words:
            if word.startswith(("tests/", "examples/", "experiments/")):
                assert (ROOT / word).exists(), words
        for target in words[1:] if words[0] == "make" else []:
            assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("module", sorted({tool.module for tool in TOOLS.values()} - SPECIAL))
def test_a_tool_accepts_its_commands(module):
    for words in arguments_of(module):
        assert importlib.import_module(module).parser().parse_args(words)


def test_data_accepts_its_commands(tmp_path, monkeypatch):
    from data_prep.__main__ import parser
    from data_prep.options import settings_of

    monkeypatch.chdir(tmp_path)  # without the files
    for words in arguments_of("data_prep.__main__"):
        options = parser().parse_args(words)
        if not options.append:
            with pytest.raises(UserError) as refused:
                settings_of(options)
            for problem in str(refused.value).split("; "):
                assert re.search("no such file|no file|expected", problem), problem


def test_steps_for_a_gpu_accept_their_commands():
    from benchmarks.gpu import parser

    for name, *words in arguments_of("benchmarks.__main__"):
        assert name != "gpu" or parser().parse_args(words)


def test_launch_accepts_its_commands(monkeypatch, tmp_path):
    from slurm.lm.plan import make_plan
    from slurm.lm.request import read_requests, resolved

    for name in ("experiments", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "encoder.json").touch()  # the reader's own
    (tmp_path / "text.yaml").symlink_to(ROOT / "examples/monthly/text.yaml")
    monkeypatch.chdir(tmp_path)
    make_qwen(tmp_path / "models/qwen_tiny")
    model = ("--init", "models/gpt2")  # which is not here
    requests = []
    for words in arguments_of("slurm.launch"):
        if model[1] in words:
            words = [word for word in words if word not in model]
        requests += read_requests(words)
    assert all(make_plan(request, 4).stages for request in resolved(requests))


def test_images_accept_their_commands(monkeypatch):
    from vision.run import jobs_of, parser, read_sections

    monkeypatch.chdir(ROOT)
    for words in arguments_of("vision.run"):
        if "slurm" in words:
            from slurm.vision.__main__ import parser as on_slurm

            words = on_slurm().parse_known_args(words)[1]
        if "--by" in words:  # reads the images
            assert parser().parse_args(words).by
            continue
        assert jobs_of(*read_sections(parser(), words)), words


@pytest.mark.parametrize("program", FAIRSEQ)
def test_fairseq_accepts_its_commands(program):
    from fairseq import options

    for words in (words[1:] for words in COMMANDS if words[0] == program):
        parser = getattr(options, FAIRSEQ[program])(default_task="alma_lm")
        assert options.parse_args_and_arch(parser, words).task == "alma_lm"
