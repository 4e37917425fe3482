"""The commands for a GPU, at tiny sizes on a CPU; where there is a GPU, they use it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.errors import UserError
from slurm.engine.forks import ForkServer

ROOT = Path(__file__).parents[2]
MACHINE = set(
    "cloudpickle colorama contourpy cycler cython filelock fonttools fsspec hf-xet httpx "
    "huggingface-hub jinja2 joblib kiwisolver lxml markupsafe matplotlib mpmath narwhals "
    "networkx numpy packaging pillow portalocker protobuf pyarrow pyparsing python-dateutil "
    "pyyaml regex sacrebleu safetensors scikit-learn scipy sentencepiece setuptools sympy "
    "tabulate threadpoolctl tokenizers torch torchaudio torchvision tqdm transformers typer "
    "typing-extensions".split()
)
"""What the GPU machine has of the packages that ALMA needs."""


@pytest.fixture(scope="module")
def server():
    """Forks the processes of the steps: one import of fairseq for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # an installed package is called `benchmarks`, too
        patch.setenv("OMP_NUM_THREADS", "1")
        fork_server = ForkServer(
            ["fairseq_cli.train", "fairseq_alma.preloaded", "benchmarks.gpu.ladder"]
        )
    yield fork_server
    fork_server.stop()


@pytest.fixture
def forked(benchmark, server, monkeypatch):
    """A block in which processes of steps are forks; gives their module."""
    process = benchmark("gpu.process")

    def start(words, **options):
        reader, writer = os.pipe()
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), writer, writer]
            fork = server.start(words[2:], files, options["env"])
        os.close(writer)
        fork.send_signal = lambda number: os.kill(fork.pid, number)
        fork.stdout = open(reader, "rb")  # noqa: SIM115 - closed with the test
        return fork

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(process, "Popen", start)
            yield process

    return block


@pytest.fixture
def step(benchmark, forked, monkeypatch, tmp_path, capsys):
    """`step(name)` runs a step at tiny sizes, with forks in place of processes; returns its
    rows."""
    gpu = benchmark("gpu")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(name, *flags):
        environment = [
            "--environment",
            str(tmp_path / "environment"),
            "--out",
            str(tmp_path / "out"),
        ]
        with forked() as process:
            gpu.main(["step", name, "--dry-run", *environment, *flags])
        lines = map(process.parse, capsys.readouterr().out.encode().splitlines())
        rows = [line.row for line in lines if line and line.kind != "BEGIN"]
        finished = [row for row in rows if row.get("error") != process.NO_RESULT]
        assert [row["case"] for row in finished] == [row["case"] for row in rows[: len(finished)]]
        assert not any("error" in row for row in finished), finished
        return finished

    return run


def test_dispatchers_are_measured_beside_the_dense_layer(step):
    rows = step("switch")
    assert [row["case"]["dtype"] for row in rows] == ["bf16", "fp16", "fp32"]
    for row, limit in zip(rows, (2e-2, 3e-3, 1e-6), strict=True):
        assert float(row["difference"]) < limit
        times = [row[f"{name} / dense"] for name in ("padded", "loop")]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in times)
    *half, single = rows
    assert not any("MOELayer top-1 / dense" in row for row in half)  # it takes fp32 only
    assert single["dense, MB"] < single["loop, MB"] < single["MOELayer top-1, MB"]
    assert single["MOELayer top-1, MB"] < single["MOELayer Top2Gate, MB"]


@pytest.mark.thorough
def test_training_is_measured_beside_transformer_lm(step):
    (row,) = step("train")
    assert len(row["tokens/s"]) == 2
    speed = sum(row["tokens/s"]) / 2
    assert row["speed / transformer_lm"] == pytest.approx(speed / row["transformer_lm, tokens/s"])
    assert 0 < row["MFU"] < 1
    assert row["estimate GB"] > 0


