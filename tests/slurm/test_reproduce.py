"""The commands behind each figure and table of the paper, and what they find."""

import contextlib
import io
import itertools
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from launcher import call, read_requests, refused

from alma.report.__main__ import main as report
from alma.report.vision.figures import FIGURES
from data_prep.__main__ import parser as data_parser
from slurm import reproduce
from slurm.reproduce import EXPERIMENTS, MODELS, index, main
from vision.run import main as images
from vision.run import parser
from vision.sections import read_sections
from vision.sweep import jobs_of

RECORDS = index()
IMAGES = [
    name
    for name, record in RECORDS.items()
    if not {"table2", "time"} & record["experiments"].keys()
]


def options_of(*words):
    return reproduce.parser().parse_args([*map(str, words)])


def jobs(words):
    return jobs_of(*read_sections(parser(), words))


@pytest.mark.parametrize("size", ["small", "medium", "paper"])
@pytest.mark.parametrize("name", IMAGES)
def test_image_figures_have_the_runs_that_the_index_says(name, size):
    record = RECORDS[name]
    names = set()
    assert set(record["drawn"]) <= {*FIGURES, "tsne"}
    for folder, text in record["experiments"].items():
        file, *flags = text.split()
        flags += record.get("flags", {}).get(size, "").split()
        words = [str(EXPERIMENTS / file), *flags, *(["--size", size] if size != "paper" else [])]
        sweep = jobs(words)
        at = {"small": "digits", "medium": "mnist"}.get(size, sweep[0].dataset["name"])
        assert {job.dataset["name"] for job in sweep} == {at}
        if size == "paper":
            assert at in folder
            draft = folder.startswith("draft")
            assert {job.megabatches for job in sweep} == {
                50 if draft else {"mnist": 500, "cifar10": 100}[at]
            }
            assert {job.options.get("preset") for job in sweep} == {"draft" if draft else None}
        names |= {
            (folder if size == "paper" or "stages" in folder else "", job.out.name) for job in sweep
        }
    assert len(names) == record["runs"][size == "paper"]


@pytest.mark.parametrize("name", ["small", "paper"])
def test_streams_are_recipes_that_data_prep_accepts(name):
    text = (EXPERIMENTS / f"streams/{name}.sh").read_text().replace("\\\n\t", "")
    (line,) = [line for line in text.splitlines() if " --mega-batches " in line]
    words = shlex.split(line)
    options = data_parser().parse_args(words[words.index("--out") - 3 :])
    assert (options.mega_batches, options.seed or 0) == ((4, 1) if name == "small" else (4, 0))
    if name == "paper":
        assert (options.words, options.eval_words, options.valid_words) == (
            440_000_000,
            440_000_000,
            500_000,
        )


def test_each_figure_ends_with_the_finding_of_the_paper_of_the_small_size_and_of_real_data(
    monkeypatch,
):
    monkeypatch.setattr(reproduce, "commands", lambda *_: iter(()))
    for name, record in RECORDS.items():
        small, paper = (
            reproduce.make(name, record, options_of("--size", size)) for size in ("small", "paper")
        )
        lines = f"{name}: 0 s\n{name}: {record.get('beyond', 'paper')}: {record['finding']}"
        real = ""
        if "real" in record:
            real = f"; ALMA's own runs on real data showed: {record['real']}"
        assert paper == lines + real
        recorded = "ALMA's own runs of this size, not those just made, showed"
        assert small == f"{lines}; {recorded}: {record['small']}{real}"
        assert small.count("\n") == 1


def test_streams_with_dates_have_the_runs_that_the_index_says(tmp_path, monkeypatch):
    """With the real parser of experiments; they are no part of all."""
    options = options_of("--out", tmp_path, "--stream", tmp_path / "stream")
    launch, report = reproduce.commands("time", RECORDS["time"], options)
    words = launch.words[3:]
    requests = read_requests([word for word in words if word not in ("--jobs", "1")])
    assert len(requests) == RECORDS["time"]["runs"][0]
    runs = yaml.safe_load((EXPERIMENTS / "time.yaml").read_text())["runs"]
    assert [*runs] == RECORDS["time"]["experiments"]["time"].split()
    assert launch.folder / "runs/time" == Path(report.words[3])
    assert all(request.out.is_relative_to("runs/time") for request in requests)
    every = reproduce.chosen(options_of("all"), RECORDS)
    assert every == [name for name in RECORDS if name != "time"]


def test_a_dry_run_and_a_list_print_and_make_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(main, monkeypatch, "figure1", "table1", "--dry-run") == 0
    output = capsys.readouterr().out
    tools = (
        "vision.run",
        "figure1.yaml --size small --out",
        "alma.report",
        "small.sh",
        "slurm.launch",
    )
    assert all(part in output for part in tools)
    assert list(tmp_path.iterdir()) == []
    assert call(main, monkeypatch, "--list") == 0
    output = capsys.readouterr().out
    for name, record in RECORDS.items():
        (line,) = [line for line in output.splitlines() if line.split()[0] == name]
        assert all(str(part) in line for part in (*record["runs"], *record["cost"], record["data"]))


