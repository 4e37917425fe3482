"""The commands for a GPU, at tiny sizes on a CPU; where there is a GPU, they use it."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from alma.errors import UserError

ROOT = Path(__file__).parents[2]


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
