"""The steps for a machine with a GPU, at tiny sizes on a CPU; where there is one, they use it."""

import json
import os
import re
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.errors import UserError
from slurm.engine.forks import ForkServer

ROOT = Path(__file__).parents[2]
MACHINE = set(
    "cloudpickle colorama contourpy cycler cython filelock fonttools fsspec hf-xet httpx huggingface-hub "
    "jinja2  joblib kiwisolver lxml markupsafe matplotlib mpmath narwhals networkx numpy packaging pillow "
    "portalocker protobuf pyarrow pyparsing python-dateutil pyyaml regex sacrebleu safetensors scikit-learn "
    "scipy sentencepiece setuptools sympy tabulate threadpoolctl tokenizers torch torchaudio torchvision "
    "tqdm transformers typer typing-extensions".split()
)
"""What the GPU machine has of the packages that ALMA needs."""


@pytest.fixture(scope="module")
def server():
    """Forks the processes of the steps: one import of fairseq for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # an installed package is called `benchmarks`, too
        made = ForkServer(["fairseq_cli.train", "fairseq_alma.preloaded", "benchmarks.gpu.profile"])
    yield made
    made.stop()


@pytest.fixture
def frame(benchmark, server, monkeypatch):
    """The frame, with forks in place of new processes."""
    frame = benchmark("gpu.frame")

    def start(words, output, environment):
        with open(os.devnull) as nothing:
            return server.start(words, [nothing.fileno(), output.fileno(), output.fileno()], environment)

    monkeypatch.setattr(frame, "start", start)
    return frame


@pytest.fixture
def dry_run(benchmark, frame, tmp_path, monkeypatch):
    """`dry_run(step)` runs the command and returns the JSON file."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(step, *flags):
        words = [step, "--out", str(tmp_path), "--dry-run", "--repeats", "2", *flags]
        benchmark("gpu").main(words)
        return json.loads((tmp_path / f"{step}.json").read_text())

    return run


def test_the_table_and_the_json_file_of_a_step(dry_run, capsys):
    found = dry_run("switch")
    assert (found["complete"], found["tiny"], found["repeats"]) == (True, True, 2)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert [row["dtype"] for row in found["rows"]] == ["bf16", "fp16", "fp32"]
    for row, limit in zip(found["rows"], (2e-2, 3e-3, 1e-6), strict=True):
        assert float(row["difference"]) < limit
        times = [row[f"{name} / dense"] for name in ("padded", "loop", "one-hot")]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in times)
    table = found["table of medians and quartiles"]
    assert table[0][:4] == ["D", "S", "E", "dtype"]
    assert re.fullmatch(r"[\d.]+ \[[\d.]+-[\d.]+\]", table[1][5])
    assert table[1][5] in capsys.readouterr().out


def test_training_is_measured_beside_transformer_lm(dry_run):
    product, peer, switch = dry_run("train")["rows"]
    assert product["fp32, TFLOP/s"] > 0
    assert len(peer["tokens/s"]) == len(switch["tokens/s"]) == 2
    speeds = [sum(row["tokens/s"]) / 2 for row in (peer, switch)]
    assert switch["speed / transformer_lm"] == pytest.approx(speeds[1] / speeds[0])
    assert 0 < switch["MFU"] < 1
    assert switch["estimate GB"] > 0


def test_active_sizes_are_equal_and_flops_are_those_of_the_model(benchmark):
    training = benchmark("gpu.training")
    data = training.Data(None, 50_264, 512, 64)
    peer, switch = (data.flops(training.Model("base", experts)) for experts in (0, 8))
    router = 3 * 2 * 3 * 512 * 8
    assert switch - peer == router
    assert peer == pytest.approx(45.7e9 * 3 / 512, rel=0.01)  # the paper's base model


def test_fairseq_train_accepts_all_flags_of_full_size(benchmark, tmp_path):
    """Each fits a GPU with 80 GB, by the estimate that the step compares with the peak."""
    from fairseq_alma.check import resolve

    train, training = benchmark("gpu.train"), benchmark("gpu.training")
    data = training.Data(tmp_path, 50_264, 512, 64)
    for model, flags in train.settings(tiny=False):
        words = data.words(model, flags, 45)
        if model.experts:
            assert 3e9 < train.estimated(words, data.vocabulary - 4) < 78e9
        else:
            assert resolve(words)["arch"] == "transformer_lm"
    stream = [str(tmp_path), "--task", "alma_lm", *benchmark("gpu.stream").BASE.split()]
    assert resolve(stream)["settings"]["--moe-expert-count"] == 8


