"""What processes listen on."""

from collections.abc import Iterable

import psutil


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the addresses on which the processes accept TCP connections."""
    found: set[str] = set()
    for process in processes:
        sockets = process.net_connections(kind="tcp")
        found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
