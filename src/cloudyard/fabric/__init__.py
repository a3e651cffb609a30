"""The one door to NATS and to asyncio.

`Fabric` is a connection that is always there or on its way back; `Bucket` a key-value store behind it;
`nats_server` writes the configuration of a server of our own. Whoever uses it sees bytes, subjects and
Cloudyard's errors, and nothing of NATS.
"""

from cloudyard.fabric.bucket import Bucket, Entry
from cloudyard.fabric.connection import Fabric, Message
from cloudyard.fabric.link import Credentials
from cloudyard.fabric.nats_server import NatsServerConfig, find_nats_server, render_config, write_private
from cloudyard.fabric.store import StoreHealth

__all__ = [
    "Bucket",
    "Credentials",
    "Entry",
    "Fabric",
    "Message",
    "NatsServerConfig",
    "StoreHealth",
    "find_nats_server",
    "render_config",
    "write_private",
]