def test_a_training_is_profiled(dry_run):
    (row,) = dry_run("profile")["rows"]
    assert row["update, ms"] > 0
    assert 0 < row["outside updates"] < 1
    assert (row["kernels / update"], row["GPU idle"]) == (0, 1)


def test_shares_of_the_time(benchmark):
    """Two updates' worth of made-up events: kernels that overlap count once, annotations are no kernels."""
    profile = benchmark("gpu.profile")

    def event(name, start, end, device="CPU", annotation=False):
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(
            name=name, time_range=span, device_type=f"DeviceType.{device}", is_user_annotation=annotation
        )

    events = [
        event("gemm", 0, 4e5, "CUDA"),
        event("copy", 3e5, 5e5, "CUDA"),
        event("gemm", 7e5, 8e5, "CUDA"),
        event("train_step-10", 0, 1e6, "CUDA", annotation=True),
        event("cudaStreamSynchronize", 0, 2.5e5),
        event("cudaLaunchKernel", 0, 1e5),
    ]
    row = profile.shares(events, wall=1.0, inside=0.9)
    assert row["GPU idle"] == pytest.approx(0.4)
    assert row["host waits"] == pytest.approx(0.25)
    assert row["outside updates"] == pytest.approx(0.1)
    assert row["kernels / update"] == 3 / profile.UPDATES
    assert row["longest kernels"] == "gemm 50%; copy 20%"


def test_image_learners_are_measured_beside_plain_pytorch(dry_run):
    rows = dry_run("images")["rows"]
    assert [(row["data"], row["arch"]) for row in rows] == [
        ("mnist", ""),
        ("cifar10", ""),
        ("cifar10", "torchvision:mobilenet_v3_small"),
    ]
    for row in rows:
        ratios = [
            row[name] for name in ("DataLoader / sm", "on the GPU / sm", "ens / sm", "one by one / ens")
        ]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in ratios)


def test_a_killed_training_resumes_with_the_same_numbers(dry_run):
    (row,) = dry_run("resume")["rows"]
    assert (row["exit code"], row["updates before"] - row["repeated"]) in [(-15, 32), (-15, 48), (-15, 64)]
    assert (float(row["worst loss"]), float(row["weights"])) == (0, 0)


@pytest.mark.parametrize(
    ("loss", "last", "message"), [(5.5, 100, "differs by 10.0%"), (5, 99, "not 1 to 100")]
)
def test_a_resumed_training_with_other_numbers_is_an_error(
    benchmark, tmp_path, monkeypatch, loss, last, message
):
    resume = benchmark("gpu.resume")

    def train(words, *_):
        first = words[-1].endswith("through")
        updates = range(1, (resume.UPDATES if first else last) + 1)
        return [{"loss": 5 if first else loss, "num_updates": number} for number in updates]

    monkeypatch.setattr(resume, "train", train)
    with pytest.raises(UserError, match=message):
        resume.measure([], "none", tmp_path / "run", [], tmp_path / "log")


def test_a_stream_has_a_row_for_each_stage(dry_run):
    stream, untrained, first = dry_run("stream")["rows"]
    assert stream["tokens"] > stream["words"] > 1000
    assert untrained["averaged"] == untrained["raw"]
    assert first["averaged"] != first["raw"]
    assert first["seconds"] > 0


def test_tests_are_collected(benchmark, dry_run):
    rows = dry_run("tests")["rows"]
    files = ["fairseq_alma/test_gpu.py", "vision/test_data.py", "vision/test_gpu.py"]
    assert [row["file"] for row in rows] == [f"tests/{file}" for file in files]
    assert all(int(row["outcome"].split()[0]) > 0 for row in rows)


