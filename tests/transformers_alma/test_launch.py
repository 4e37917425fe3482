"""The launcher of several processes: flags of accelerate, environment, signals, exit codes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from alma.errors import UserError
from alma.files import write_json_atomic
from tests.transformers_alma import tiny
from transformers_alma import worker

ROOT = Path(__file__).parents[2]
UPDATES = 400


@pytest.fixture(scope="module")
def launch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        from transformers_alma import launch

        yield launch


def parse(*words: str):
    from transformers_alma.arguments import parse

    return parse(words)


def test_variables_of_other_launchers_are_removed():
    environment = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "PATH": "/bin",
    }
    worker.clean(environment)
    assert environment == {"PATH": "/bin"}


def test_one_process_sees_one_gpu():
    """Else the Trainer would divide its batch among all (DataParallel), and train another one."""
    environment: dict[str, str] = {}
    worker.use_one_gpu(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    environment["CUDA_VISIBLE_DEVICES"] = "2,3"
    worker.use_one_gpu(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({}, 0), ({0: 75, 1: 75}, 75), ({0: 1, 1: 2}, 2), ({1: -9, 0: 1}, 1), ({0: -15}, 1)],
)
def test_exit_codes(launch, codes, expected, capsys):
    assert launch._exit_code(codes) == expected
    killed = "error: process 1 of the training was killed by signal 9 (Killed)\n"
    expected_lines = [killed] if -9 in codes.values() else []
    assert capsys.readouterr().err.splitlines(keepends=True) == expected_lines


def test_too_few_gpus_end_in_one_line(launch, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="planned: 4 processes here, .* torch finds 1 GPUs"):
        launch._check_gpus(4, parse("--num_processes", "4"))
    launch._check_gpus(4, parse("--num_processes", "4", "--use_cpu"))


def test_nodes_meet_by_a_file_of_this_attempt(launch, tmp_path):
    write_json_atomic(tmp_path / ".meeting.json", {"attempt": "1.0", "host": "old", "port": 1})
    met = []
    other = threading.Thread(target=lambda: met.append(launch._meet(tmp_path, 1, 2, "1.1")))
    other.start()
    time.sleep(0.3)
    assert other.is_alive()
    meeting = launch._meet(tmp_path, 0, 2, "1.1")
    other.join(10)
    assert met == [meeting]
    assert meeting.host != "old"


def test_a_missing_first_node_ends_in_one_line(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_WAIT_SECONDS", 0.3)
    with pytest.raises(UserError, match="node 1: no .*meeting.json of this start in 0.3 s"):
        launch._meet(tmp_path, 1, 2, "1.1")


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("distributed_type: DEEPSPEED", (), "distributed_type DEEPSPEED: give one of"),
        ("mixed_precision: bf16", (), "mixed_precision is bf16, .* give --bf16 too"),
        ("compute_environment: AMAZON_SAGEMAKER", (), "give LOCAL_MACHINE"),
        ("distributed_type: FSDP", ("--average", ".9"), "--average .9: .* leave out --average"),
        ("distributed_type: FSDP", ("--use_cpu",), "--use_cpu: accelerate shards models"),
        ("distributed_type: FSDP", ("--fsdp",), "it has FSDP: leave out --fsdp"),
        ("[", (), "make it by `accelerate config`"),
        ("- 1", (), "no YAML mapping"),
    ],
)
def test_configurations_that_are_refused(launch, tmp_path, text, flags, problem):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=problem):
        parse("--accelerate_config", str(file), *flags)


def test_flags_of_accelerate(launch, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 64\nfsdp_config: {fsdp_version: 2}\n")
    words = ("--num_processes", "4", "--num_machines", "2", "--machine_rank", "1")
    meeting = launch.Meeting("node7", 1234)
    flags = launch._flags(parse(*words), 2, meeting, tmp_path)
    text = " ".join(flags)
    assert "--multi_gpu" in flags
    assert "--num_processes 4 --num_machines 2 --machine_rank 1" in text
    assert "--main_process_ip node7 --main_process_port 1234" in text
    assert f"--config_file {tmp_path}/accelerate.yaml" in text
    sharded = launch._flags(parse(*words, "--accelerate_config", str(file)), 2, meeting, tmp_path)
    assert "--use_fsdp" in sharded
    assert sharded[sharded.index("--config_file") + 1] == str(file)
    assert sharded[sharded.index("--num_processes") + 1] == "4"


class Launched:
    """`python -m transformers_alma` with two processes."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny.make_model(folder / "model")
        self.parts = tiny.make_parts(folder)
        # What a user's `accelerate config` and shell may say must not count.
        home = folder / "home/accelerate"
        home.mkdir(parents=True)
        (home / "default_config.yaml").write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
            "mixed_precision: bf16\nnum_processes: 1\n"
        )
        self.environment = {
            **os.environ,
            "HF_HOME": str(home.parent),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "WORLD_SIZE": "5",
            "RANK": "4",
        }

    def start(self, out: Path, *flags: str, **fields) -> subprocess.Popen:
        task = tiny.task(out, self.parts, budget={"updates": UPDATES}, **fields)
        (out / "stage.json").write_bytes(msgspec.json.encode(task))
        words = [*tiny.FLAGS, "--init", self.model, "--num_processes", "2", "--logging_steps", "1"]
        words += ["--save_steps", "100000", *flags]
        program = [sys.executable, "-m", "transformers_alma", *words, str(out / "stage.json")]
        with (out / "log").open("ab") as log:
            return subprocess.Popen(program, env=self.environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Launched:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return Launched(tmp_path_factory.mktemp("launched"))


def wait_for_updates(process: subprocess.Popen, log: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(tiny.losses(log.read_text())) < count:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(pid: int) -> list[int]:
    """The children of all threads of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.thorough
def test_signals_and_kills_of_the_launcher(launched, tmp_path):
    """Exit code 75 after SIGUSR1 and SIGTERM; SIGKILL leaves no worker; the same weights."""
    whole = launched.start(tmp_path / "whole")
    assert whole.wait(600) == 0, (tmp_path / "whole/log").read_text()
    log = tmp_path / "cut/log"
    for number, code in ((signal.SIGUSR1, 75), (signal.SIGKILL, -9), (signal.SIGTERM, 75)):
        seen = len(tiny.losses(log.read_text())) if log.exists() else 0
        process = launched.start(tmp_path / "cut")
        wait_for_updates(process, log, seen + 20)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(number)
        assert process.wait(120) == code, log.read_text()
        deadline = time.monotonic() + 20
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        saved = list((tmp_path / "cut").glob("checkpoint-*/alma_seconds.json"))
        assert bool(saved)
    process = launched.start(tmp_path / "cut")
    assert process.wait(600) == 0, log.read_text()
    assert tiny.checksums(tmp_path / "cut") == tiny.checksums(tmp_path / "whole")
    names = ["log", "stage.json", "trained.json", "weights"]
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == names
    assert "bfloat16" not in (tmp_path / "cut/weights/config.json").read_text()


@pytest.mark.thorough
def test_an_error_of_a_worker_is_one_line_with_its_code(launched, tmp_path):
    out = tmp_path / "changed"
    process = launched.start(out, "--init_sha256", "0" * 64)
    assert process.wait(300) == 2
    log = (out / "log").read_text()
    lines = [line for line in log.splitlines() if "error" in line]
    assert set(lines) == {
        f"error: --init {launched.model}: its weights have changed since the launch: "
        "restore them, or choose another --out"
    }
    assert "Traceback" not in log
