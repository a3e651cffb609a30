"""Passwords of a yard's roles at NATS: made once, kept in a file that only root can read, and given to each
role as its own."""

from __future__ import annotations

import secrets

import msgspec

from cloudyard.assemble.config import YardConfig, write_private
from cloudyard.errors import InvalidRequest
from cloudyard.fabric import Credentials, NatsServerConfig, render_config
from cloudyard.fabric.nats_server import CONTROL_USER, edge_user

PASSWORD_BYTES = 24


def make_secrets(config: YardConfig) -> None:
    """Make the passwords that are missing, and the configuration of our NATS with them; nothing with an
    external NATS."""
    if config.nats_url:
        return
    paths = config.paths
    users = (CONTROL_USER, edge_user(config.edge))
    kept = _read(config) if paths.secrets.exists() else {}
    passwords = {user: kept.get(user) or secrets.token_urlsafe(PASSWORD_BYTES) for user in users}
    write_private(paths.secrets, msgspec.json.encode(passwords))
    server = NatsServerConfig(store_dir=str(paths.nats_data), passwords=passwords, port=config.nats_port)
    write_private(paths.nats_config, render_config(server).encode())


def nats_address(config: YardConfig) -> str:
    """The URL of the yard's NATS."""
    return config.nats_url or f"nats://127.0.0.1:{config.nats_port}"


def credentials_of(config: YardConfig, user: str) -> Credentials | None:
    """What a role shows to our NATS; an external one's URL says it itself.

    Raises:
        InvalidRequest: the file is damaged or does not know the role.
    """
    if config.nats_url:
        return None
    try:
        return Credentials(user, _read(config)[user])
    except KeyError as exc:
        raise InvalidRequest(
            f"{config.paths.secrets} has no password of {user}.",
            code="no_credentials",
            hint="cloudyard down, then cloudyard up makes it.",
        ) from exc


def _read(config: YardConfig) -> dict[str, str]:
    try:
        return msgspec.json.decode(config.paths.secrets.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError) as exc:
        raise InvalidRequest(
            f"{config.paths.secrets} cannot be read: {exc}.",
            code="bad_credentials_file",
            hint="Remove it; cloudyard up makes a new one.",
        ) from exc