def test_a_step_ends_at_its_limit_with_what_it_has(benchmark, tmp_path, monkeypatch, capsys):
    """An error in a case does not end the step; no child process outlives it."""
    frame = benchmark("gpu.frame")

    def cases(asked):
        yield {"case": 1}, lambda: {"ms": 2.0}
        yield {"case": 2}, lambda: {"share": 1 / 0}
        yield {"case": 3}, lambda: {"share": float("nan")}
        with frame.started(["http.server", "0", "--bind", "127.0.0.1"], tmp_path / "child.log") as child:
            children.append(child)
            yield {"case": 4}, lambda: time.sleep(60)

    children = []
    monkeypatch.setattr(frame, "_cases", cases)
    assert frame.run(frame.Asked("switch", tmp_path, 2, 2, True))
    found = json.loads((tmp_path / "switch.json").read_text())
    assert found["complete"] is False
    assert [row["case"] for row in found["rows"]] == [1, 2, 3]
    assert found["rows"][0] == {"case": 1, "ms": 2.0}
    assert "ZeroDivisionError" in found["rows"][1]["error"]
    assert "error" in found["rows"][2]
    assert "stopped at the limit of 2 s" in capsys.readouterr().out
    assert children[0].poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_child_is_a_process_of_this_checkout(benchmark, tmp_path):
    """Without forks: its output goes to the log, and its exit code comes back."""
    frame = benchmark("gpu.frame")
    (tmp_path / "log").write_text("earlier\n")
    code, text = frame.child(["benchmarks", "gpu", "nothing"], tmp_path / "log")
    assert (code, text.count("'nothing'"), text.count("earlier")) == (2, 1, 0)
    assert (tmp_path / "log").read_text() == f"earlier\n{text}"


def test_what_alma_requires_is_carried_or_on_the_machine(benchmark):
    wheels = benchmark("gpu.wheels")
    plain = {name: re.sub(r"[-_.]+", "-", name.lower()) for name in wheels.MISSING}
    needed, left = set(), ["alma-macroscale"]
    while left:
        name = left.pop()
        for line in metadata.requires(name) or ():
            marker = line.partition(";")[2]
            if "extra" in marker and not re.search(r"extra == .(corpus|export|schedulefree).", marker):
                continue
            other = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0].lower())
            if "extra" in marker and name != "alma-macroscale":
                continue
            if other not in needed and other not in MACHINE and installed(other):
                needed.add(other)
                left.append(other)
    assert needed == set(plain.values())


def installed(name):
    """Not on Windows only, say."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_pins_and_folders_of_wheels(benchmark, tmp_path):
    wheels = benchmark("gpu.wheels")
    pinned = wheels.pins((ROOT / "requirements.txt").read_text())
    assert [pin.split("==")[0] for pin in pinned] == list(wheels.MISSING)
    with pytest.raises(UserError, match="no antlr4-python3-runtime, fairseq-fixed, "):
        wheels.pins("fairscale==1 ; sys_platform == 'linux'\n")
    for pin in pinned:
        name, version = pin.replace("-", "_").split("==")
        (tmp_path / f"{name}-{version}-py3-none-any.whl").write_bytes(b"12")
    assert len(wheels.wheels_of(tmp_path)) == len(wheels.MISSING)
    second = tmp_path / "plotly-1-py3-none-any.whl"
    second.touch()
    with pytest.raises(UserError, match="several, of plotly:"):
        wheels.wheels_of(tmp_path)
    second.unlink()
    os.truncate(next(tmp_path.glob("plotly-*")), wheels.LARGEST)
    with pytest.raises(UserError, match="60 MB of wheels"):
        wheels.wheels_of(tmp_path)


def test_the_environment_sees_the_packages_of_this_one(benchmark, tmp_path):
    """This Python is of a virtual environment itself; the new one has no pip."""
    setup = benchmark("gpu.setup")
    setup.make(tmp_path / "made")
    python = tmp_path / "made/bin/python"
    code = "import sys, pytest; print(sys.prefix, pytest.__file__)"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "made"), pytest.__file__]
    assert not (tmp_path / "made/bin/pip").exists()


def test_setup_and_wheels_need_folders(benchmark, tmp_path):
    for step in ("setup", "wheels"):
        with pytest.raises(UserError, match="--wheels FOLDER"):
            benchmark("gpu").main([step, "--out", str(tmp_path)])