def test_fairseq_train_accepts_all_flags_of_full_size(benchmark, tmp_path):
    """Each fits a GPU with 80 GB, by the estimate that the step compares with the peak;
    the active sizes of both models are equal."""
    from alma.flops import Shape
    from benchmarks.training_memory import estimated
    from fairseq_alma.check import resolve

    language = benchmark("gpu.language")
    data = language.RandomTokens(tmp_path, False, 50_264, 512)
    for size, experts, flags in language.SETTINGS:
        words = data.words(size, experts, flags, 45)
        assert 2e9 < estimated(words, data.vocabulary - 4) < 78e9
        peer = resolve(data.words(size, 0, flags, 45))
        layers, dim, heads = data.arch(size)
        chosen = [
            peer["settings"][f"--decoder-{name}"]
            for name in ("layers", "embed-dim", "attention-heads")
        ]
        assert (peer["arch"], chosen) == ("transformer_lm", [layers, dim, heads])
        assert peer["settings"]["--decoder-ffn-embed-dim"] == 4 * dim
    flops = Shape(6, 512, 2048, 50_264, 512, 8, 2).training_flops(1)
    assert flops == pytest.approx(45.7e9 * 3 / 512, rel=0.01)  # the paper's base model
    words = [str(tmp_path), "--task", "alma_lm", *benchmark("gpu.stream").BASE.split()]
    assert resolve(words)["arch"] == "switch_gmoe_base"
    ladder = benchmark("gpu.ladder")
    trainings = [*ladder.rungs(), *ladder.chunks(tiny=False), *ladder.others(tiny=False)]
    for training in trainings:
        words = data.words(training.size, training.experts, training.flags, 45)
        assert training.flags == "--no-tf32" or 2e9 < estimated(words, data.vocabulary - 4) < 78e9
        assert ladder.tokens_of_update(words) == (12_288 if training.name == "V100" else 32_768)


@pytest.mark.thorough
def test_a_training_is_profiled(step):
    (row,) = step("profile")
    assert row["update, ms"] > 0
    assert 0 < row["outside updates"] < 1
    assert (row["kernels / update"], row["GPU idle"]) == (0, 1)


def test_shares_of_the_time(benchmark):
    """Made-up events of one second: kernels that overlap count once, annotations are no kernels."""
    kernels = benchmark("gpu.kernels")

    def event(name, start, end, device="CPU", annotation=False):
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(
            name=name,
            time_range=span,
            device_type=f"DeviceType.{device}",
            is_user_annotation=annotation,
        )

    events = [
        event("gemm", 0, 4e5, "CUDA"),
        event("copy", 3e5, 5e5, "CUDA"),
        event("gemm", 7e5, 8e5, "CUDA"),
        event("train_step-10", 0, 1e6, "CUDA", annotation=True),
        event("cudaStreamSynchronize", 0, 2.5e5),
        event("cudaLaunchKernel", 0, 1e5),
    ]
    row = kernels.shares(events, wall=1.0, inside=0.9, updates=10)
    assert row["GPU idle"] == pytest.approx(0.4)
    assert row["host waits"] == pytest.approx(0.25)
    assert row["outside updates"] == pytest.approx(0.1)
    assert row["kernels / update"] == 3 / 10
    assert row["longest kernels"] == "gemm 50%; copy 20%"
    assert row["ms by kind"] == pytest.approx({"matmul": 50, "copies": 20})
    assert row["ms by kernel"] == pytest.approx({"gemm": 50, "copy": 20})
    # 0.65 s of the host for one launch
    assert (row["launch, us"], row["host / launch, us"]) == pytest.approx((1e5, 6.5e5))


CASES_OF_THE_LADDER = [
    {"case": "off", "model": "base, 8 experts", "flags": "--bf16"},
    {"case": "all", "model": "base, 8 experts", "flags": "--bf16 --compile"},
    {"case": "Switch beside dense", "tokens": 64},
    {"case": "one process has nothing to shard"},
]


