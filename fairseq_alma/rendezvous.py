"""How the processes of a training find each other: `--distributed-init-method
alma:///FILE?attempt=ID`.

The first process opens a free port and writes it to FILE, which all nodes see; the others wait for
the FILE of the same attempt, so that one that an earlier attempt left does no harm. Unlike
fairseq's port, a function of SLURM_JOB_ID, no other process can have this one; and no node needs
scontrol.

The port is open on the address that the processes share: loopback, if `host` is localhost. FILE has
a secret and is for its owner alone; each side proves that it has read it.
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
WAIT_SECONDS = 600  # for all processes to start: nodes may import torch from a slow disk
LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 120
_BACKLOG = 4096  # processes that connect at once
_OPENED = "opened"  # key of the first process


def is_ours(init_method: str | None) -> bool:
    return str(init_method).startswith(f"{SCHEME}:")


def here(folder: str) -> str:
    """The --distributed-init-method of processes of this machine, by a file in `folder`."""
    return f"{SCHEME}://{quote(folder)}/meet.json?attempt={secrets.token_hex(8)}&host=localhost"


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[TCPStore, int, int]]:
    """A handler of torch.distributed's rendezvous; it exits with one line and code 2 if others are
    missing.

    The query of `url` may have a `host`, by which the others reach the first process; else it is
    its node.
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
        use_libuv=False,  # whose store takes no open port before torch 2.8
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
    """A socket on a free port of the address of `host`. A name that stands for loopback on this
    node, as some systems set it up, has another address for the other nodes: then on all
    addresses."""
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
    """What only a process that has read the secret can write."""
    return hmac.digest(secret.encode(), f"{attempt} {rank}".encode(), "sha256").hex()


def _join(file: Path, attempt: str, rank: int, processes: int) -> TCPStore:
    """Wait for the file and connect. UserError: it does not appear, or its port does not answer."""
    who = f"process {rank} on {socket.gethostname()}"
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            os.listdir(
                file.parent
            )  # else NFS remembers for up to a minute that there is no such file
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
):  # registered by another copy of this module, as of --user-dir
    register_rendezvous_handler(SCHEME, _meet)
