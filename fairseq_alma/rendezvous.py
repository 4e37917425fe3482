"""How the processes of a training find each other: `--distributed-init-method
alma:///FILE?attempt=ID`.

The first process opens a free port and writes it to FILE on a file system that all nodes share. The
others wait for a FILE with the same attempt ID, so a FILE of an earlier attempt is ignored. fairseq
would derive the port from SLURM_JOB_ID, where another process may already listen, and would need
scontrol on the nodes.

The port is opened on the address by which the processes reach each other, which is loopback if
`host` is localhost. torch's store has no password; so FILE also holds a secret, only its owner can
read it, and each side proves that it has read the secret.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlparse

from torch.distributed import TCPStore, register_rendezvous_handler

from alma.errors import UserError, fail
from alma.files import write_json_atomic

SCHEME = "alma"
WAIT_SECONDS = 600  # until all processes have started; importing torch from a slow disk takes long
LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 120
_BACKLOG = 4096  # connections that may wait to be accepted
_OPENED = "opened"  # key in the store that the first process sets


def is_ours(init_method: str | None) -> bool:
    return str(init_method).startswith(f"{SCHEME}:")


def here(folder: str) -> str:
    """The --distributed-init-method for processes on this machine; FILE is in `folder`."""
    return f"{SCHEME}://{quote(folder)}/meet.json?attempt={secrets.token_hex(8)}&host=localhost"


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[TCPStore, int, int]]:
    """The rendezvous handler for alma:// URLs, registered with torch.distributed.

    Yields the store, this process's rank and the number of processes. The query of `url` may name
    the `host` on which the others reach the first process; the default is its node. Exits with one
    line and code 2 if processes are missing after WAIT_SECONDS.
    """
    place = urlparse(url)
    query = {name: values[-1] for name, values in parse_qs(place.query).items()}
    file = Path(unquote(place.path))
    rank = int(query["rank"])
    processes = int(query["world_size"])
    try:
        if rank:
            store = _join(file, query["attempt"], rank, processes)
        else:
            store = _open(file, query["attempt"], query.get("host") or _node(), processes)
    except UserError as error:
        fail(str(error))
    store.set_timeout(timeout)
    yield store, rank, processes


def _open(file: Path, attempt: str, host: str, processes: int) -> TCPStore:
    """Open a port, write it to the file, and wait for the others; UserError: some are missing."""
    secret = secrets.token_hex(32)
    listener = _listen(host)
    host = LOOPBACK if host == "localhost" else host
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        processes,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # before torch 2.8 the libuv store cannot take over an open socket
    )
    store.set(_OPENED, _proof(secret, attempt, 0))
    written = {"attempt": attempt, "host": host, "port": port, "secret": secret}
    write_json_atomic(file, written, private=True)
    keys = [f"joined {rank}" for rank in range(1, processes)]
    try:
        store.wait(keys, timedelta(seconds=WAIT_SECONDS))
    except RuntimeError:
        missing = [key.split()[1] for key in keys if not store.check([key])]
        problem = f"{len(missing)} of {processes} processes, such as number {missing[0]}, "
        problem += f"have not joined at {host}:{store.port} in {WAIT_SECONDS} s"
        remedy = f"see train.rank*.log, and whether all nodes see {file}"
        raise UserError(f"{problem}: {remedy}") from None
    finally:
        file.unlink(missing_ok=True)
    for rank, key in enumerate(keys, start=1):
        if not hmac.compare_digest(store.get(key), _proof(secret, attempt, rank).encode()):
            problem = f"a process joined at {host}:{port} as number {rank} without the secret"
            question = "another user of this machine?"
            raise UserError(f"{problem} of {file}: {question} Start the training again")
    return store


def _listen(host: str) -> socket.socket:
    """A socket that listens on a free port of the address of `host`.

    On some systems the node's own name resolves to loopback, though other nodes reach it by another
    address; the socket then listens on all addresses.
    """
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    place = str(address[0])
    if host == "localhost":
        family = socket.AF_INET
        place = LOOPBACK
    elif ipaddress.ip_address(place.partition("%")[0]).is_loopback:
        place = ""
    listener = socket.socket(family)
    listener.bind((place, 0))
    listener.listen(_BACKLOG)
    return listener


def _proof(secret: str, attempt: str, rank: int) -> str:
    """HMAC-SHA256 of the attempt and rank, keyed by the secret: proves knowledge of the secret."""
    return hmac.digest(secret.encode(), f"{attempt} {rank}".encode(), "sha256").hex()


def _join(file: Path, attempt: str, rank: int, processes: int) -> TCPStore:
    """Wait for the file and connect. UserError: it does not appear, or its port does not answer."""
    who = f"process {rank} on {socket.gethostname()}"
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            os.listdir(
                file.parent
            )  # refreshes NFS's cache, which remembers a missing file for up to a minute
            written = json.loads(file.read_bytes())
            if written["attempt"] == attempt:
                break
        if time.monotonic() > deadline:
            remedy = "every node must see this folder, and the first process must run, see its log"
            raise UserError(f"{who}: no {file} of this start in {WAIT_SECONDS} s: {remedy}")
        time.sleep(0.2)
    host = written["host"]
    port = written["port"]
    try:
        store = TCPStore(host, port, processes, timeout=timedelta(seconds=_CONNECT_SECONDS))
    except RuntimeError as error:
        remedy = f"nodes must reach each other by their names ({str(error).splitlines()[0]})"
        raise UserError(
            f"{who}: cannot reach the first process at {host}:{port}: {remedy}"
        ) from error
    secret = str(written.get("secret"))
    if not hmac.compare_digest(store.get(_OPENED), _proof(secret, attempt, 0).encode()):
        problem = f"another program answers at {host}:{port}"
        raise UserError(f"{who}: {problem}: start the training again")
    store.set(f"joined {rank}", _proof(secret, attempt, rank))
    return store


def _node() -> str:
    """A name of this node that resolves. UserError: none does."""
    names = [name for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname()) if name]
    for name in names:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    raise UserError(f"no name of this node has an address: {', '.join(names)}")


with contextlib.suppress(
    RuntimeError
):  # already registered, if --user-dir has imported a second copy of this module
    register_rendezvous_handler(SCHEME, _meet)