def test_cases_of_the_ladder(forked, tmp_path):
    """In one process: it trains without changes, then with all of them."""
    words = "benchmarks gpu step ladder --dry-run".split()
    words += [f"--environment={tmp_path}/environment", f"--out={tmp_path}"]
    with forked() as process:
        code, text = process.child([*words, f"--cases={json.dumps(CASES_OF_THE_LADDER)}"])
    assert code == 0, text
    lines = filter(None, map(process.parse, text.encode().splitlines()))
    rows = [line.row for line in lines if line.kind == "ROW"]
    assert [row["case"] for row in rows] == CASES_OF_THE_LADDER
    off, on, layer, refused = rows
    for row in (off, on):
        assert "error" not in row
        assert len(row["tokens/s"]) == 2
        # 2 layers: attention, FFN; a router; the output layer; scores
        weights = 2 * (4 * 32**2 + 8 * 32**2) + 8 * 32 + 104 * 32
        assert row["MFLOP / token"] == pytest.approx((6 * weights + 12 * 2 * 32 * 32) / 1e6)
        assert row["of the data sheet"] == pytest.approx(row["TFLOP/s"] / 989)
        assert row["update, ms"] > 0
    assert "estimate GB" in on
    assert on["loss"] == pytest.approx(off["loss"], rel=1e-3)
    assert layer["now / dense: host"] > 0
    assert "--zero-sharding os divides" in refused["message"]


@pytest.mark.thorough
def test_the_rehearsal_of_the_ladder(benchmark, forked, tmp_path, capsys):
    """Every case has a result, within three minutes of a quiet machine."""
    began = time.monotonic()
    words = ["ladder", "--dry-run", "--out", str(tmp_path), "--environment", f"{tmp_path}/e"]
    with forked():
        benchmark("gpu").main(words)
    assert time.monotonic() - began < 180
    step = json.loads((tmp_path / "gpu.json").read_text())["steps"]["ladder"]
    assert len(step["rows"]) > 20
    assert "+foreach  --bf16" in re.sub(" {2,}", "  ", capsys.readouterr().out)


@pytest.mark.parametrize(("loss", "is_error"), [(5.04, False), (5.06, True)])
def test_a_loss_that_changes_alter_is_an_error(benchmark, tmp_path, monkeypatch, loss, is_error):
    """By more than 1%; the figures are kept."""
    ladder = benchmark("gpu.ladder")
    laps = benchmark("gpu.laps")

    def run(training, *_):
        losses = [6.0, loss if training.changes else 5.0]
        return laps.Lap([0.1], {}, losses, 10**9, False)

    (tmp_path / "stream").mkdir()
    (tmp_path / "stream/dict.txt").write_text("a 1\nb 1\n")
    monkeypatch.setattr(ladder, "run", run)
    monkeypatch.setattr(ladder, "estimated", lambda words, tokens: tokens * 10**9)
    data = ladder.RandomTokens(tmp_path, True, 104, 32)
    row = ladder.on_text(tmp_path, data)
    assert ("error" in row) == is_error
    assert (row["off: loss"], row["all: loss"], row["peak / estimate"]) == (5.0, loss, 0.5)


def test_a_training_is_measured_until_its_time_is_over(benchmark, monkeypatch):
    """Intervals after the warm-up, then profiled updates; memory that runs out is an error."""
    laps = benchmark("gpu.laps")
    clock = iter(range(1000))
    monkeypatch.setattr(laps.time, "perf_counter", lambda: float(next(clock)))
    asked = []

    class Trainer:
        cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=laps.ENDLESS))

        def get_num_updates(self):
            return len(asked)

    def update(trainer, samples, raise_oom):
        asked.append(raise_oom)

    trainer = Trainer()
    lengths = laps.Lengths(seconds=20, warm_up=3, interval=2, profiled=2)
    stopwatch = laps.Stopwatch(lengths)
    while len(asked) < trainer.cfg.optimization.max_update:
        stopwatch.train_step(update, trainer, [])
    # an interval: the clock is read at its start and end, and twice in each update
    assert stopwatch.intervals == [2.5] * 4
    assert len(asked) == 3 + 2 * 4 + 2
    assert all(asked)
    assert stopwatch.profile["update, ms"] == 2500


