"""The month: examples/monthly adds data, tests, asks, trains and deploys; kills change nothing."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.growing import record_of

ROOT = Path(__file__).parent.parent
MONTHLY = ROOT / "examples/monthly"
KILLS = 40

STAND_IN = """\
#!/bin/sh
# Records what it is called with; answers as the files due and gate say.
echo "$@" >>calls
case "$1 $*" in
due*--json*) echo "{\\"model\\": {\\"megabatch\\": $(cat newest)}}" ;;
due*) exit "$(cat due)" ;;
gate*) exit "$(cat gate)" ;;
train*) echo 7 >newest; mkdir -p run; touch run/results.jsonl; exit "$(cat train)" ;;
export*) mkdir -p "$6"; touch "$6/config.json" ;;
esac
"""


def environment(folder: Path) -> dict[str, str]:
    """In which `alma` is the program in folder/bin, else this tree's."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "alma"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m alma "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def month(tmp_path):
    """`month(newest=6, deployed=None, due=0, gate=0, train=0)`: the exit code and the calls."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/alma"
    program.write_text(STAND_IN)
    program.chmod(0o755)

    def start(newest=None, deployed=None, **answers):
        for name, code in ({"due": 0, "gate": 0, "train": 0} | answers).items():
            (tmp_path / name).write_text(str(code))
        if newest:
            (tmp_path / "newest").write_text(str(newest))
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run/results.jsonl").touch()
        if deployed:
            (tmp_path / "models").mkdir(exist_ok=True)
            (tmp_path / "models" / str(deployed)).mkdir(exist_ok=True)
            start.switch_to(str(deployed))
        words = ["sh", MONTHLY / "month.sh", "run", "models", "alma", "train", "S", "--out", "run"]
        variables = environment(tmp_path) | {"DUE": "--every 3", "GATE": "--worth 1% --forget 2%"}
        done = subprocess.run(words, cwd=tmp_path, env=variables, check=False)
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, [call for call in calls if "--json" not in call]

    def switch_to(model):
        link = tmp_path / "models/deployed"
        link.unlink(missing_ok=True)
        link.symlink_to(model)

    start.deployed = lambda: os.readlink(tmp_path / "models/deployed")

    def since(**answers):
        """The calls of one more month."""
        (tmp_path / "calls").write_text("")
        return start(**answers)[1]

    start.switch_to = switch_to
    start.since = since
    return start


def test_the_first_month_trains_and_deploys(month):
    assert month() == (0, ["train S --out run", "export run --t 7 --out models/7"])
    assert month.deployed() == "7"


@pytest.mark.parametrize(
    ("answers", "calls", "deployed"),
    [
        ({"due": 1}, [], "6"),
        ({"due": 3}, [], "6"),
        ({}, ["train", "gate", "export"], "7"),
        ({"gate": 1}, ["train", "gate"], "6"),
        ({"gate": 3}, ["train", "gate"], "6"),
    ],
)
def test_a_month_asks_before_it_trains_and_before_it_deploys(month, answers, calls, deployed):
    code, made = month(newest=6, deployed=6, **answers)
    assert code == 0
    assert [call.split()[0] for call in made] == ["gate", "test", "due", *calls]
    assert month.deployed() == deployed
    assert made[0] == "gate run --worth 1% --forget 2%"
    assert made[2] == "due run --every 3"
    if "gate" in calls:
        assert made[4] == "gate run --deployed 6 --worth 1% --forget 2%"


@pytest.mark.parametrize(
    ("answers", "last"), [({"due": 2}, "due"), ({"train": 1}, "train"), ({"gate": 2}, "gate")]
)
def test_a_step_that_fails_ends_the_month_with_its_code(month, answers, last):
    code, made = month(newest=6, deployed=6, **answers)
    assert code == next(iter(answers.values()))
    assert made[-1].split()[0] == last
    assert ("train" in answers) == any(call.startswith("train") for call in made)
    assert month.deployed() == "6"


def test_a_month_that_was_killed_before_its_gate_asks_it_again(month):
    """The newest model is trained, `due` says that nothing arrived, another one is deployed."""
    code, made = month(newest=7, deployed=6, due=1)
    assert code == 0
    assert [call.split()[0] for call in made] == ["gate", "test", "due", "gate", "export"]
    assert month.deployed() == "7"


def test_a_first_month_that_was_killed_before_its_first_model_goes_on(month):
    """The run has a row of the untrained model, for which `alma gate` has no answer."""
    assert month(newest=6, gate=2)[0] == 0
    assert month.deployed() == "7"


def test_a_model_without_evidence_is_asked_about_again(month):
    month(newest=6, deployed=4, due=1, gate=3)
    assert "gate run --deployed 4 --worth 1% --forget 2%" in month.since(due=1, gate=3)
    assert month.deployed() == "4"


def test_a_half_written_export_is_written_again(month, tmp_path):
    (tmp_path / "models/7").mkdir(parents=True)
    assert "export run --t 7 --out models/7" in month()[1]


def test_a_model_that_was_taken_back_stays_out_and_the_next_is_compared_with_the_older(month):
    month(newest=6, deployed=4, due=1)
    assert month.deployed() == "6"
    month.switch_to("4")
    question = "gate run --deployed 4 --worth 1% --forget 2%"
    for _ in range(2):
        assert question not in month.since(due=1)
        assert month.deployed() == "4"
    assert question in month.since()
    assert month.deployed() == "7"


@pytest.mark.parametrize("link", ["gone", "../models/6", None])
def test_a_link_to_no_model_is_refused_before_anything_is_done(month, tmp_path, link):
    month(newest=6, deployed=4)
    (tmp_path / "calls").write_text("")
    (tmp_path / "models/deployed").unlink()
    if link:
        month.switch_to(link)
    else:
        (tmp_path / "models/deployed").mkdir()
    assert month() == (2, [])


def test_wrong_words_say_what_to_give(tmp_path):
    for words in ([], ["images"], ["text", "out", "crawl.jsonl"], ["video", "out"]):
        command = ["sh", MONTHLY / "run.sh", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "run.sh images FOLDER" in done.stderr
    assert not list(tmp_path.iterdir())


def result_of(folder: Path) -> tuple[object, ...]:
    """What kills must not change: the record of the run, and the models that were deployed."""
    rows, losses = record_of(str(folder / "run"))
    models = sorted(path.parent.name for path in folder.glob("models/[0-9]*/config.json"))
    deployed = os.readlink(folder / "models/deployed")
    losses_as_bytes = {name: array.tobytes() for name, array in losses.items()}
    return rows, losses_as_bytes, models, deployed


def play(command: list[object], folder: Path, variables: dict[str, str], kills: int) -> str:
    """Run a command in its own process group, killed so often at random times; its output."""
    chance = random.Random(1)
    began = time.monotonic()
    subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True)
    seconds = time.monotonic() - began
    undisturbed = result_of(folder / "months")
    (folder / "months").rename(folder / "undisturbed")
    for _ in range(kills):
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(chance.uniform(0.1, seconds / 8))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(
        command, cwd=folder, env=variables, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert result_of(folder / "months") == undisturbed
    return done.stdout


@pytest.mark.thorough
def test_months_of_images_under_kills(tmp_path):
    variables = environment(tmp_path) | {"EPOCHS": "2", "OMP_NUM_THREADS": "1"}
    play(["sh", MONTHLY / "run.sh", "images", "months"], tmp_path, variables, KILLS)


TRAINER = """\
import json, sys
from pathlib import Path

