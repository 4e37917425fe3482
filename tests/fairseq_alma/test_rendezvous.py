"""Processes of a training find each other by a file, or end with one line."""

import json
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from alma.errors import UserError
from fairseq_alma import rendezvous


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a folder" / "meet.json"


@pytest.fixture
def process(start, stream, tiny, tmp_path, file, monkeypatch):
    """`process(rank)`: one of two, at the second start of job 7; it may not wait long."""
    file.parent.mkdir()
    meet = ("--distributed-init-method", f"alma://{tmp_path}/a%20folder/meet.json?attempt=7.1")
    words = (
        stream,
        *tiny,
        "--max-update",
        "2",
        "--distributed-world-size",
        "2",
        "--distributed-no-spawn",
    )
    words += ("--expect-tokens", 2 * 512, "--save-dir", tmp_path / "run", *meet)
    return lambda rank, *flags: start("train", *words, "--distributed-rank", rank, *flags)


def leave(file, attempt: str) -> None:
    """A file whose port is closed, as an earlier start leaves it when it is killed."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    file.write_text(json.dumps({"attempt": attempt, "host": "localhost", "port": port}))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_commands_meet_despite_the_file_of_an_earlier_start(process, file, monkeypatch, order):
    monkeypatch.setattr(rendezvous, "WAIT_SECONDS", 60)
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 5)
    leave(file, "7.0")
    both = [process(rank) for rank in order]
    for child in both:
        done = child.wait()
        assert done.code == 0, done.output
        if child is both[order.index(0)]:
            assert "training on 2 devices" in done.output
    assert not file.exists()


@pytest.mark.parametrize(
    ("rank", "left", "problem"),
    [
        (0, None, "1 of 2 processes, such as number 1, have not joined at "),
        (1, "7.0", "no {file} of this start in 2 s: every node must see this folder"),
        (1, "7.1", "cannot reach the first process at localhost:"),
    ],
)
def test_a_process_that_cannot_join_ends_with_one_line(
    process, file, monkeypatch, tmp_path, rank, left, problem
):
    """And does not train alone."""
    monkeypatch.setattr(rendezvous, "WAIT_SECONDS", 2)
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 1)
    if left:
        leave(file, left)
    done = process(rank).wait()
    assert (done.code, "Traceback" in done.output) == (2, False), done.output
    (error,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert problem.format(file=file) in error
    assert not list(tmp_path.glob("run/*.pt"))


@pytest.fixture
def opened(file, monkeypatch):
    """`opened(rank_1)`: how the first process ends when `rank_1(written, store)` is the other
    one."""
    monkeypatch.setattr(rendezvous, "WAIT_SECONDS", 5)
    file.parent.mkdir()

    def run(rank):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(rendezvous._open, file, "7.1", "localhost", 2)
            while not file.exists():
                time.sleep(0.01)
            written = json.loads(file.read_text())
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            rank(written)
            return first.result()

    return run


def connect(written):
    return TCPStore(written["host"], written["port"], 2, timeout=timedelta(seconds=5))


def test_a_process_without_the_secret_is_refused(opened, file):
    with pytest.raises(UserError, match="number 1 without the secret"):
        opened(lambda written: connect(written).set("joined 1", "7.1"))
    assert not file.exists()


def test_a_port_of_another_program_is_refused(opened, file):
    def lured(written):
        file.write_text(json.dumps(written | {"secret": "another"}))
        with pytest.raises(UserError, match="another program answers"):
            rendezvous._join(file, "7.1", 1, 2)
        file.write_text(json.dumps(written))
        rendezvous._join(file, "7.1", 1, 2)

    opened(lured)


def test_the_port_of_one_node_is_open_on_loopback_alone(opened, file):
    def look(written):
        port = f"{written['port']:04X}"
        text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        lines = [line.split() for line in text.splitlines()]
        listening = {line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port}")}
        assert listening == {f"0100007F:{port}"}
        rendezvous._join(file, "7.1", 1, 2)

    opened(look)