def test_the_table_of_gains(benchmark):
    """Speeds are compared with those of `off`, and of the case before."""
    module = benchmark("gpu.gains")
    rows = []
    for case, speed in (("off", 100.0), ("+gelu", 110.0), ("+foreach", 121.0)):
        row = {"case": {"case": case, "flags": "--bf16"}, "tokens/s": [speed, speed]}
        rows.append(row | {"GPU idle": 0.25})
    rows.insert(1, {"case": {"case": "text"}, "worst loss": "1e-3"})
    header, *lines = module.gains(rows)
    assert [line[:5] for line in lines] == [
        ["off", "--bf16", "100 [100-100]", "1.00", ""],
        ["+gelu", "--bf16", "110 [110-110]", "1.10", "1.10"],
        ["+foreach", "--bf16", "121 [121-121]", "1.21", "1.10"],
    ]
    assert lines[0][header.index("GPU idle")] == "0.25"
    rows[0]["ms by kind"] = {"loss": 20.0, "copies": 10.0}
    rows.append({"case": {"case": "all"}, "ms by kind": {"loss": 5.0, "matmul": 30.0}})
    assert module.by_kind(rows) == [
        ["ms of an update", "off", "all"],
        ["loss", "20", "5"],
        ["copies", "10", "0"],
        ["matmul", "0", "30"],
    ]


@pytest.mark.thorough
def test_image_learners_are_measured_beside_plain_pytorch(step):
    mnist, large = step("images")
    assert [row["case"]["network"] for row in (mnist, large)] == ["mlp", "mobilenet_v3_small"]
    for ratios in (
        mnist["plain / sm"],
        mnist["ens / sm"],
        mnist["one by one / ens"],
        large["plain / sm"],
    ):
        assert len(ratios) == 2
        assert min(ratios) > 0


@pytest.mark.thorough
def test_a_killed_training_resumes_with_the_same_numbers(step):
    (row,) = step("resume")
    assert row["updates before"] - row["repeated"] in (16, 32, 48)
    assert (float(row["worst loss"]), float(row["weights"])) == (0, 0)


@pytest.mark.parametrize(
    ("loss", "last", "message"), [(5.5, 60, "differs by 10.0%"), (5, 59, "not 1 to 60")]
)
def test_a_resumed_training_with_other_numbers_is_an_error(
    benchmark, tmp_path, monkeypatch, loss, last, message
):
    language = benchmark("gpu.language")

    def updates_of(words, *_):
        through = words[-1].endswith("through")
        return [
            {"loss": 5 if through else loss, "num_updates": n + 1}
            for n in range(60 if through else last)
        ]

    monkeypatch.setattr(language, "updates_of", updates_of)
    with pytest.raises(UserError, match=message):
        language.resumed([], "SIGTERM", tmp_path)


@pytest.mark.thorough
def test_a_stream_has_a_row_for_each_stage(step):
    stream, untrained, first = step("stream")
    assert stream["words"] > 1000
    assert untrained["averaged"] == untrained["raw"]
    assert first["averaged"] != first["raw"]


def test_gpu_tests_are_collected(step, benchmark):
    (row,) = step("tests")
    assert row["collected"] > 40
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    ]
    files = {ROOT / "tests" / name for name in benchmark("gpu.tests").FILES}
    assert set(marked) - {Path(__file__)} == files


STEPS = {
    "well": "work_on('step.cases', args)",
    "hangs": "announce({'n': 1}); tell({'n': 1}, {'ms': [1.0, 2.0]}); "
    "announce({'n': 2}); time.sleep(600)",
    "crashes": "announce({'n': 3}); os.kill(os.getpid(), signal.SIGSEGV)",
    "garbage": r"""sys.stdout.buffer.write(b'\xff\nROW {\nROW [1]\nCASE 5\nROW {"case": 1}\n')""",
    "last": "subprocess.Popen(['sleep', '600']); tell({'n': 4}, {'MFU': 0.1})",
}
SCRIPT = """
import os, signal, subprocess, sys, time
from types import SimpleNamespace
from benchmarks.gpu.process import announce, tell, work_on
name, cases = sys.argv[1], eval(sys.argv[2])
open("ran", "a").write(f"{name} {cases}\\n")
part = (lambda n: 1.0) if "mended" in os.environ else (lambda n: 1 / n)
sys.modules["benchmarks.step"] = SimpleNamespace(
    cases=lambda args: [({"n": n}, lambda n=n: {"part": part(n)}) for n in (0, 5, 6)])
args = SimpleNamespace(cases=cases)
"""


