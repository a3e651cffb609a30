"""The control process: gateway, placer and watcher, by the yard's configuration."""

from __future__ import annotations

import shutil

from cloudyard.assemble import children
from cloudyard.assemble.config import YardConfig, read_client
from cloudyard.assemble.secrets import credentials_of, nats_address
from cloudyard.control.service import ControlConfig, serve_control
from cloudyard.core.iam import Grant, hash_token
from cloudyard.fabric import Credentials
from cloudyard.fabric.nats_server import CONTROL_USER
from cloudyard.model import ProjectId

LOCAL_PROJECT = ProjectId("local")
LOCAL_PRINCIPAL = "local"


async def be_control(config: YardConfig) -> None:
    """Serve the gateway until cancelled."""
    client = read_client(config)
    grant = Grant(project=LOCAL_PROJECT, principal=LOCAL_PRINCIPAL, token_hash=hash_token(client.token))
    control = ControlConfig(
        nats_url=nats_address(config),
        credentials=credentials_of(config, CONTROL_USER) or Credentials(),
        host=config.host,
        port=config.port,
        grants=[grant],
    )
    await serve_control(control, None if config.nats_url else _OwnNats(config))


class _OwnNats:
    """The NATS server that our supervisor keeps."""

    def __init__(self, config: YardConfig) -> None:
        self._config = config

    def free_bytes(self) -> int:
        """What is free on the disk of its store."""
        return shutil.disk_usage(self._config.state).free

    async def restart(self) -> None:
        """End it; the supervisor starts it again."""
        for plan in children.plans(self._config):
            if plan.name == "nats" and (process := children.find(plan)) is not None:
                await children.stop(process)
