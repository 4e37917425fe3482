"""A private, real SLURM for tests: munged, slurmctld and virtual slurmd nodes with fake GPUs.

`with Cluster() as cluster: cluster.run("sbatch", ...)`. All processes, jobs included,
descend from one supervisor, which ends them when told to or when the test process is gone.
"""

import json
import os
import pwd
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.slurm import accounting
from tests.slurm.supervisor import descendants, read_proc

FINAL = {
    *"BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL".split(),
    *"OUT_OF_MEMORY PREEMPTED TIMEOUT".split(),
}
"""Final states; a preempted job ends only with --no-requeue."""

DAEMONS = ("munged", "slurmctld", "slurmd")
GPUS = 8
CPUS = 80
GRACE = 5  # SLURM checks so seldom that any grace but 0 becomes about 11 s
REQUEUE_DELAY = 5  # until the credential of a requeued job expires; less becomes minutes
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not on everybody's PATH
_HERE = Path(__file__).parent


def missing(daemons: Iterable[str] = DAEMONS) -> str:
    """Name of a daemon that is not installed; empty if there is none."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
    return next((name for name in daemons if not shutil.which(name, path=path)), "")


class Cluster:
    """Nodes of GPUS GPUs and CPUS CPUs; partitions `main`, the default, and `high`,
    which preempts it.

    A preempted job gets SIGTERM to its steps or, with `preempt_signal`, its --signal,
    and then GRACE seconds. `most_jobs`: jobs that this user may have in the queue, by accounting.
    """

    def __init__(self, nodes: int = 2, *, preempt_signal: bool = False, most_jobs: int = 0):
        # Node names are MASTER_ADDR inside jobs: loopback addresses resolve without privileges.
        self.nodes = [f"127.0.0.{10 + index}" for index in range(nodes)]
        self.preempt_signal = preempt_signal
        self.most_jobs = most_jobs
        self.root = Path()
        self._supervisor: subprocess.Popen[str] | None = None
        self._ports: list[int] = []

    def __enter__(self) -> "Cluster":
        """Start all daemons and wait until every node is idle. Raises RuntimeError if that
        fails."""
        for attempt in range(3):
            try:
                self._start()
                break
            except Exception:
                self.__exit__()
                if attempt == 2:  # else another process may have taken the port meanwhile
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the daemons and all processes of jobs, and remove the directory."""
        if self._supervisor:
            self._supervisor.terminate()
            self._supervisor.communicate()
            self._supervisor = None

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with this cluster as its SLURM; for subprocesses."""
        # the tests may run inside a job of another SLURM
        outer = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SCANCEL", "SACCT")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        environment["SLURM_CONF"] = str(self.root / "slurm.conf")
        environment["PATH"] = f"{environment.get('PATH', os.defpath)}:{_SBIN}"
        return environment

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
        (self.root / "munge.key").touch(0o600)
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "state").mkdir()
        (self.root / "spool").mkdir()
        gpus = "".join(
            f"Name=gpu Type=fake File={self.root}/fake{index}\n" for index in range(GPUS)
        )
        for index in range(GPUS):
            (self.root / f"fake{index}").symlink_to("/dev/null")  # slurmd requires device files
        (self.root / "gres.conf").write_text(gpus)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        # of slurmctld, of slurmdbd and its database, and of each node
        self._ports = _free_ports(3 + len(self.nodes))
        (self.root / "slurm.conf").write_text("\n".join(self._configuration()) + "\n")
        munged = ["munged", "--foreground", f"--key-file={self.root}/munge.key"]
        munged += [
            f"--{name}={self.root}/munge.{name}"
            for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        munged += ["--force"] if os.geteuid() == 0 else []  # it refuses to run as root
        self.spawn(munged, lambda: stat.S_ISSOCK((self.root / "munge.socket").stat().st_mode))
        if self.most_jobs:
            accounting.start(self, *self._ports[1:3])
        # slurmd retries a missing slurmctld only after a second
        self.spawn(["slurmctld", "-D"], lambda: " is UP" in self.run("scontrol", "ping"))
        for node in self.nodes:
            self.spawn(["slurmd", "-D", "-N", node])
        if self.most_jobs:
            accounting.limit_jobs(self, self.most_jobs)
        self.until(lambda: self._node_states() == ["idle"] * len(self.nodes), timeout=6)

    def spawn(self, argv: list[str], ready: Callable[[], bool] = lambda: True) -> None:
        """Have the supervisor start a daemon that logs to NAME.out; wait until it is ready."""
        assert self._supervisor
        assert self._supervisor.stdin
        assert self._supervisor.stdout
        log = self.root / f"{argv[0]}.out"
        order = {"argv": ["/usr/bin/env", *argv], "log": str(log), "environment": self.environment}
        print(json.dumps(order), file=self._supervisor.stdin, flush=True)
        process = Path(f"/proc/{int(self._supervisor.stdout.readline())}")
        deadline = time.monotonic() + 30
        while True:
            try:
                if ready():
                    return
            except (OSError, RuntimeError):
                pass  # not yet
            # the supervisor reaps it
            if not process.exists() or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{argv[0]} is not ready:\n{log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.02)

    def _configuration(self) -> Iterator[str]:
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        controller, accounting_port, _, *ports = self._ports
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
        if self.most_jobs:
            yield from accounting.settings(self.root, accounting_port)
        # without accounting, slurmctld must remember ended jobs
        yield "MinJobAge=86400"
        # ids that no other cluster has used: logs and ports depend on them
        yield f"FirstJobId={random.SystemRandom().randrange(1_000, 9_000_000)}"
        if self.preempt_signal:
            yield "SlurmctldParameters=preempt_send_user_signal"
        hardware = f"CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 "
        hardware += f"RealMemory={CPUS * 4000} Gres=gpu:fake:{GPUS}"
        for node, port in zip(self.nodes, ports, strict=True):
            yield f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} {hardware}"
        for name, settings in (
            ("main", f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE}"),
            ("high", "PriorityTier=10 PreemptMode=OFF"),
        ):
            nodes = ",".join(self.nodes)
            yield f"PartitionName={name} Nodes={nodes} MaxTime=INFINITE State=UP {settings}"

    def run(self, *argv: object, **variables: str) -> str:
        """Return the output of a SLURM command. Raises RuntimeError, with that output, if it
        fails."""
        words = [str(word) for word in argv]
        environment = self.environment | variables
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
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
        jobs = {}
        for line in self.run("scontrol", "--oneliner", "--all", "show", "job").splitlines():
            fields = dict(re.findall(r"(?:^| )(\w+)=(\S*)", line))
            if "ArrayTaskId" in fields:
                for index in _indices(fields["ArrayTaskId"]):
                    jobs[f"{fields['ArrayJobId']}_{index}"] = fields
            elif "JobId" in fields:  # else "No jobs in the system"
                jobs[fields["JobId"]] = fields
        return jobs

    def states(self, *job_ids: object) -> dict[str, str]:
        """State of each job, and of each element of an array (`ID_INDEX`)."""
        ids = {str(job_id) for job_id in job_ids}
        jobs = {
            key: job for key, job in self.jobs().items() if key in ids or key.split("_")[0] in ids
        }
        if unknown := ids - set(jobs) - {key.split("_")[0] for key in jobs}:
            raise KeyError(f"no such job: {', '.join(sorted(unknown))}")
        return {key: job["JobState"] for key, job in jobs.items()}

    def state(self, job_id: object) -> str:
        """State of a job or an element; of an array its distinct states, joined by commas."""
        return ",".join(sorted(set(self.states(job_id).values())))

    def wait(self, job_ids: Iterable[object], timeout: float = 60) -> dict[str, str]:
        """Wait for the final states of jobs and array elements, over requeues. Raises
        TimeoutError."""
        ids = list(job_ids)
        self.until(lambda: set(self.states(*ids).values()) <= FINAL, timeout)
        return self.states(*ids)

    def wait_for(self, job_id: object, state: str, timeout: float = 30) -> None:
        """Wait until the job is in that state."""
        self.until(lambda: self.state(job_id) == state, timeout)

    def until(self, condition: Callable[[], object], timeout: float = 30) -> None:
        """Wait for a condition. Raises TimeoutError with the states of all jobs."""
        timeout *= 5  # beside other work
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                names = ("JobState", "Reason", "NodeList", "Restarts")
                jobs = []
                for key, job in self.jobs().items():
                    jobs.append(" ".join([key, *(job[name] for name in names)]))
                log = (self.root / "slurmctld.out").read_text(errors="replace")[-2000:]
                raise TimeoutError("\n".join([f"not so after {timeout} s", *jobs, log]))
            time.sleep(0.05)

    def down(self, node: str) -> None:
        """Set a node down; SLURM requeues its jobs."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def up(self, node: str) -> None:
        """Resume a node; return when jobs can start on it."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.until(lambda: self._node_states(node) in (["idle"], ["mix"], ["alloc"]))

    def _node_states(self, *nodes: str) -> list[str]:
        """States of the given or of all nodes, marked (as in "idle*") while a node does not
        answer."""
        chosen = [f"--nodes={','.join(nodes)}"] if nodes else []
        return self.run(
            "sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", *chosen
        ).split()

    def steps(self, job_id: object, step: str) -> list[int]:
        """Process ids of slurmstepd for a `step` ("batch", "0") of a job or element."""
        title = f"slurmstepd: [{self.jobs()[str(job_id)]['JobId']}.{step}"
        return [pid for pid in self._family() if read_proc(pid, "cmdline").startswith(title)]

    def processes(self, job_id: object) -> list[int]:
        """Process ids of a job or element, without slurmstepd."""
        mark = f"\0SLURM_JOB_ID={self.jobs()[str(job_id)]['JobId']}\0"
        return [pid for pid in self._family() if mark in f"\0{read_proc(pid, 'environ')}"]

    def _family(self) -> list[int]:
        """Process ids of all daemons and jobs."""
        assert self._supervisor
        return descendants(self._supervisor.pid)


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
