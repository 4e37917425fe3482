"""Runs, streams and checkpoints that earlier versions left go on with the same numbers.

tests/recorded/ holds what a version left, as it names it: every key, setting, shape and type, but not the
values of large tensors, which `restore` draws from the tensor's name. It also holds the numbers which that
version then got when it went on. With the tree of the older version on PYTHONPATH,

    python tests/test_older_runs.py COMMIT

records both anew.
"""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alma.stream import FileInfo, Part, Stream, write_index

RECORDED = Path(__file__).parent / "recorded"
TOKENS = 60  # of the vocabulary
VERBATIM = 512  # numbers in the largest tensor of whole numbers that is recorded as it is
LEARNERS = ("sm", "ens", "umix", "gens", "gmoe", "ff")
IMAGES = {"hidden": 4, "epochs": 4, "batch_size": 32}
FLAGS = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 8 --decoder-attention-heads 2
    --tokens-per-sample 16 --max-tokens 128 --optimizer adam --lr 1e-3 --lr-scheduler polynomial_decay
    --total-num-update 8 --warmup-updates 2 --clip-norm 1 --dropout 0.1 --no-epoch-checkpoints
    --num-workers 0 --seed 7 --cpu
""".split()


def record(value: Any) -> Any:
    """The structure of a checkpoint as JSON; `restore` undoes it."""
    if isinstance(value, dict):
        return {"dict": [[key, record(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [record(each) for each in value]}
    if not torch.is_tensor(value):
        return value
    found: dict[str, Any] = {"tensor": list(value.shape), "type": str(value.dtype).removeprefix("torch.")}
    if value.numel() == 1 or (value.numel() <= VERBATIM and bool((value == value.round()).all())):
        found["values"] = value.tolist()
    return found


def restore(recorded: Any, name: str = "") -> Any:
    """A checkpoint from its structure. A tensor without values is drawn with its `name` as the seed."""
    if not isinstance(recorded, dict):
        return recorded
    if "dict" in recorded:
        return {key: restore(each, f"{name}.{key}") for key, each in recorded["dict"]}
    if "tuple" in recorded or "list" in recorded:
        made = tuple if "tuple" in recorded else list
        return made(restore(each, f"{name}.{i}") for i, each in enumerate(*recorded.values()))
    dtype = getattr(torch, recorded["type"])
    if "values" in recorded:
        return torch.tensor(recorded["values"], dtype=dtype).view(recorded["tensor"])
    if dtype == torch.uint8:  # the state of a random generator
        return torch.Generator().manual_seed(zlib.crc32(name.encode())).get_state()
    tied = name.replace("output_projection", "embed_tokens")
    drawn = np.random.default_rng(zlib.crc32(tied.encode())).standard_normal(recorded["tensor"])
    if "exp_avg_sq" in name or "square" in name or "delta" in name:
        drawn = 1e-2 + np.abs(drawn)
    elif "exp_avg" in name or "momentum" in name:
        drawn = 1e-2 * drawn
    elif "norm" in name and name.endswith("weight"):
        drawn = 1 + 0.1 * drawn
    return torch.from_numpy(np.asarray(0.5 * drawn)).to(dtype)


def make_stream(out: Path) -> Path:
    """A stream of three mega-batches in the format of the recorded version, drawn at random."""
    rng = random.Random(0)
    out.mkdir()
    (out / "dict.txt").write_text("".join(f"u{i} 1\n" for i in range(TOKENS)))
    parts = []
    for i, name in enumerate(("megabatch_00", "megabatch_01", "megabatch_02", "valid", "test")):
        items = [[*rng.choices(range(4, 4 + TOKENS), k=15), 2] for _ in range(128)]
        prefix = f"{name}/train" if name.startswith("megabatch") else name
        (out / prefix).parent.mkdir(exist_ok=True)
        np.array(items, dtype=np.uint16).tofile(out / f"{prefix}.bin")
        write_index(out / f"{prefix}.idx", np.full(128, 16), 8)
        (out / f"{prefix}.keys").write_bytes(b"".join((128 * i + k).to_bytes(16) for k in range(128)))
        files = {f"{prefix}{end}": FileInfo.of(out / f"{prefix}{end}") for end in (".bin", ".idx", ".keys")}
        parts.append(Part(name, prefix, 1920, 2048, 128, 128, 1, {"web": 1920}, files))
    known = {"dict.txt": FileInfo.of(out / "dict.txt")}
    Stream(out, 2, 0, TOKENS, tuple(parts[:3]), parts[3], parts[4], {}, known).write()
    return out


def language_model(place: Path, state: Any, program) -> dict[str, float]:
    """Go on from `state`, a checkpoint of stage 0, in the stage and with growth in the next; perplexities."""
    stream = place / "stream"
    if not stream.exists():
        make_stream(stream)
    stage = place / "stage_00"
    stage.mkdir()
    torch.save(state, stage / "checkpoint_last.pt")
    train = [stream, "--task", "alma_lm", *FLAGS, "--max-update", 8]
    found = {}
    for name in ("before", "after", "grown"):
        if name == "after":
            program("train", *train, "--stage", 0, "--save-dir", stage)
        if name == "grown":
            more = ["--moe-expert-count", 6, "--grow-experts", 2]
            before, stage = stage / "checkpoint_last.pt", place / "stage_01"
            more += ["--finetune-from-model", before, "--stage", 1]
            program("train", *train, *more, "--save-dir", stage)
        result = place / f"{name}.json"
        words = [stream, "--task", "alma_lm", "--cpu", "--max-tokens", 128, "--tokens-per-sample", 16]
        program("evaluate", *words, "--path", stage / "checkpoint_last.pt", "--out", result)
        found[name] = json.loads(result.read_text())["perplexity"]
    return found


def images(place: Path, learner: str, before: dict[str, Any]) -> list[list[float]]:
    """Errors and validation losses of a run on digits, resumed from the directory that `before` describes."""
    from vision import MegaBatchStream, run

    out = place / learner
    out.mkdir()
    (out / "run.json").write_text(json.dumps(before["run"]))
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in before["rows"]))
    torch.save(restore(before["checkpoint"]), out / "checkpoint.pt")
    rows = run(MegaBatchStream("digits", 4), learner, out, save_interval=0, **IMAGES).rows
    return [[row["value"], row["extra"]["valid"]["loss"]] for row in rows[2:]]


def test_a_language_model_resumes_and_grows(tmp_path, start):
    def program(command: str, *arguments: object) -> None:
        finished = start(command, *arguments).wait()
        assert finished.code == 0, finished.output

    recorded = json.loads((RECORDED / "language_model.json").read_text())
    found = language_model(tmp_path, restore(recorded["checkpoint"]), program)
    assert found == pytest.approx(recorded["perplexities"], rel=2e-5)


@pytest.mark.parametrize("learner", LEARNERS)
def test_image_runs_resume_in_the_middle_of_a_stage(tmp_path, learner):
    before = json.loads((RECORDED / "images.json").read_text())["runs"][learner]
    found = images(tmp_path, learner, before)
    for (error, loss), (recorded_error, recorded_loss) in zip(found, before["numbers"], strict=True):
        assert error == pytest.approx(recorded_error, abs=0.01)
        assert loss == pytest.approx(recorded_loss, rel=1e-3)


def main(commit: str, place: Path) -> None:
    """Record what the version on PYTHONPATH leaves and how it goes on, in RECORDED."""

    def program(command: str, *arguments: object) -> None:
        module = "fairseq_cli.train" if command == "train" else f"fairseq_alma.{command}"
        words = [sys.executable, "-m", module, *map(str, arguments)]
        subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    short = place / "short"
    make_stream(place / "stream")
    flags = [*FLAGS, "--max-update", 4, "--save-dir", short]
    program("train", place / "stream", "--task", "alma_lm", *flags)
    state = torch.load(short / "checkpoint_last.pt", weights_only=True)
    del state["extra_state"]["metrics"]  # curves for the log
    structure = record(state)
    found = {"commit": commit, "checkpoint": structure}
    found["perplexities"] = language_model(place, restore(structure), program)
    write("language_model.json", found)

    from vision import MegaBatchStream, experiment, run

    trainer = getattr(experiment, "_Trainer", None) or experiment._Player  # its name at the recorded commit
    train, runs = trainer.train, {}

    def interrupted(player, stage):
        if stage.index == 2:  # in its second epoch, whose first is in the checkpoint
            epochs = itertools.count()
            once = player.epoch_done
            player.epoch_done = lambda: (_stop() if next(epochs) else None) or once()
        return train(player, stage)

    for learner in LEARNERS:
        trainer.train = interrupted
        out = place / "interrupted" / learner
        with contextlib.suppress(KeyboardInterrupt):
            run(MegaBatchStream("digits", 4), learner, out, save_interval=0, **IMAGES)
        trainer.train = train
        rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        before = {
            "run": json.loads((out / "run.json").read_text()),
            "rows": rows,
            "checkpoint": record(state),
        }
        runs[learner] = before | {"numbers": images(place, learner, before)}
    write("images.json", {"commit": commit, "runs": runs})


def _stop() -> None:
    raise KeyboardInterrupt


def write(name: str, content: dict[str, Any]) -> None:
    """A file of RECORDED."""
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], Path(folder))
