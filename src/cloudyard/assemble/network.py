"""Whether a yard can listen where it should, and reach the NATS it was told of: looked at before anything is
made.

Knows sockets and /proc/net, and nothing of yards.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from cloudyard.errors import Conflict, InvalidRequest, YardUnavailable

NATS_PORT_DEFAULT = 4222
NATS_CONNECT_S = 3.0


def refuse_taken_port(host: str, port: int) -> None:
    """Refuse what nobody of ours could listen on.

    Raises:
        InvalidRequest: the host has no address, or none of this machine's; or the kernel refuses.
        Conflict: somebody listens there; names the process when it can be seen.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise InvalidRequest(
            f"--host {host!r} cannot be resolved: {getattr(exc, 'strerror', None) or exc}.",
            code="bad_host",
            hint="Give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them.",
        ) from exc
    family, _, _, _, address = found[0]
    try:
        _bind(family, address)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            who = _listener(port)
            raise Conflict(
                f"Port {port} on {host} is in use{f' by {who}' if who else ''}.",
                code="port_in_use",
                hint="Give the gateway another one with --port.",
            ) from exc
        if exc.errno == errno.EADDRNOTAVAIL:
            raise InvalidRequest(
                f"--host {host!r} is {address[0]}, which is no address of this machine.",
                code="bad_host",
                hint="Give one that `ip address` shows, or 0.0.0.0 for all of them.",
            ) from exc
        raise InvalidRequest(
            f"Listening on port {port} of {host} failed: {exc.strerror}.", code="bad_host"
        ) from exc


def is_free(host: str, port: int) -> bool:
    """Whether one could listen on a port of a numeric IPv4 address."""
    try:
        _bind(socket.AF_INET, (host, port))
    except OSError:
        return False
    return True


def _bind(family: int, address: tuple[object, ...]) -> None:
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


async def refuse_silent_nats(url: str) -> None:
    """Refuse an external NATS that is not there.

    Raises:
        YardUnavailable: nobody takes a connection there within NATS_CONNECT_S.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or NATS_PORT_DEFAULT
    try:
        with anyio.fail_after(NATS_CONNECT_S):
            stream = await anyio.connect_tcp(host, port)
            await stream.aclose()
    except (OSError, TimeoutError) as exc:
        why = getattr(exc, "strerror", None) or f"no connection within {NATS_CONNECT_S:g} s"
        raise YardUnavailable(
            f"No NATS listens at {host}:{port}: {why}.",
            code="nats_not_there",
            hint="Start it with JetStream, or correct --url; without --url the yard starts its own.",
            retry_safe=True,
        ) from exc


def _listener(port: int) -> str:
    """Which process listens on a TCP port, if we may see it."""
    listening = "0A"
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port
    }
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # it ended or closed it while we looked
        if target.removeprefix("socket:[").removesuffix("]") in inodes:
            pid = entry.parts[2]
            return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (process {pid})"
    return ""