import numpy as np
from alma.trainer import StageTask

task = StageTask.read(sys.argv[1])
quality = json.loads(Path(__file__).with_name("quality.json").read_text())
if task.action == "train":
    model = Path(task.out, "model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": task.dictionary, "t": task.t}))
    (model / "model.safetensors").write_text("weights")
    task.finish(parameters=10, updates=1, tokens=100, checkpoint="model")
    sys.exit()
t = 0
for member in task.members:
    t = json.loads(Path(member, "config.json").read_text())["t"]
losses, documents = {}, {}
for part in task.evaluate:
    difficulty = np.random.default_rng(list(part.name.encode())).normal(3, 0.5, part.documents)
    noise = np.random.default_rng([t, *part.name.encode()]).normal(0, 0.05, part.documents)
    tokens = np.full(part.documents, part.tokens // part.documents)
    tokens[0] += part.tokens - tokens.sum()
    nll = (difficulty + noise + quality[t]) * tokens
    documents[part.name] = np.stack([nll, tokens], axis=1)
    losses[part.name] = nll.sum() / part.tokens, part.tokens
task.finish(losses, documents, parameters=10)
"""
QUALITY = [1, 0, 0, 0, 0.3, -0.3, -0.3, -0.2, -0.6]
"""Nats that the model after mega-batch t adds to each loss: t = 4 and 7 are worse, 5, 8 better."""
ANSWERS = {3: "no evidence", 4: "no", 5: "yes", 6: "no evidence", 7: "no", 8: "yes"}


def write_crawl(path: Path) -> None:
    """Write eight months of 80 short texts each."""
    chance = random.Random(0)
    words = [f"word{number}" for number in range(300)]
    with path.open("w") as file:
        for month in range(1, 9):
            for _ in range(80):
                text = " ".join(chance.choices(words, k=50))
                record = {"date": f"2024-{month:02d}-10", "text": text}
                file.write(json.dumps(record) + "\n")


MONTHS_OF_TEXT = """\
set -eu
alma data crawl=crawl.jsonl --by month --until 2024-02 --words 1000 --eval-words 1500 \\
    --valid-words 200 --vocab-size 300 --out months/stream
for month in 2 3 4 5 6 7 8; do
    [ $month = 2 ] || alma data crawl=crawl.jsonl --append --until 2024-0$month --out months/stream
    sh "$MONTHLY/month.sh" months/run months/models \\
        alma train months/stream --learner sm --trainer "$TRAINER" --out months/run
done
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [0, KILLS])
def test_a_worse_model_is_stopped_and_a_better_one_passes(tmp_path, kills):
    """Six appends with a trainer whose models are as good as QUALITY says."""
    write_crawl(tmp_path / "crawl.jsonl")
    (tmp_path / "my_trainer.py").write_text(TRAINER)
    (tmp_path / "quality.json").write_text(json.dumps(QUALITY))
    (tmp_path / "months.sh").write_text(MONTHS_OF_TEXT)
    variables = environment(tmp_path) | {
        "MONTHLY": str(MONTHLY),
        "TRAINER": f"{sys.executable} {tmp_path / 'my_trainer.py'}",
        "OMP_NUM_THREADS": "1",
    }
    command = ["sh", "months.sh"]
    if kills:
        play(command, tmp_path, variables, kills)
        return
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    due = [line for line in done.stdout.splitlines() if "month since the training on" in line]
    assert len(due) == 6
    assert all(line.startswith("yes: 1 month since") for line in due)
    gates = [line for line in done.stdout.splitlines() if ": the model of" in line]
    for line, (month, answer) in zip(gates, ANSWERS.items(), strict=True):
        assert line.startswith(f"{answer}: the model of 2024-{month:02d} is"), line
        assert "documents, paired" in line
    assert os.readlink(tmp_path / "months/models/deployed") == "8"
    assert {path.name for path in (tmp_path / "months/models").glob("[0-9]*")} == {"2", "5", "8"}
    config = json.loads((tmp_path / "months/models/5/config.json").read_text())
    assert config["t"] == 5
