"""A private, real SLURM for tests: munged, slurmctld and virtual slurmd nodes with fake GPUs.

`with Cluster() as cluster: cluster.run("sbatch", ...)`. All processes, jobs included, descend from one
supervisor (this file, run as a script), which ends them when it is told to or when the test process is gone.
"""

import contextlib
import ctypes
import json
import os
import pwd
import random
import re
import select
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

FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
FINAL |= {"PREEMPTED", "TIMEOUT"}
"""States that a job does not leave by itself; a preempted one only with --no-requeue."""

DAEMONS = ("munged", "slurmctld", "slurmd")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not on everybody's PATH
_CHILD_SUBREAPER = 36  # linux/prctl.h


def missing() -> str:
    """Which of the daemons is not installed, or an empty string."""
    return next((name for name in DAEMONS if not _which(name)), "")


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


class Cluster:
    """Nodes of `gpus` GPUs and `cpus` CPUs; partitions `main`, the default, and `high`, which preempts it.

    A preempted job has `grace` seconds after its steps got SIGTERM or, with `preempt_signal`, it got the
    signal asked for by --signal; SLURM looks so seldom that any grace but 0 becomes about 11 s. A requeued
    job waits until its credential has expired, `requeue_delay` seconds; less than 5 becomes minutes.
    """

    def __init__(
        self,
        nodes: int = 2,
        gpus: int = 8,
        cpus: int = 80,
        *,
        preempt_signal: bool = False,
        grace: int = 5,
        requeue_delay: int = 5,
    ):
        # A node's name must resolve inside jobs, as MASTER_ADDR: loopback addresses do, without privileges.
        self.nodes = [f"127.0.0.{10 + index}" for index in range(nodes)]
        self.gpus = gpus
        self.cpus = cpus
        self.preempt_signal = preempt_signal
        self.grace = grace
        self.requeue_delay = requeue_delay
        self.root = Path()
        self._supervisor: subprocess.Popen[str] | None = None
        self._slurmd: dict[str, int] = {}

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The present environment, made to speak to this cluster; for subprocesses."""
        # the tests may run in a job of another SLURM
        outer = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SCANCEL", "SACCT")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        environment["SLURM_CONF"] = str(self.root / "slurm.conf")
        environment["PATH"] = f"{self.root}/bin:{environment.get('PATH', os.defpath)}:{_SBIN}"
        return environment

    def start(self) -> None:
        """Start all daemons and wait until every node is idle; RuntimeError if that fails."""
        for attempt in range(3):
            try:
                self._start()
                return
            except RuntimeError as error:
                self.stop()
                # another process may have taken a port since it was chosen
                if "in use" not in str(error) or attempt == 2:
                    raise
            except BaseException:
                self.stop()
                raise

    def _start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root.chmod(0o755)  # munged refuses a socket that others cannot reach
        self._supervisor = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(os.getpid()), str(self.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops the cluster
        )
        self._write_files()
        munged = ["munged", "--foreground", f"--key-file={self.root}/munge.key"]
        files = ("socket", "pid-file", "log-file", "seed-file")
        munged += [f"--{name}={self.root}/munge.{name}" for name in files]
        if os.geteuid() == 0:
            munged.append("--force")  # it would rather not be root
        socket_file = self.root / "munge.socket"
        munge = self._spawn("munged", munged)
        self._await({"munged": munge}, lambda: stat.S_ISSOCK(socket_file.stat().st_mode))
        pids = {"slurmctld": self._spawn("slurmctld", ["slurmctld", "-D"])}
        # a slurmd that finds no slurmctld tries again only a second later
        self._await(pids, lambda: " is UP" in self.run("scontrol", "ping"))
        for node in self.nodes:
            pids[f"slurmd-{node}"] = self._start_slurmd(node)
        self._await(pids, lambda: self._node_states() == ["idle"] * len(self.nodes))

    def stop(self) -> None:
        """End the daemons and whatever is left of the jobs, and remove the directory."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor:
            supervisor.terminate()
            supervisor.communicate()

    def run(self, *argv: object) -> str:
        """The output of a SLURM command; RuntimeError with what it said if it fails."""
        words = [str(word) for word in argv]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            said = f"{done.stdout}{done.stderr}".strip()
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{said}")
        return done.stdout

    def submit(self, script: str, *options: object) -> str:
        """Submit the lines of a shell script; returns the job's id."""
        log = "--output=/dev/null"  # unless the options, which come later, say otherwise
        return self.run("sbatch", "--parsable", log, *options, f"--wrap={script}").strip()

    def jobs(self) -> dict[str, dict[str, str]]:
        """The fields of `scontrol show job` by job id, that of an array's element being `ID_INDEX`."""
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
        """The state of each job; of an array, that of each element (`ID_INDEX`)."""
        wanted = {str(job_id) for job_id in job_ids}
        jobs = {key: job for key, job in self.jobs().items() if key in wanted or key.split("_")[0] in wanted}
        unknown = wanted - set(jobs) - {key.split("_")[0] for key in jobs}
        if unknown:
            raise KeyError(f"no such job: {', '.join(sorted(unknown))}")
        return {key: job["JobState"] for key, job in jobs.items()}

    def state(self, job_id: object) -> str:
        """The state of a job or of an element; the different ones, joined by commas, of an array."""
        return ",".join(sorted(set(self.states(job_id).values())))

    def wait(self, job_ids: Iterable[object], timeout: float = 60) -> dict[str, str]:
        """The final states of jobs and of array elements, requeues followed; else TimeoutError."""
        ids = list(job_ids)
        self.until(lambda: set(self.states(*ids).values()) <= FINAL, timeout, ids)
        return self.states(*ids)

    def wait_for(self, job_id: object, state: str, timeout: float = 30) -> None:
        """Wait until the job is in that state, or in one of several joined by "|"."""
        self.until(lambda: self.state(job_id) in state.split("|"), timeout, [job_id])

    def until(
        self, condition: Callable[[], object], timeout: float = 30, job_ids: Iterable[object] = ()
    ) -> None:
        """Wait for a condition; the TimeoutError after that tells what the jobs are at."""
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
        """Set a node down: its jobs are requeued."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def up(self, node: str) -> None:
        """Give a node back; returns when jobs can start there."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.until(lambda: self._node_states(node) in (["idle"], ["mix"], ["alloc"]))

    def crash(self, node: str) -> None:
        """Kill slurmd and all of the node's steps and processes, as a power cut; the node then comes back."""
        assert self._supervisor
        family = _descendants(self._supervisor.pid)
        mark = f"\0SLURMD_NODENAME={node}\0"
        there = {pid for pid in family if mark in f"\0{_read(pid, 'environ')}"}
        # A step's slurmstepd does not have the mark, but children that have. It goes first: it would report.
        parents = _parents()
        holders = {parents.get(pid, 0) for pid in there} & set(family) - {self._supervisor.pid}
        for pid in (self._slurmd[node], *holders, *there):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.down(node)  # what slurmctld does by itself when a node has not answered for SlurmdTimeout
        self._start_slurmd(node)
        self.up(node)

    def _start_slurmd(self, node: str) -> int:
        self._slurmd[node] = self._spawn(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
        return self._slurmd[node]

    def _node_states(self, *nodes: str) -> list[str]:
        """The states of the nodes, or of all; with a mark, as "idle*", while a node does not answer."""
        chosen = [f"--nodes={','.join(nodes)}"] if nodes else []
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", *chosen).split()

    def steps(self, job_id: object, step: str = "") -> list[int]:
        """The slurmstepd processes of a job or element, or of its `step` ("batch", "0").

        SLURM is slow to see that one is killed: `ask_nodes_until`.
        """
        assert self._supervisor
        title = f"slurmstepd: [{self._number(job_id)}.{step}"
        return [pid for pid in _descendants(self._supervisor.pid) if _read(pid, "cmdline").startswith(title)]

    def processes(self, job_id: object) -> list[int]:
        """What a job or element runs, slurmstepd left out."""
        assert self._supervisor
        mark = f"\0SLURM_JOB_ID={self._number(job_id)}\0"
        return [pid for pid in _descendants(self._supervisor.pid) if mark in f"\0{_read(pid, 'environ')}"]

    def ask_nodes_until(self, condition: Callable[[], object]) -> None:
        """Have slurmctld ask its nodes what they run until a condition holds; by itself it does so seldom.

        It requeues a job that its node does not know and that started 11 s ago or more (BatchStartTimeout
        and 10).
        """

        def asked() -> object:
            self.run("scontrol", "reconfigure")
            time.sleep(0.5)
            return condition()

        self.until(asked)

    def _number(self, job_id: object) -> str:
        """A job's own number, which an array's elements have too."""
        return self.jobs()[str(job_id)]["JobId"]

    def _spawn(self, name: str, argv: list[str]) -> int:
        """Have the supervisor start a daemon that logs to NAME.out."""
        assert self._supervisor
        assert self._supervisor.stdin
        assert self._supervisor.stdout
        program = _which(argv[0])
        if not program:
            raise RuntimeError(f"{argv[0]} is not installed")
        order = {
            "argv": [program, *argv[1:]],
            "log": str(self.root / f"{name}.out"),
            "environment": self.environment,
        }
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
                if not Path(f"/proc/{pid}").exists():  # the supervisor reaps
                    raise RuntimeError(f"{name} ended at once:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                tails = "\n".join(self._tail(name) for name in pids)
                raise RuntimeError(f"not ready after 30 s:\n{tails}")
            time.sleep(0.02)

    def _tail(self, name: str, lines: int = 12) -> str:
        """The end of a daemon's log."""
        logs = [self.root / f"{name}.out", self.root / "munge.log-file"][: 1 + (name == "munged")]
        text = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
        return "\n".join(text.splitlines()[-lines:])

    def _write_files(self) -> None:
        """The key, the configuration, the files that stand for GPUs, and `sacct`."""
        (self.root / "munge.key").touch(0o600)
        (self.root / "munge.key").write_bytes(os.urandom(128))
        for name in ("bin", "state", "spool", "gpu"):
            (self.root / name).mkdir()
        for index in range(self.gpus):
            (self.root / "gpu" / f"fake{index}").symlink_to("/dev/null")  # slurmd wants device files
        gpus = f"Name=gpu Type=fake File={self.root}/gpu/fake[0-{self.gpus - 1}]\n" if self.gpus else ""
        (self.root / "gres.conf").write_text(gpus)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (self.root / "slurm.conf").write_text("\n".join(self._configuration()) + "\n")
        sacct = self.root / "bin" / "sacct"
        sacct.write_text(f"#!{sys.executable} -IS\n{_SACCT}")
        sacct.chmod(0o755)

    def _configuration(self) -> Iterator[str]:
        host = socket.gethostname().split(".")[0]
        user = _user()
        controller, *ports = _free_ports(1 + len(self.nodes))
        yield from f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={controller}
            SlurmUser={user}
            SlurmdUser={user}
            AuthType=auth/munge
            CredType=cred/munge
            AuthInfo=socket={self.root}/munge.socket,cred_expire={self.requeue_delay}
            StateSaveLocation={self.root}/state
            SlurmdSpoolDir={self.root}/spool/%n
            SlurmctldPidFile={self.root}/slurmctld.pid
            SlurmdPidFile={self.root}/slurmd-%n.pid
            CommunicationParameters=NoCtldInAddrAny
            MailProg=/bin/true
            MpiDefault=none
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none
            PropagateResourceLimits=NONE
            GresTypes=gpu
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core_Memory
            DefMemPerCPU=1000
            SlurmdParameters=config_overrides
            ReturnToService=1
            SchedulerType=sched/backfill
            SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            JobRequeue=1
            BatchStartTimeout=1
            KillWait=1
            InactiveLimit=0
            """.split()
        # no accounting: slurmctld must remember what has ended
        yield "MinJobAge=86400"
        # ids that another cluster, or this one's forerunner, has not used: logs and ports are named by them
        yield f"FirstJobId={random.SystemRandom().randrange(1_000, 9_000_000)}"
        if self.preempt_signal:
            yield "SlurmctldParameters=preempt_send_user_signal"
        each = f"CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 "
        each += f"RealMemory={self.cpus * 4000}" + (f" Gres=gpu:fake:{self.gpus}" if self.gpus else "")
        for node, port in zip(self.nodes, ports, strict=True):
            yield f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} {each}"
        for name, more in (
            ("main", f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={self.grace}"),
            ("high", "PriorityTier=10 PreemptMode=OFF"),
        ):
            yield f"PartitionName={name} Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP {more}"


_SACCT = '''"""What slurmctld remembers, as sacct -o FIELDS -j ID[,ID...] --parsable2 [--noheader]."""
import re, subprocess, sys

fields, ids, header, words = "JobID,JobName,Partition,State,ExitCode", [], True, iter(sys.argv[1:])
for word in words:
    name, equals, value = word.partition("=")
    if name in ("-j", "--jobs", "-o", "--format"):
        value = value if equals else next(words)
        if "j" in name:
            ids += value.split(",")
        else:
            fields = value
    header = header and word not in ("-n", "--noheader")
names = {"state": "jobstate", "elapsed": "runtime", "start": "starttime", "end": "endtime"}
fields = [field.split("%")[0] for field in fields.split(",")]
if header:
    print("|".join(fields))
for job_id in ids:
    shown = subprocess.run(["scontrol", "-ao", "show", "job", job_id], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        job = {key.lower(): value for key, value in re.findall(r"(?:^| )(\\w+)=(\\S*)", line)}
        if "jobid" not in job:
            continue
        if "arraytaskid" in job:
            index = job["arraytaskid"]
            job["jobid"] = job["arrayjobid"] + ("_" + index if index.isdigit() else f"_[{index}]")
        if job.get("nodelist", "") in ("", "(null)"):
            job["nodelist"] = "None assigned"
        print("|".join(job.get(names.get(field.lower(), field.lower()), "") for field in fields))
'''


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _indices(text: str) -> Iterator[int]:
    """The indices of an array as SLURM writes them: "3" or "0-4:2,7%2"."""
    for part in text.split("%")[0].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the system gives to clients."""
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


def _parents() -> dict[int, int]:
    """The parent of every process there is."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue  # just ended
        found[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def _descendants(pid: int) -> list[int]:
    parents = _parents()
    family = [pid]
    for ancestor in family:  # grows as it is read
        family += [child for child, parent in parents.items() if parent == ancestor]
    return family[1:]


def _read(pid: int, name: str) -> str:
    """A file of /proc/PID; empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _supervise(parent: int, root: str) -> None:
    """Start what stdin says until it ends, the parent is gone or SIGTERM comes; then end every descendant."""
    # Orphans become this process's children: a slurmstepd and what a job leaves behind, whatever its session.
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    daemons = []
    try:
        # stdin alone does not tell: forks of the parent hold the other end, too
        while os.getppid() == parent:
            if select.select([sys.stdin], [], [], 0.1)[0]:
                line = sys.stdin.readline()
                if not line:
                    break
                order = json.loads(line)
                with open(order["log"], "ab") as log:
                    daemons.append(
                        subprocess.Popen(
                            order["argv"],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=order["environment"],
                            cwd=root,
                        )
                    )
                print(daemons[-1].pid, flush=True)
            _reap()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + 10
        while _reap() and time.monotonic() < deadline:
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(root, ignore_errors=True)


def _reap() -> bool:
    """Take leave of the children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), sys.argv[2])
