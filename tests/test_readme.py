"""The README's commands are accepted by what they call, and the paths on the pages exist."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def arguments_of(*program: str) -> list[list[str]]:
    """The arguments of every command that starts with `program`."""
    found = [words[len(program) :] for words in COMMANDS if words[: len(program)] == list(program)]
    assert found, program
    return found


def test_every_command_is_of_a_kind_that_is_tested_here():
    known = {"make", "fairseq-train", "fairseq-eval-lm", "fairseq-interactive", "fairseq-generate"}
    modules = {"data_prep", "data_prep.inspect", "slurm.launch", "alma.report", "vision.tsne"}
    modules |= {"fairseq_alma.combine", "fairseq_alma.export"}
    modules |= {"slurm.sweep", "slurm.status", "slurm.cancel"}
    for words in COMMANDS:
        module = words[:2] == ["python", "-m"] and words[2] in modules
        assert words[0] in known or module or words[:2] == ["python", "vision/run.py"], words


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for words in arguments_of("make"):
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)


def test_data_prep_and_launch_accept_their_commands(monkeypatch):
    from data_prep.__main__ import parser
    from slurm.lm.plan import make_plan
    from slurm.lm.request import read_requests, resolved

    for words in arguments_of("python", "-m", "data_prep"):
        assert parser().parse_args(words).out.name.startswith("stream")
    monkeypatch.chdir(ROOT)
    requests = [read_requests(words) for words in arguments_of("python", "-m", "slurm.launch")]
    for request in resolved(list(itertools.chain(*requests))):
        assert make_plan(request, 4).stages


def test_inspect_accepts_its_commands():
    from data_prep.inspect import parser

    for words in arguments_of("python", "-m", "data_prep.inspect"):
        assert parser().parse_args(words).stream == "stream"


def test_status_and_cancel_accept_their_commands():
    from slurm import cancel, status

    for words in arguments_of("python", "-m", "slurm.status"):
        assert status.parser().parse_args(words)
    for words in arguments_of("python", "-m", "slurm.cancel"):
        assert cancel.parser().parse_args(words)


def test_sweeps_accept_their_commands():
    from slurm.sweep import parser
    from slurm.vision.part import parts

    for words in arguments_of("python", "-m", "slurm.sweep"):
        split = words.index("--")
        options = parser().parse_args(words[:split])
        assert len(parts(words[split + 1 :], options.runs_per_job, 1)) == 10


def test_the_image_half_accepts_its_commands():
    from vision.run import jobs_of, parser

    counts = []
    for words in arguments_of("python", "vision/run.py"):
        options = parser().parse_args(words)
        options.out = options.out or Path("runs")
        counts.append(len(jobs_of(options)))
    assert counts == [1, 6 * 2 * 3, 2 * 5 * 2, 1, 1, 1]


def test_reports_accept_their_commands():
    from alma.report.__main__ import parser

    for words in arguments_of("python", "-m", "alma.report"):
        assert parser().parse_args(words).runs


def test_the_library_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the first needs an export
    exec(compile(example, "README.md", "exec"), {})
    cumulative, last = map(float, capsys.readouterr().out.split())
    assert 0 < last < 0.2
    assert last < cumulative < 20


def test_the_table_of_presets_names_every_difference():
    from vision.learners import LEARNERS

    table = README.split("### Two presets")[1].split("\n## ")[0]
    named = set(re.findall(r"`--([a-z-]+)`", table)) - {"preset", "stream-seed"}
    presets = [kind.settings_class.authors for kind in LEARNERS.values()]
    assert named == {name.replace("_", "-") for settings in presets for name in settings}


@pytest.mark.parametrize("command", ["train", "eval-lm", "interactive", "generate"])
def test_fairseq_accepts_its_commands(command):
    from fairseq import options

    make = {
        "train": options.get_training_parser,
        "eval-lm": options.get_eval_lm_parser,
        "interactive": options.get_interactive_generation_parser,
        "generate": options.get_generation_parser,
    }[command]
    for words in arguments_of(f"fairseq-{command}"):
        assert options.parse_args_and_arch(make(default_task="alma_lm"), words).task == "alma_lm"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_and_paths_of_a_page_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert all((page.parent / link).exists() for link in links)
    places = {ROOT}
    for path in re.findall(r"`([\w./]+(?:\.py|/))`", text):
        found = next((place / path for place in places if (place / path).exists()), None)
        assert found, path
        places = {ROOT, found.parent}  # `plan.py` after `data_prep/formats.py` lies beside it