@pytest.mark.thorough
def test_a_step_costs_the_others_nothing(benchmark, tmp_path, monkeypatch, capfd):
    """One hangs, one crashes, one prints garbage, one leaves a process;
    `again` runs what has no result."""
    gpu = benchmark("gpu")
    monkeypatch.chdir(tmp_path)
    scripts = {name: SCRIPT + code for name, code in STEPS.items()}
    monkeypatch.setattr(
        gpu, "STEPS", {name: gpu.Limit(8, "", f"step that {name}") for name in STEPS}
    )
    monkeypatch.setattr(gpu, "machine", lambda: {"gpus": ["made-up"]})  # its figures are looked at
    monkeypatch.setattr(
        gpu,
        "command",
        lambda name, cases, _: [sys.executable, "-c", scripts[name], name, repr(cases)],
    )
    began = time.monotonic()
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["all", "--out", "out", "--seconds", "60"])
    assert time.monotonic() - began < 40
    steps = json.loads(Path("out/gpu.json").read_text())["steps"]
    assert [step["ended"] for step in steps.values()] == [
        "complete",
        "stopped at its limit",
        f"exit code {-signal.SIGSEGV}",
        "complete",
        "complete",
    ]
    zero, fifth, _ = steps["well"]["rows"]
    assert "ZeroDivisionError" in zero["error"]
    assert fifth == {"case": {"n": 5}, "part": 0.2}
    assert [row.get("error", "")[:9] for row in steps["hangs"]["rows"]] == ["", "no result"]
    assert steps["garbage"]["rows"] == []
    printed = capfd.readouterr().out
    assert "1.5 [1.25-1.75]" in printed
    last = printed[printed.index("Look first at:") :].splitlines()[1:]
    assert [re.split("[ :]", line)[0] for line in last] == [
        "hangs",
        "crashes",
        "well",
        "hangs",
        "crashes",
        "last",
    ]
    assert b"\xff" in Path("out/gpu.log").read_bytes()

    Path("ran").unlink()
    monkeypatch.setenv("mended", "1")
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["again", "crashes", "well", "--out", "out", "--seconds", "20"])
    assert Path("ran").read_text().splitlines() == ["crashes [{'n': 3}]", "well [{'n': 0}]"]
    steps = json.loads(Path("out/gpu.json").read_text())["steps"]
    assert {row["case"]["n"]: row["part"] for row in steps["well"]["rows"]} == {
        5: 0.2,
        6: 1 / 6,
        0: 1.0,
    }


CASES = """
import os, signal, sys, time
from types import SimpleNamespace
from benchmarks.gpu.process import work_on
cases = eval(sys.argv[1])
open("ran", "a").write(f"{[case['n'] for case in cases]}\\n")
works = [
    lambda: {"ok": 1},
    lambda: os.kill(os.getpid(), signal.SIGSEGV),
    lambda: time.sleep(600),
    lambda: {"part": 1 / 0},
    lambda: {"ok": 2},
]
sys.modules["benchmarks.step"] = SimpleNamespace(
    cases=lambda args: [({"n": n}, work) for n, work in enumerate(works)])
work_on("step.cases", SimpleNamespace(cases=cases))
"""


def test_a_case_costs_the_others_nothing(benchmark, tmp_path, monkeypatch, capfd):
    """One crashes, one hangs, one raises: a process for those after each."""
    gpu = benchmark("gpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "STEPS", {"step": gpu.Limit(60, "", "step", case_seconds=2)})
    monkeypatch.setattr(
        gpu, "command", lambda name, cases, _: [sys.executable, "-c", CASES, repr(cases)]
    )
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["all", "--out", "out", "--dry-run", "--seconds", "60"])
    assert Path("ran").read_text().splitlines() == ["[]", "[2, 3, 4]", "[3, 4]"]
    step = json.loads(Path("out/gpu.json").read_text())["steps"]["step"]
    assert step["ended"] == "complete"
    rows = sorted(step["rows"], key=lambda row: row["case"]["n"])
    assert [row.get("ok") for row in rows] == [1, None, None, None, 2]
    errors = [row["error"] for row in rows[1:4]]
    assert errors == [
        f"no result: exit code {-signal.SIGSEGV}",
        "no result: a case was stopped at its limit of 2 s",
        "ZeroDivisionError: division by zero",
    ]
    Path("ran").unlink()
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["again", "--out", "out", "--dry-run", "--seconds", "60"])
    assert Path("ran").read_text().splitlines()[0] == "[1, 2, 3]"


