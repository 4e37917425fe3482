"""A private, real SLURM for tests: munged, slurmctld and virtual slurmd nodes with fake GPUs.

`with Cluster() as cluster: cluster.run("sbatch", ...)`. All processes, jobs included, descend from one
supervisor, which ends them when told to or when the test process is gone.
"""

import contextlib
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.slurm.supervisor import descendants, parent_ids, read_proc

FINAL = set("BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split())
"""Final states; a preempted job ends only with --no-requeue."""

DAEMONS = ("munged", "slurmctld", "slurmd")
GPUS, CPUS = 8, 80
GRACE = 5  # SLURM checks so seldom that any grace but 0 becomes about 11 s
REQUEUE_DELAY = 5  # until the credential of a requeued job expires; less becomes minutes
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not on everybody's PATH
_HERE = Path(__file__).parent


def missing() -> str:
    """Name of a daemon that is not installed; empty if there is none."""
    return next((name for name in DAEMONS if not _which(name)), "")


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


class Cluster:
    """Nodes of GPUS GPUs and CPUS CPUs; partitions `main`, the default, and `high`, which preempts it.

    A preempted job gets SIGTERM to its steps or, with `preempt_signal`, its --signal, and then GRACE seconds.
    """

    def __init__(self, nodes: int = 2, *, preempt_signal: bool = False):
        # Node names are MASTER_ADDR inside jobs: loopback addresses resolve without privileges.
        self.nodes = [f"127.0.0.{10 + index}" for index in range(nodes)]
        self.preempt_signal = preempt_signal
        self.root = Path()
        self._supervisor: subprocess.Popen[str] | None = None
        self._controller = 0
        self._slurmd: dict[str, int] = {}

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with this cluster as its SLURM; for subprocesses."""
        # the tests may run inside a job of another SLURM
        outer = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SCANCEL", "SACCT")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        environment["SLURM_CONF"] = str(self.root / "slurm.conf")
        environment["PATH"] = f"{self.root}/bin:{environment.get('PATH', os.defpath)}:{_SBIN}"
        return environment

    def start(self) -> None:
        """Start all daemons and wait until every node is idle. Raises RuntimeError if that fails."""
        for attempt in range(3):
            try:
                self._start()
                return
            except RuntimeError as error:
                self.stop()
                # another process may have taken the port meanwhile
                if "in use" not in str(error) or attempt == 2:
                    raise
            except BaseException:
                self.stop()
                raise

    def _start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root.chmod(0o755)  # munged refuses a socket in a private folder
        self._supervisor = subprocess.Popen(
            [sys.executable, "-IS", str(_HERE / "supervisor.py"), str(os.getpid()), str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to pytest, which then stops the cluster
        )
        self._write_files()
        munged = ["munged", "--foreground", f"--key-file={self.root}/munge.key"]
        files = ("socket", "pid-file", "log-file", "seed-file")
        munged += [f"--{name}={self.root}/munge.{name}" for name in files]
        if os.geteuid() == 0:
            munged.append("--force")  # it refuses to run as root
        socket_file = self.root / "munge.socket"
        munge = self._spawn("munged", munged)
        self._await({"munged": munge}, lambda: stat.S_ISSOCK(socket_file.stat().st_mode))
        pids = {"slurmctld": self._start_controller()}
        for node in self.nodes:
            pids[f"slurmd-{node}"] = self._start_slurmd(node)
        self._await(pids, lambda: self._node_states() == ["idle"] * len(self.nodes))

    def stop(self) -> None:
        """End the daemons and all processes of jobs, and remove the directory."""
        if self._supervisor:
            self._supervisor.terminate()
            self._supervisor.communicate()
            self._supervisor = None

    def run(self, *argv: object) -> str:
        """Return the output of a SLURM command. Raises RuntimeError, with that output, if it fails."""
        words = [str(word) for word in argv]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            output = f"{done.stdout}{done.stderr}".strip()
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{output}")
        return done.stdout

    def submit(self, script: str, *options: object) -> str:
        """Submit a shell script; return its job id."""
        log = "--output=/dev/null"  # later options override this
        return self.run("sbatch", "--parsable", log, *options, f"--wrap={script}").strip()

    def jobs(self) -> dict[str, dict[str, str]]:
        """Fields of `scontrol show job` by job id; that of an array's element is `ID_INDEX`."""
        found = {}
        for line in self.run("scontrol", "--oneliner", "--all", "show", "job").splitlines():
            fields = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
            if "JobId" not in fields:
                continue  # "No jobs in the system"
            if "ArrayTaskId" in fields:
                for index in _indices(fields["ArrayTaskId"]):
                    found[f"{fields['ArrayJobId']}_{index}"] = fields
            else:
                found[fields["JobId"]] = fields
        return found

    def states(self, *job_ids: object) -> dict[str, str]:
        """State of each job, and of each element of an array (`ID_INDEX`)."""
        wanted = {str(job_id) for job_id in job_ids}
        jobs = {key: job for key, job in self.jobs().items() if key in wanted or key.split("_")[0] in wanted}
        unknown = wanted - set(jobs) - {key.split("_")[0] for key in jobs}
        if unknown:
            raise KeyError(f"no such job: {', '.join(sorted(unknown))}")
        return {key: job["JobState"] for key, job in jobs.items()}

    def state(self, job_id: object) -> str:
        """State of a job or an element; of an array its distinct states, joined by commas."""
        return ",".join(sorted(set(self.states(job_id).values())))

    def wait(self, job_ids: Iterable[object], timeout: float = 60) -> dict[str, str]:
        """Wait for the final states of jobs and array elements, over requeues. Raises TimeoutError."""
        ids = list(job_ids)
        self.until(lambda: set(self.states(*ids).values()) <= FINAL, timeout, ids)
        return self.states(*ids)

    def wait_for(self, job_id: object, state: str, timeout: float = 30) -> None:
        """Wait until the job is in that state, or in one of several joined by "|"."""
        self.until(lambda: self.state(job_id) in state.split("|"), timeout, [job_id])

    def until(
        self, condition: Callable[[], object], timeout: float = 30, job_ids: Iterable[object] = ()
    ) -> None:
        """Wait for a condition. Raises TimeoutError with the states of the jobs."""
        timeout *= 5  # beside other work
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                wanted = {str(job_id) for job_id in job_ids}
                told = [
                    f"{key} {job['JobState']} {job['Reason']} {job['NodeList']} restarts={job['Restarts']}"
                    for key, job in self.jobs().items()
                    if not wanted or key in wanted or key.split("_")[0] in wanted
                ]
                raise TimeoutError("\n".join([f"not so after {timeout} s", *told, self._tail("slurmctld")]))
            time.sleep(0.05)

    def down(self, node: str) -> None:
        """Set a node down; SLURM requeues its jobs."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def up(self, node: str) -> None:
        """Resume a node; return when jobs can start on it."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.until(lambda: self._node_states(node) in (["idle"], ["mix"], ["alloc"]))

    def crash(self, node: str) -> None:
        """Kill slurmd and all steps and processes of a node, as a power cut does; then bring it back."""
        family = self._family()
        mark = f"\0SLURMD_NODENAME={node}\0"
        there = {pid for pid in family if mark in f"\0{read_proc(pid, 'environ')}"}
        # slurmstepd lacks the mark but its children have it. Kill it first, or it would report their end.
        parents = parent_ids()
        holders = {parents.get(pid, 0) for pid in there} & set(family)
        for pid in (self._slurmd[node], *holders, *there):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.down(node)  # as slurmctld does for a node that does not answer for SlurmdTimeout
        self._start_slurmd(node)
        self.up(node)

    def restart_controller(self, seconds: float = 0) -> None:
        """Kill slurmctld and start it again after so many seconds; it reads its state from disk."""
        os.kill(self._controller, signal.SIGKILL)
        self.until(lambda: not Path(f"/proc/{self._controller}").exists())
        time.sleep(seconds)
        self._start_controller()
        for node in self.nodes:  # it may have died before it saved that a node was up again
            if self._node_states(node)[0].startswith(("down", "drain")):
                self.up(node)

    def _start_controller(self) -> int:
        """Start slurmctld, wait until it answers, and return its process id."""
        self._controller = self._spawn("slurmctld", ["slurmctld", "-D"])
        # slurmd retries a missing slurmctld only after a second
        self._await({"slurmctld": self._controller}, lambda: " is UP" in self.run("scontrol", "ping"))
        return self._controller

    def _start_slurmd(self, node: str) -> int:
        self._slurmd[node] = self._spawn(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
        return self._slurmd[node]

    def _node_states(self, *nodes: str) -> list[str]:
        """States of the given or of all nodes, marked (as in "idle*") while a node does not answer."""
        chosen = [f"--nodes={','.join(nodes)}"] if nodes else []
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", *chosen).split()

    def steps(self, job_id: object, step: str = "") -> list[int]:
        """Process ids of slurmstepd for a job or element, or for its `step` ("batch", "0").

        SLURM notices late that one was killed: see `ask_nodes_until`.
        """
        title = f"slurmstepd: [{self._number(job_id)}.{step}"
        return [pid for pid in self._family() if read_proc(pid, "cmdline").startswith(title)]

    def processes(self, job_id: object) -> list[int]:
        """Process ids of a job or element, without slurmstepd."""
        mark = f"\0SLURM_JOB_ID={self._number(job_id)}\0"
        return [pid for pid in self._family() if mark in f"\0{read_proc(pid, 'environ')}"]

    def ask_nodes_until(self, condition: Callable[[], object]) -> None:
        """Have slurmctld poll its nodes until a condition holds; by itself it does so seldom.

        It requeues a job that its node does not know, 11 s after the job's start (BatchStartTimeout + 10).
        """

        def asked() -> object:
            self.run("scontrol", "reconfigure")
            time.sleep(0.5)
            return condition()

        self.until(asked)

    def _family(self) -> list[int]:
        """Process ids of all daemons and jobs."""
        assert self._supervisor
        return descendants(self._supervisor.pid)

    def _number(self, job_id: object) -> str:
        """The id that SLURM gives each job, array elements included."""
        return self.jobs()[str(job_id)]["JobId"]

    def _spawn(self, name: str, argv: list[str]) -> int:
        """Have the supervisor start a daemon that logs to NAME.out."""
        assert self._supervisor
        assert self._supervisor.stdin
        assert self._supervisor.stdout
        program = _which(argv[0])
        if not program:
            raise RuntimeError(f"{argv[0]} is not installed")
        log = str(self.root / f"{name}.out")
        order = {"argv": [program, *argv[1:]], "log": log, "environment": self.environment}
        print(json.dumps(order), file=self._supervisor.stdin, flush=True)
        return int(self._supervisor.stdout.readline())

    def _await(self, pids: dict[str, int], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                if condition():
                    return
            except (OSError, RuntimeError):
                pass  # not yet
            for name, pid in pids.items():
                if not Path(f"/proc/{pid}").exists():  # reaped by the supervisor
                    raise RuntimeError(f"{name} ended at once:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                tails = "\n".join(self._tail(name) for name in pids)
                raise RuntimeError(f"not ready after 30 s:\n{tails}")
            time.sleep(0.02)

    def _tail(self, name: str, lines: int = 12) -> str:
        """The end of a daemon's log."""
        logs = [self.root / f"{name}.out", *([self.root / "munge.log-file"] if name == "munged" else [])]
        texts = (log.read_text(errors="replace") for log in logs if log.exists())
        return "\n".join("\n".join(texts).splitlines()[-lines:])

    def _write_files(self) -> None:
        """Write the key, the configuration, device files of fake GPUs, and `sacct`."""
        (self.root / "munge.key").touch(0o600)
        (self.root / "munge.key").write_bytes(os.urandom(128))
        for name in ("bin", "state", "spool", "gpu"):
            (self.root / name).mkdir()
        for index in range(GPUS):
            (self.root / "gpu" / f"fake{index}").symlink_to("/dev/null")  # slurmd requires device files
        gpus = f"Name=gpu Type=fake File={self.root}/gpu/fake[0-{GPUS - 1}]\n"
        (self.root / "gres.conf").write_text(gpus)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (self.root / "slurm.conf").write_text("\n".join(self._configuration()) + "\n")
        sacct = self.root / "bin" / "sacct"
        sacct.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'sacct.py').read_text()}")
        sacct.chmod(0o755)

    def _configuration(self) -> Iterator[str]:
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        controller, *ports = _free_ports(1 + len(self.nodes))
        yield from f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={controller}
            SlurmUser={user}
            SlurmdUser={user}
            AuthType=auth/munge
            CredType=cred/munge
            AuthInfo=socket={self.root}/munge.socket,cred_expire={REQUEUE_DELAY}
            StateSaveLocation={self.root}/state
            SlurmdSpoolDir={self.root}/spool/%n
            SlurmctldPidFile={self.root}/slurmctld.pid
            SlurmdPidFile={self.root}/slurmd-%n.pid
            CommunicationParameters=NoCtldInAddrAny
            """.split()
        yield (_HERE / "slurm.conf").read_text()
        # without accounting, slurmctld must remember ended jobs
        yield "MinJobAge=86400"
        # ids that no other cluster has used: logs and ports depend on them
        yield f"FirstJobId={random.SystemRandom().randrange(1_000, 9_000_000)}"
        if self.preempt_signal:
            yield "SlurmctldParameters=preempt_send_user_signal"
        each = f"CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 "
        each += f"RealMemory={CPUS * 4000} Gres=gpu:fake:{GPUS}"
        for node, port in zip(self.nodes, ports, strict=True):
            yield f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} {each}"
        for name, more in (
            ("main", f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE}"),
            ("high", "PriorityTier=10 PreemptMode=OFF"),
        ):
            yield f"PartitionName={name} Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP {more}"


def _indices(text: str) -> Iterator[int]:
    """Parse the indices of an array, such as "3" or "0-4:2,7%2"."""
    for part in text.split("%")[0].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _free_ports(count: int) -> list[int]:
    """Free ports below the range that the system gives to clients."""
    free: list[int] = []
    while len(free) < count:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in free:
            free.append(port)
    return free
