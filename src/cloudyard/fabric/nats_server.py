"""Configuration of a nats-server of our own: loopback only, a user per role, exact permissions, bounded
storage.

What each role may do is decided here and nowhere else. An edge hears calls to itself, answers them and beats;
it can neither hear another edge nor speak in its name, and has no access to JetStream.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from cloudyard.errors import InvalidRequest, Unsupported
from cloudyard.model import GIB, MIB
from cloudyard.wire.messages import MESSAGE_BYTES_MAX, beat_subject, call_subject

CONTROL_USER = "control"
STORE_BYTES_MAX = 2 * GIB
STORE_MEMORY_BYTES_MAX = 64 * MIB
PENDING_BYTES_MAX = 64 * MIB  # a client that falls further behind is cut off, and sees it
CONNECTIONS_MAX = 4096


class NatsServerConfig(Struct, frozen=True, kw_only=True):
    """What a server of ours is told. `passwords` maps `control` and each `edge-<id>` to its password."""

    store_dir: str
    passwords: dict[str, str]
    port: int
    """0: the server picks one, and writes it to a file in `ports_dir`."""
    host: str = "127.0.0.1"
    ports_dir: str = ""
    pid_file: str = ""
    store_bytes_max: int = STORE_BYTES_MAX

    def __repr__(self) -> str:
        return f"NatsServerConfig(host={self.host!r}, port={self.port}, users={sorted(self.passwords)})"


def edge_user(edge: str) -> str:
    """The NATS user of an edge."""
    return f"edge-{edge}"


def render_config(config: NatsServerConfig) -> str:
    """The server's configuration file. It holds passwords: write it with `write_private`."""
    settings: dict[str, Any] = {
        "listen": f"{config.host}:{config.port or -1}",
        "max_payload": MESSAGE_BYTES_MAX,
        "max_pending": PENDING_BYTES_MAX,
        "max_connections": CONNECTIONS_MAX,
        "jetstream": {
            "store_dir": config.store_dir,
            "max_file_store": config.store_bytes_max,
            "max_memory_store": STORE_MEMORY_BYTES_MAX,
        },
        "authorization": {
            "users": [_user(name, password) for name, password in sorted(config.passwords.items())]
        },
    }
    if config.ports_dir:
        settings["ports_file_dir"] = config.ports_dir
    if config.pid_file:
        settings["pid_file"] = config.pid_file
    return json.dumps(settings, indent=2) + "\n"  # the server's own syntax is a superset of JSON


def _user(name: str, password: str) -> dict[str, Any]:
    if name == CONTROL_USER:
        publish = [call_subject("*"), "$JS.API.>", "$KV.>"]
        subscribe = ["cy.reply.>", beat_subject("*"), f"_INBOX_{CONTROL_USER}.>"]
    elif name.startswith("edge-"):
        edge = name.removeprefix("edge-")
        publish = [f"cy.reply.{edge}.>", beat_subject(edge)]
        subscribe = [call_subject(edge)]
    else:
        raise InvalidRequest(
            f"{name!r} is no role of NATS.", code="bad_role", hint="Roles are control and edge-<id>."
        )
    return {
        "user": name,
        "password": password,
        "permissions": {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}},
    }


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
    temporary.replace(path)


def find_nats_server() -> Path:
    """The nats-server program: beside our own Python, where its wheel puts it, or on the path.

    Raises:
        Unsupported: there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    if (found := shutil.which("nats-server")) is not None:
        return Path(found)
    raise Unsupported(
        "There is no nats-server on this machine.",
        code="no_nats_server",
        hint="Install it with: pip install 'cloudyard[node]'.",
    )
