"""Accounting of a test cluster, for its limits of jobs: MariaDB, and slurmdbd in front of it."""

import os
import pwd
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

DAEMONS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
_FOR_SLURM = "create database slurm_acct; create user slurm@127.0.0.1 identified by 'slurm'; "
_FOR_SLURM += "grant all on slurm_acct.* to slurm@127.0.0.1"


def settings(root: Path, port: int) -> list[str]:
    """Lines of slurm.conf; port: that of slurmdbd."""
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={root}/munge.socket",
        "AccountingStorageEnforce=limits",
    ]


def start(cluster: "Cluster", port: int, database_port: int) -> None:
    """Start both daemons, and register the cluster."""
    root = cluster.root
    user = pwd.getpwuid(os.geteuid()).pw_name
    data = f"--datadir={root}/database"
    common = ["--no-defaults", f"--user={user}", data]
    small = ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M"]
    install = ["mariadb-install-db", *common, "--skip-test-db", *small]
    install.append("--auth-root-authentication-method=normal")
    subprocess.run(install, env=cluster.environment, capture_output=True, check=True)
    database = ["mariadbd", *common, *small, "--bind-address=127.0.0.1"]
    database += [f"--socket={root}/database.socket", f"--port={database_port}"]
    database += [f"--pid-file={root}/database.pid", "--innodb-lock-wait-timeout=900"]
    client = ["mariadb", "--no-defaults", "-u", "root", "-S", f"{root}/database.socket", "-e"]
    cluster.spawn(database, lambda: cluster.run(*client, "select 1"))
    cluster.run(*client, _FOR_SLURM)
    host = socket.gethostname().split(".")[0]
    file = root / "slurmdbd.conf"
    lines = f"""
        AuthType=auth/munge
        AuthInfo=socket={root}/munge.socket
        DbdHost={host}
        DbdAddr=127.0.0.1
        DbdPort={port}
        SlurmUser={user}
        PidFile={root}/slurmdbd.pid
        StorageType=accounting_storage/mysql
        StorageHost=127.0.0.1
        StoragePort={database_port}
        StorageUser=slurm
        StoragePass=slurm
        StorageLoc=slurm_acct
        """.split()
    file.touch(0o600)
    file.write_text("\n".join(lines) + "\n")
    cluster.spawn(
        ["slurmdbd", "-D"], lambda: cluster.run("sacctmgr", "-n", "list", "cluster") == ""
    )
    cluster.run("sacctmgr", "-i", "add", "cluster", "test")


def limit_jobs(cluster: "Cluster", most: int) -> None:
    """Let this user have `most` jobs in the queue; returns when slurmctld knows it."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if user != "root":  # who has an account from the start
        cluster.run("sacctmgr", "-i", "add", "user", user, "account=root")
    cluster.run("sacctmgr", "-i", "modify", "user", user, "set", f"MaxSubmitJobs={most}")
    known = f"MaxSubmitJobs={most}("
    cluster.until(lambda: known in cluster.run("scontrol", "show", "assoc_mgr", "flags=assoc"))