@pytest.mark.parametrize("size", ["saturated", "paper"])
def test_language_models_of_both_sizes_run_and_are_reported(tmp_path, size):
    models = MODELS[size]
    options = options_of("--out", tmp_path, "--size", size, "--stream", tmp_path / "stream")
    *launches, report = reproduce.commands("table1", RECORDS["table1"], options)
    rows = RECORDS["table1"]["experiments"]["table2"].split()
    assert RECORDS["table1"]["runs"] == [len(rows), 2 * len(rows)]
    runs = {model: [f"{row}_{model}" for row in rows] for model in models}
    for model, launch in zip(models, launches, strict=True):
        until = launch.words.index("--size") + 2
        assert launch.words[until - 1] == model
        assert [request.out.name for request in read_requests(launch.words[3:until])] == runs[model]
    reported = [Path(word).name for word in report.words if "/runs/table2/" in word]
    assert reported == [*itertools.chain(*runs.values())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["figure6"], "figure6: no such figure that needs runs; --list shows them"),  # a drawing
        ([], "give a figure or table"),
        (["figure1", "--jobs", "0"], "--jobs 0"),
        (
            ["figure1", "table1", "--size", "medium"],
            "table1 has no --size medium: give --size small or",
        ),
        (["all", "time", "--size", "saturated"], "time has no --size saturated: give --size small"),
        (["time"], "size small of {EXPERIMENTS}/time.yaml: make it, and give it with --stream"),
        (
            ["table1", "--size", "saturated"],
            "size saturated of {EXPERIMENTS}/table2.yaml: make it, and",
        ),
    ],
)
def test_wrong_command_lines_are_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert message.format(EXPERIMENTS=EXPERIMENTS) in refused(main, monkeypatch, capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Experiments of two runs in a folder of their own; the current folder is empty."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    record = {"drawn": ["learning_curves"], "finding": "waiting helps", "small": "best w 2"}
    records = {
        "first": {**record, "experiments": {"mnist": "one.yaml --waiting-time 1,2"}},
        "second": {**record, "experiments": {"mnist": "one.yaml --waiting-time 1"}},
    }
    (folder / "index.yaml").write_text(yaml.safe_dump(records))
    (folder / "one.yaml").write_text("learner: sm")
    (folder / "sizes.yaml").write_text("sizes: {small: {megabatches: 2, epochs: 1, hidden: 2}}")
    monkeypatch.setattr(reproduce, "EXPERIMENTS", folder)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_the_real_tools_run_and_draw(small, monkeypatch, capsys):
    """In this process."""
    tools = {"vision.run": images, "alma.report": report}

    def listed(words: list[str], _: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            call(images, monkeypatch, *words[3:])
        return output.getvalue()

    monkeypatch.setattr(
        reproduce,
        "run",
        lambda program: call(tools[program.words[2]], monkeypatch, *program.words[3:]),
    )
    monkeypatch.setattr(reproduce.children, "ask", listed)
    assert call(main, monkeypatch, "first") == 0
    lines = capsys.readouterr().out.splitlines()
    picture = Path("reproduced/small/first/digits_B2_learning_curves.png")
    assert lines[-2].endswith(f" s: {picture}")
    recorded = "ALMA's own runs of this size, not those just made, showed"
    assert lines[-1] == f"first: paper: waiting helps; {recorded}: best w 2"
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in Path("reproduced/small/runs/digits").iterdir())
    assert names == ["sm_w1_h2_s0", "sm_w2_h2_s0"]


def test_the_exit_code_of_a_tool_is_passed_on_and_ends_the_list(small, monkeypatch, capsys):
    monkeypatch.setattr(reproduce.children, "ask", lambda *_: "run\n")
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert reproduce.run(reproduce.Command(killed)) == 137  # as in a shell
    codes = iter([0, 0, 3])
    monkeypatch.setattr(reproduce, "run", lambda program: next(codes))
    assert call(main, monkeypatch, "all") == 3
    assert "\nfirst: paper: waiting helps" in capsys.readouterr().out


def test_missing_images_end_everything_before_the_first_run(small, monkeypatch, capfd):
    """With one line that names the data set, and what is missing;
    --download fetches it once, first."""
    started = []
    real = reproduce.run
    monkeypatch.setattr(
        reproduce, "run", lambda program: started.append(program.words) or real(program)
    )
    (small / "sizes.yaml").write_text("sizes: {medium: {dataset: mnist, megabatches: 2}}")
    assert call(main, monkeypatch, "all", "--size", "paper", "--data-root", "nowhere") == 2
    output = capfd.readouterr()
    assert "cannot read mnist from nowhere" in output.err
    assert output.err.count("\n") == 1
    assert len(started) == 1
    assert not Path("reproduced").exists()
    started.clear()
    monkeypatch.setattr(reproduce.children, "ask", lambda *_: "run\n")
    monkeypatch.setattr(reproduce, "run", lambda program: started.append(program.words) or 0)
    assert call(main, monkeypatch, "all", "--size", "medium", "--download") == 0
    assert started[0][-3:] == ["mnist", "data", "download"]
    assert [words[2] for words in started[1:]] == ["vision.run", "alma.report"] * 2


def test_runs_may_be_jobs_of_slurm(monkeypatch, capsys, tmp_path):
    """Flags that are not those of the command go to the jobs."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    words = ["--cluster", "slurm", "--partition", "long", "--out", str(tmp_path), "--dry-run"]
    for figure, tool, local in (
        ("figure7", "vision.run", "--part 1"),
        ("table2", "slurm.launch", ""),
    ):
        monkeypatch.setattr(sys, "argv", ["alma reproduce", figure, *words])
        reproduce.main()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if f"-m {tool} " in line]
        assert line.endswith(" --cluster slurm --wait --partition long")
        assert not local or local not in line
    for words, problem in (
        (["--partition", "long"], "--partition: only with --cluster slurm"),
        (["--cluster", "slurm", "--jobs", "2"], "--jobs: on this machine only"),
    ):
        monkeypatch.setattr(sys, "argv", ["alma reproduce", "figure7", *words])
        with pytest.raises(SystemExit, match="2"):
            reproduce.main()
        assert problem in capsys.readouterr().err
