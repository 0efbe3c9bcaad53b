"""TCP ports of this machine: free, in use, and by whom. Linux."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

TCP_LISTEN = "0A"  # the state column of /proc/net/tcp


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """True when somebody listens. Without SO_REUSEPORT, which vLLM sets: with it, two servers may share a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection in TIME_WAIT is no server
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def belongs_to(port: int, pids: Iterable[int]) -> bool:
    """True when one of `pids` listens on `port`, or when /proc shows no listener at all."""
    listeners = _listening_inodes(port)
    return not listeners or any(listeners & _socket_inodes(pid) for pid in pids)


def _listening_inodes(port: int) -> set[str]:
    """Socket inodes that listen on `port`, from /proc/net/tcp and tcp6; empty when /proc does not show them."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == TCP_LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def _socket_inodes(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return found  # the process ended while its files were listed
    return found
