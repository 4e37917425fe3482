"""Several processes of one training, by `accelerate launch`, on this node and on others.

accelerate's launcher, torchrun, ends the workers 30 s after a SIGTERM, dies of SIGUSR1, and turns
their exit codes into 1. So it runs in a thread of this process, where it sets no handlers; this
process takes the signals and passes them on as a file, and reads the exit codes.
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from alma.errors import UserError
from alma.files import make_directory, write_json_atomic
from alma.trainer import STAGE, StageTask
from transformers_alma import accelerate_config, worker
from transformers_alma.arguments import Arguments
from transformers_alma.training import STOPPED

_WAIT_SECONDS = 600  # until the first node has started
_MEETING = ".meeting.json"  # file in the folder of a task: where the first node is
_USER_ERROR = 2


@dataclass(frozen=True)
class Meeting:
    """Where the first node waits for the others."""

    host: str
    port: int


class _Launched(Thread):
    """`accelerate launch` in a thread, and the exit codes of workers that failed, by rank."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(daemon=True)  # if the main thread ends, so do the workers
        self.words = words
        self.exit_codes: dict[int, int] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        # Workers inherit the mask; `worker.begin` ends it when it ignores the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, worker.STOP_SIGNALS)
        try:
            launch_command(launch_command_parser().parse_args(self.words))
        except ChildFailedError as failed:
            for rank, failure in failed.failures.items():
                self.exit_codes[rank] = failure.exitcode
        except BaseException as error:  # raised again in the main thread
            self.error = error


def run_processes(task: StageTask, arguments: Arguments, words: Sequence[str]) -> int:
    """Train a task by several processes; 0, 2 after an error line, or 75 after a signal.

    words: the flags of each process. UserError: this node has too few GPUs, or no first node.
    """
    engine = arguments.engine
    count = (engine.num_processes or 1) // engine.num_machines  # of this node
    _check_gpus(count, arguments)
    place = Path(task.out, f".processes-{engine.machine_rank}")
    shutil.rmtree(place, ignore_errors=True)
    make_directory(place)
    stop_file = place / "stop"
    for number in worker.STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop_file.touch())
    os.environ[worker.LAUNCHER] = str(os.getpid())
    os.environ[worker.STOP_FILE] = str(stop_file)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    meeting = _meet(Path(task.out), engine.machine_rank, engine.num_machines, engine.attempt)
    flags = _flags(arguments, count, meeting, place)
    stage_file = str(Path(task.out, STAGE))
    launched = _Launched([*flags, "--module", "transformers_alma", *words, stage_file])
    launched.start()
    launched.join()
    for number in worker.STOP_SIGNALS:  # it is too late to save
        signal.signal(number, signal.SIG_IGN)
    shutil.rmtree(place, ignore_errors=True)
    if launched.error:
        raise launched.error
    return _exit_code(launched.exit_codes)


def _check_gpus(count: int, arguments: Arguments) -> None:
    """UserError: this node has fewer GPUs than processes."""
    gpus = torch.cuda.device_count()
    if not arguments.training["use_cpu"] and gpus < count:
        problem = f"planned: {count} processes here, each on a GPU, but torch finds {gpus} GPUs"
        raise UserError(f"{problem}: ask for more GPUs, or give --use_cpu")


def _flags(arguments: Arguments, count: int, meeting: Meeting, place: Path) -> list[str]:
    """Flags of `accelerate launch`: all that its configuration could say otherwise."""
    engine = arguments.engine
    training = arguments.training
    config = engine.accelerate_config or str(accelerate_config.write_default(place))
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // count))
    kind = "--multi_gpu"  # also of CPUs: accelerate starts processes on them by MPI alone
    if engine.accelerate_config and accelerate_config.is_sharded(
        engine.accelerate_config, training
    ):
        kind = "--use_fsdp"
    values = {
        "--config_file": config,
        "--num_processes": count * engine.num_machines,
        "--num_machines": engine.num_machines,
        "--machine_rank": engine.machine_rank,
        "--main_process_ip": meeting.host,
        "--main_process_port": meeting.port,
        "--mixed_precision": accelerate_config.precision_of(training),
        "--gpu_ids": "all",
        "--rdzv_backend": "static",
        "--max_restarts": 0,
        "--log_dir": place,  # else a folder would stay in /tmp
        "--num_cpu_threads_per_process": threads,
    }
    flags = [kind, "--same_network"]
    for name, value in values.items():
        flags += [name, str(value)]
    return flags


def _meet(folder: Path, node: int, nodes: int, attempt: str) -> Meeting:
    """Where the processes meet: the first node picks a free port and tells the others by a file.

    attempt: an id of this start, different from earlier ones. UserError: the first node is missing.
    """
    if nodes == 1:
        return Meeting("127.0.0.1", _free_port("127.0.0.1"))
    file = folder / _MEETING
    if node == 0:
        host = _node_name()
        meeting = Meeting(host, _free_port(host))
        record = {"attempt": attempt, "host": meeting.host, "port": meeting.port}
        write_json_atomic(file, record, private=True)
        return meeting
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            os.listdir(folder)  # refreshes NFS's cache, which remembers a missing file
            record = json.loads(file.read_bytes())
            if record["attempt"] == attempt:
                return Meeting(record["host"], record["port"])
        time.sleep(0.2)
    remedy = "every node must see this folder, and the first node must run: see its train.log"
    raise UserError(f"node {node}: no {file} of this start in {_WAIT_SECONDS} s: {remedy}")


def _free_port(host: str) -> int:
    """A port on which nobody listens; the kernel chooses it, so two launches get two ports."""
    address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with socket.socket(address[0]) as probe:
        probe.bind((address[4][0], 0))
        return probe.getsockname()[1]


def _node_name() -> str:
    """A name of this node that resolves. UserError: none does."""
    for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()):
        with suppress(OSError):
            if name:
                socket.getaddrinfo(name, None)
                return name
    raise UserError(f"{socket.gethostname()}: the name of this node has no address")


def _exit_code(exit_codes: dict[int, int]) -> int:
    """The exit code of the launcher, from those of workers that failed, by rank."""
    if not exit_codes:
        return 0
    codes = set(exit_codes.values())
    if _USER_ERROR in codes:
        return _USER_ERROR
    if STOPPED in codes:
        return STOPPED
    for rank, code in exit_codes.items():
        if code < 0 and -code != signal.SIGTERM:
            how = f"killed by signal {-code} ({signal.strsignal(-code)})"
            print(f"error: process {rank} of the training was {how}", file=sys.stderr)
    return 1