def test_a_process_that_lost_its_gpu_ends(benchmark, monkeypatch, capsys):
    """Some errors of a kernel are final for the process: its next case gets another one."""
    process = benchmark("gpu.process")
    cases = [({"n": 1}, lambda: 1 / 0), ({"n": 2}, lambda: {"ok": 1})]
    monkeypatch.setitem(sys.modules, "benchmarks.step", SimpleNamespace(cases=lambda _: cases))
    process.work_on("step.cases", SimpleNamespace(cases=None))
    assert '"ok": 1' in capsys.readouterr().out

    def broken():
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", broken)
    with pytest.raises(SystemExit, match=str(process.LOST_GPU)):
        process.work_on("step.cases", SimpleNamespace(cases=None))
    assert '"ok": 1' not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_damaged_wheel_costs_the_others_nothing(benchmark, tmp_path):
    packages = benchmark("gpu.packages")
    for name in ("alpha", "beta", "gamma"):
        info = f"{name}-1.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "")
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            file.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr(f"{info}/RECORD", f"{name}.py,,\n")
    (tmp_path / "beta-1-py3-none-any.whl").write_bytes(b"no wheel")
    packages.make(tmp_path / "made")
    wheels = sorted(tmp_path.glob("*.whl"))
    with pytest.raises(UserError, match=r"^beta-1-py3-none-any.whl: "):
        packages.install(tmp_path / "made", wheels)
    code = "import sys, alpha, gamma, pytest, fairseq_alma_hook; print(sys.prefix, pytest.__file__)"
    python = tmp_path / "made/bin/python"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    # pytest is the machine's, of an environment
    assert done.stdout.split() == [str(tmp_path / "made"), pytest.__file__]
    assert not (tmp_path / "made/bin/pip").exists()


def test_what_alma_requires_is_carried_or_on_the_machine(benchmark):
    packages = benchmark("gpu.packages")
    plain = {re.sub(r"[-_.]+", "-", name.lower()) for name in packages.MISSING}
    needed = set()
    names = ["alma-macroscale"]
    while names:
        name = names.pop()
        for line in metadata.requires(name) or ():
            marker = line.partition(";")[2]
            if "extra" in marker and not re.search(r"extra == .(corpus|export).", marker):
                continue
            other = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0].lower())
            if "extra" in marker and name != "alma-macroscale":
                continue
            if other not in needed and other not in MACHINE and installed(other):
                needed.add(other)
                names.append(other)
    assert needed == plain


def installed(name):
    """Not on Windows only, say."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_the_folder_of_wheels(benchmark, tmp_path, monkeypatch, capsys):
    packages = benchmark("gpu.packages")
    pinned = packages.pins((ROOT / "requirements.txt").read_text())
    assert [pin.split("==")[0] for pin in pinned] == list(packages.MISSING)
    with pytest.raises(UserError, match="no antlr4-python3-runtime, fairseq-fixed, "):
        packages.pins("fairscale==1 ; sys_platform == 'linux'\n")
    original = subprocess.run

    def run(words, **options):
        if "pip" not in words:
            return original(words, **options)
        (tmp_path / f"{words[3]}.whl").write_bytes(bytes(1_000_000))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(packages.subprocess, "run", run)
    (tmp_path / "old.whl").touch()
    packages.carry(tmp_path)
    assert "2 MB of wheels" in capsys.readouterr().out
    assert not (tmp_path / "old.whl").exists()
    monkeypatch.setattr(packages, "CARRIED", 3_000_000)
    with pytest.raises(UserError, match="2 MB of wheels and . MB of files, of 3 MB"):
        packages.carry(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wheels"], "--wheels FOLDER"),
        (["all"], "--out FOLDER"),
        (["again", "sing", "--out", "x"], "no step sing; there are setup, ladder, tests"),
    ],
)
def test_bad_command_lines(benchmark, words, message):
    with pytest.raises(UserError, match=message):
        benchmark("gpu").main(words)
