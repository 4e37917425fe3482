"""`alma export` of a run of the user's own trainer: folders of Hugging Face, and other
checkpoints."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from launcher import call, refused

from alma.__main__ import main as alma

TRAINER = """
import json, sys
from pathlib import Path
from alma.trainer import StageTask

task = StageTask.read(sys.argv[-1])
if task.action == "evaluate":
    task.finish({part.name: (5.0, part.tokens) for part in task.evaluate}, parameters=10)
    sys.exit()
model = Path(task.out, "model")
(model / "later").mkdir(parents=True, exist_ok=True)
config = {"model_type": "llama", "vocab_size": task.dictionary, "bos_token_id": 2}
config["eos_token_id"] = [2, 3]
files = {"config.json": json.dumps(config), "model.safetensors": "weights"}
for name in ("optimizer.pt", "trainer_state.json", "training_args.bin", ".hidden"):
    files[name] = "state"
for name, text in files.items():
    (model / name).write_text(text)
task.finish(parameters=10, updates=1, tokens=100, checkpoint="model")
"""


@pytest.fixture(scope="module")
def trained(stream, tmp_path_factory) -> Path:
    """A folder with runs of `sm` and `ens` by a trainer that writes a folder of Hugging Face."""
    place = tmp_path_factory.mktemp("trained")
    (place / "my_trainer.py").write_text(TRAINER)
    trainer = f"{sys.executable} {place / 'my_trainer.py'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        for learner in ("sm", "ens"):
            words = ("train", stream, "--learner", learner, "--waiting-time", 3)
            assert call(alma, patch, *words, "--trainer", trainer, "--out", place / learner) == 0
    return place


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run of `sm`."""
    return shutil.copytree(trained / "sm", tmp_path / "run")


@pytest.fixture
def export(run, tmp_path, monkeypatch, capsys):
    """`export(*words)` exports the run; returns what it prints and the names of the files."""

    def start(*words: object) -> tuple[str, set[str]]:
        out = tmp_path / "out"
        capsys.readouterr()
        assert call(alma, monkeypatch, "export", run, "--out", out, *words) == 0
        return capsys.readouterr().out, set(os.listdir(out))

    return start


def configure(run: Path, **settings: object) -> None:
    """Change settings in the config.json of the checkpoint."""
    file = run / "stage_00/model/model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_folder_of_hugging_face_is_copied_with_the_tokenizer_of_the_stream(
    export, run, stream, tmp_path
):
    transformers = pytest.importorskip("transformers")
    for name in ("pytorch_model.bin", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()  # of another model, from before
    said, names = export()
    assert said.endswith(f"/stage_00/model/model, with the tokenizer of {stream}\n")
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    expected.add("README.md")
    assert names == expected | {"notes.txt"}
    assert (tmp_path / "out/model.safetensors").read_text() == "weights"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The function returns").input_ids
    assert (ids[0], tokenizer.decode(ids[1:])) == (2, "The function returns")
    assert len(tokenizer) == 1004


def test_a_tokenizer_of_the_model_stays_unless_another_one_is_given(export, run, stream):
    pytest.importorskip("transformers")
    (run / "stage_00/model/model/tokenizer.model").write_text("its own")
    said, names = export()
    assert "with its own tokenizer" in said
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer.model"}
    said, names = export("--tokenizer", stream)
    assert f"with the tokenizer of {stream}" in said
    assert "tokenizer.model" not in names
    assert "tokenizer.json" in names


def test_ids_that_are_not_the_streams_leave_the_tokenizer_out(
    export, run, stream, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    configure(run, vocab_size=32_000)
    said, names = export()
    assert "without a tokenizer" in said
    assert "the checkpoint of 32,000" in said
    assert names == {"README.md", "config.json", "model.safetensors"}
    shutil.rmtree(tmp_path / "out")
    words = ("export", run, "--out", tmp_path / "out", "--tokenizer", stream)
    assert "the checkpoint of 32,000" in refused(alma, monkeypatch, capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings", [{"vocab_size": None}, {"vocab_size": "1"}, {"bos_token_id": -1}]
)
def test_a_config_that_no_tokenizer_fits_leaves_it_out(export, run, settings):
    configure(run, **settings)
    said, _ = export()
    (name,) = settings
    assert f"without a tokenizer ({run}/stage_00/model/model/config.json: {name}" in said


def test_a_stream_that_is_gone_leaves_the_tokenizer_out(export, run, tmp_path):
    task = run / "stage_00/model/stage.json"
    task.write_text(json.dumps(json.loads(task.read_text()) | {"stream": str(tmp_path / "gone")}))
    said, _ = export()
    assert f"without a tokenizer ({tmp_path}/gone: the stream of {run} is not here" in said
    task.write_text("{")
    assert f"without a tokenizer ({task}: damaged" in export()[0]
    task.unlink()
    assert f"without a tokenizer ({task.parent} has no stage.json" in export()[0]


def test_what_is_no_single_folder_of_hugging_face_is_one_line(
    trained, run, tmp_path, monkeypatch, capsys
):
    def error(model: Path, *words: object) -> str:
        return refused(
            alma, monkeypatch, capsys, "export", model, "--out", tmp_path / "out", *words
        )

    ensemble = error(trained / "ens")
    assert "ens deploys an ensemble of 2 models of its own trainer" in ensemble
    assert "/ens/stage_00/member_1/model/model\n" in ensemble
    assert "run: --weights is for models of fairseq" in error(run, "--weights", "average")
    assert "run: --onnx is for runs of `alma images`: leave it out" in error(run, "--onnx")
    checkpoint = run / "stage_00/model/model"
    (checkpoint / "model.safetensors").unlink()
    assert f"{checkpoint}, the checkpoint of the run's own trainer, is no folder" in error(run)
    shutil.rmtree(checkpoint)
    assert f"{checkpoint}: missing: restore it, or delete {run}/stage_00 and" in error(run)
    checkpoint.touch()
    assert "load it with the trainer's code" in error(run)
    (run / "stage_00/result.json").unlink()
    assert "no stage has finished yet" in error(run)
    assert not (tmp_path / "out").exists()
