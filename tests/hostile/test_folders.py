"""Folders of others, as an archive unpacks them: links, pipes, names, records, experiments,
data."""

import gzip
import itertools
import json
import os
import re
import struct
from pathlib import Path

import pytest
import yaml

from tests.alma.synthetic import write_run

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
TRAINER = "train {stream} --learner sm --out run --trainer true"


@pytest.fixture
def run(place):
    """A finished run of two mega-batches in work/runs/good."""
    return make_run(place.work / "runs/good")


def make_run(folder: Path, **config) -> Path:
    write_run(folder, [3.0, 2.0, 1.5], config, None, "perplexity", 10, lambda stage: 1e9)
    return folder


def symbolic(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard(path: Path, victim: Path) -> None:
    os.link(victim, path)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


LINKS = {
    "a lock of a run": ("run/.lock", symbolic, TRAINER),
    "a pipe as the lock of a run": ("run/.lock", pipe, TRAINER),
    "run.json": ("run/.run.json.tmp", symbolic, TRAINER),
    "a log": ("run/untrained.log", symbolic, TRAINER),
    "a pipe as a log": ("run/untrained.log", pipe, TRAINER),
    "a task": ("run/untrained/.stage.json.tmp", symbolic, TRAINER),
    "a page": (".report.html.tmp", symbolic, "report runs --html report.html"),
    "rows as CSV": ("out/.report.csv.tmp", symbolic, "report runs --out out"),
    "advice": ("out/.advice.md.tmp", symbolic, "advise runs --out out"),
    "a result": (
        ".result.json.tmp",
        symbolic,
        "evaluate {stream} --path {checkpoint} --cpu --out result.json",
    ),
    "an export": (
        "run/.lock",
        symbolic,
        "data text={corpus} --out run --mega-batches 1 --words 100 --valid-words 9 "
        "--vocab-size 300",
    ),
}


@pytest.mark.parametrize("kind", LINKS)
def test_nothing_is_written_through_a_link(place, run, kind):
    name, link, words = LINKS[kind]
    make_run(place.work / "runs/other", learner="gmoe")
    (place.work / "corpus").mkdir()
    (place.work / "corpus/a.txt").write_text("words of a text\n" * 1000)
    path = place.work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    link(path, place.victim)
    arguments = {
        "stream": place.stream,
        "checkpoint": place.checkpoint,
        "corpus": place.work / "corpus",
    }
    error = place.refused(*words.format(**arguments).split())
    assert path.name in error
    assert "delete it" in error


def test_files_of_a_linked_work_directory_stay(place):
    (place.work / "corpus").mkdir()
    (place.work / "corpus/a.txt").write_text("words of a text\n" * 1000)
    elsewhere = place.work / "elsewhere/stream"
    elsewhere.mkdir(parents=True)
    (place.work / "out").mkdir()
    (place.work / "out/.work-0123456789abcdef").symlink_to(elsewhere.parent)
    words = (
        "data text=corpus --out out --mega-batches 1 --words 100 --valid-words 9 --vocab-size 300"
    )
    assert "a link in place of a work directory" in place.refused(*words.split())
    assert elsewhere.exists()


def test_a_hard_link_is_not_emptied(place, run):
    hard(place.work / ".result.json.tmp", place.victim)
    words = f"evaluate {place.stream} --path {place.checkpoint} --cpu --out result.json"
    ended = place.run(*words.split())
    place.check(ended)
    assert ended.code == 0, ended
    assert "perplexity" in (place.work / "result.json").read_text()


def control_in_name(place, run):
    run.rename(run.with_name(f"x{ESCAPE}"))


def control_in_log(place, run):
    (run / "results.jsonl").unlink()
    (run / "train.log").write_text(f"\n$ train\nRuntimeError: {ESCAPE}\n")


def control_in_settings(place, run):
    other = make_run(place.work / "runs/bad")
    record = json.loads((other / "run.json").read_text())
    record["config"]["name"] = ESCAPE
    (other / "run.json").write_text(json.dumps(record))


def torn(place, run):
    (make_run(place.work / "runs/bad") / "run.json").write_text("{")


def torn_rows(place, run):
    (make_run(place.work / "runs/bad") / "results.jsonl").write_text("{}\n")


def piped(place, run):
    bad = make_run(place.work / "runs/bad")
    (bad / "run.json").unlink()
    os.mkfifo(bad / "run.json")


def piped_jobs(place, run):
    (place.work / "runs/bad").mkdir()
    os.mkfifo(place.work / "runs/bad/jobs.json")


SHOWN = {
    "a name": (control_in_name, "status", 0, "x\\x1b[2J\\x1b]0;owned\\x07"),
    "a name in a report": (control_in_name, "report", 0, "perplexity"),
    "a log": (control_in_log, "status", 1, "RuntimeError: \\x1b[2J"),
    "settings": (control_in_settings, "status", 1, "runs/bad/run.json"),
    "settings in a report": (control_in_settings, "report", 1, "runs/bad/run.json"),
    "a torn file": (torn, "status", 1, "runs/bad/run.json"),
    "a torn file in a report": (torn, "report", 1, "runs/bad/run.json"),
    "torn rows": (torn_rows, "report", 1, "runs/bad/results.jsonl"),
    "torn rows and advice": (torn_rows, "advise", 1, "runs/bad/results.jsonl"),
    "a pipe": (piped, "status", 1, "runs/bad/run.json"),
    "a pipe in a report": (piped, "report", 1, "runs/bad/run.json"),
    "a pipe of jobs": (piped_jobs, "status", 1, "runs/bad/jobs.json"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_damaged_runs_are_a_line_and_the_others_are_shown(place, run, kind):
    change, command, code, shown = SHOWN[kind]
    make_run(place.work / "runs/other", learner="gmoe")
    change(place, run)
    ended = place.run(command, "runs")
    place.check(ended)
    assert ended.code == code, ended
    text = ended.out + ended.err
    assert shown in text
    assert text.count("runs/bad/") <= 1
    assert "gmoe" in text or "runs/other" in text


def test_a_folder_with_nothing_but_damaged_runs_is_one_line(place):
    (make_run(place.work / "bad") / "run.json").write_text("{")
    for command in ("status", "report"):
        assert "bad/run.json" in place.refused(command, "bad")


@pytest.mark.parametrize("checkpoint", ["../../cfglm.pt", "/etc/passwd", "a/../../../x", None, 3])
def test_a_marker_names_a_checkpoint_inside_its_folder(place, run, checkpoint):
    stage = run / "stage_00"
    stage.mkdir()
    (stage / "result.json").write_text('{"training": [{}]}')
    (stage / "trained.json").write_text(
        json.dumps({"checkpoint": checkpoint} if checkpoint else {})
    )
    assert "stage_00/trained.json: damaged" in place.refused("export", run, "--out", "exported")


def merges(place):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 12)]
    return "\n".join(lines)


def aliases(place):
    lines = ["a0: &a0 [1, 2]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12)]
    return "\n".join(lines)


def itself(place):
    return "learner: &a [*a]"


def objects(place):
    return f"learner: !!python/object/apply:os.system ['touch {place.marker}']"


def control(place):
    return 'learner: "\\e[2J"'


EXPERIMENTS = {
    merges: "<< in a mapping",
    aliases: "more than",
    itself: "contains itself",
    objects: "python/object",
}
EXPERIMENTS[control] = "give each option"


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_an_experiment_is_plain_and_small(place, kind):
    (place.work / "hostile.yaml").write_text(kind(place))
    for command in ("train", "images"):
        assert EXPERIMENTS[kind] in place.refused(command, "hostile.yaml", "--dry-run")


def test_a_dry_run_imports_no_user_dir_and_shows_programs(place, monkeypatch, capsys):
    from slurm.engine import children
    from slurm.lm import request

    questions = []

    def ask(command, subject, text):
        questions.append(json.loads(text))
        return json.dumps([{"arch": "x", "settings": {}} for _ in questions[-1]])

    monkeypatch.setattr(children, "ask", ask)
    text = {
        "learner": "sm",
        "stream": str(place.stream),
        "flags": {"user-dir": str(place.own_code())},
    }
    file = place.work / "hostile.yaml"
    file.write_text(yaml.safe_dump(text))
    request.resolved(request.read_requests([str(file), "--dry-run"]), without_code=True)
    request.resolved(request.read_requests([str(file)]))
    without, with_code = (" ".join(line) for lines in questions for line in lines)
    assert "--user-dir" not in without
    assert "--user-dir" in with_code
    file.write_text(yaml.safe_dump({"learner": "sm", "trainer": f"touch {place.marker}"}))
    ended = place.run("train", file, "--stream", place.stream, "--dry-run")
    place.check(ended)
    assert ended.code == 0, ended
    assert f"runs code: --trainer: touch {place.marker}" in ended.err


@pytest.mark.parametrize(
    ("flag", "arch"),
    [
        ("--decoder-glu", "lightconv_lm"),
        ("--weight-softmax", "lightconv_lm"),
        ("--decoder-kernel-size-list", "lightconv_lm"),
        ("--decoder-layers", "fconv_lm"),
        ("--character-filters", "transformer_lm"),
        ("--adam-betas", "transformer_lm"),
    ],
)
def test_a_command_line_evaluates_no_text(place, flag, arch):
    words = ["--task", "alma_lm", "--arch", arch, f"{flag}={place.code}", "--optimizer", "adam"]
    assert flag in place.refused("fairseq-train", place.stream, *words)


def test_an_index_of_weights_stays_in_its_folder(place):
    folder = place.work / "gpt2"
    folder.mkdir()
    sizes = {
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
        "n_positions": 8,
        "vocab_size": 9,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "gpt2"}))
    index = {"weight_map": {"wte.weight": "../../precious/victim.txt"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = place.refused("fairseq-train", place.stream, "--task", "alma_lm", "--init", folder)
    assert "no whole GPT-2" in error


def test_a_class_that_no_record_can_hold_is_refused_before_training(place):
    for part, number in itertools.product(("train", "test"), range(2)):
        folder = place.work / "images" / part / (f"cat{ESCAPE}" if number else "dog")
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(b"")
    words = "images --dataset folder --data-root images --out run --epochs 1".split()
    error = place.refused(*words)
    assert "rename it" in error
    assert not (place.work / "run").exists()


def test_of_a_manifest_with_missing_images_no_row_is_kept(place):
    rows = "path,label,date\n" + "absent.png,cat,2024-01-01\n" * 300_000
    (place.work / "images.csv").write_text(rows)
    words = "images --manifest images.csv --by month --out run".split()
    assert "absent.png (no such file)" in place.refused(*words)
    numbered = "".join(f"absent{number}.png,cat,2024-01-01\n" for number in range(100_000))
    (place.work / "images.csv").write_text("path,label,date\n" + numbered)
    assert "cannot read 100,000 images (no such file): ./absent0.png" in place.refused(*words)


def test_a_packed_file_has_the_bytes_that_its_header_tells(place):
    raw = place.work / "data/MNIST/raw"
    raw.mkdir(parents=True)
    name = "train-images-idx3-ubyte.gz"
    for sizes, content in (
        ((60000, 28, 28), bytes(1 << 24)),
        ((60000, 280, 280), b""),
        ((2, 2, 2), bytes(9)),
    ):
        with gzip.open(raw / name, "wb", compresslevel=1) as file:
            file.write(b"\0\0\x08\x03" + struct.pack(">3I", *sizes) + content)
        assert name in place.refused(
            "images", "--dataset", "mnist", "--data-root", "data", "--out", "run"
        )


def test_reports_hold_no_markup_and_no_formula(place):
    name = "![x](http://evil/x.png) <img src=x> `code`"
    make_run(place.work / "runs/=cmd", name=name)
    make_run(place.work / "runs/b", name="@SUM(1)", learner="gmoe")
    ended = place.run("report", "runs", "--out", "out")
    place.check(ended)
    assert ended.code == 0, ended
    written = (place.work / "out/report.md").read_text()
    assert re.search(r"(?<!\\)\]\(http", written) is None
    assert "<img" not in written
    cells = (place.work / "out/report.csv").read_text()
    assert "'@SUM(1)" in cells
    assert ",@" not in cells
    assert ",=" not in cells
    ended = place.run("report", "=cmd", "--out", "../out")
    assert "\n=cmd" not in ended.out


def test_a_lock_is_the_owners_unless_the_folder_is_the_groups(tmp_path):
    from alma.files import locked

    for mode, expected in ((0o755, 0o600), (0o775, 0o660)):
        tmp_path.chmod(mode)
        with locked(tmp_path):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == expected


def test_a_user_dir_of_the_command_line_may_still_name_its_own_model(place):
    """It is the user's own code; a checkpoint of its model is built."""
    module = place.folder / "mine"
    module.mkdir()
    (module / "__init__.py").write_text(
        "from fairseq.models import register_model, register_model_architecture\n"
        "from fairseq.models.transformer_lm import TransformerLanguageModel, "
        "TransformerLanguageModelConfig\n"
        "@register_model('my_lm', dataclass=TransformerLanguageModelConfig)\n"
        "class Mine(TransformerLanguageModel):\n    pass\n"
    )
    path = place.tampered("mine.pt", lambda state: state["cfg"]["model"].update(_name="my_lm"))
    words = ["evaluate", place.stream, "--path", path, "--cpu", "--out", "result.json"]
    assert "'my_lm'" in place.refused(*words)
    ended = place.run(*words, "--user-dir", module)
    place.check(ended)
    assert ended.code == 0, ended
