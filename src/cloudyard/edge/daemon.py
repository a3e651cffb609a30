"""The edge daemon: one node's sandboxes, served to gateways as bytes in and bytes out.

`Edge` knows messages and sandboxes and no transport; `serve` ties it to a fabric. Leaving an Edge leaves its sandboxes alive:
the next one on the same state directory takes them up where they are.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self
from uuid import uuid4

import anyio
import msgspec
from msgspec.structs import replace

from cloudyard.edge.backends.base import Backend
from cloudyard.edge.clock import Clock, SystemClock, Timers
from cloudyard.edge.config import ALIVE_STAMP_S, CALLS_MAX, PAGE_BYTES_MAX, REPLY_BYTES_MAX, EdgeConfig
from cloudyard.edge.journal import Journal
from cloudyard.edge.life import Ended, Yard
from cloudyard.edge.operations import as_replayed, check, perform, recall
from cloudyard.edge.poller import Poller
from cloudyard.edge.recovery import recover
from cloudyard.edge.sandbox import Sandbox, unavailable
from cloudyard.edge.steps import Step, StepBook, digest_of
from cloudyard.core.lifecycle import Life, story
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, YardUnavailable
from cloudyard.model import (
    HEARTBEAT_S,
    AnyOp,
    AnyResult,
    Done,
    ErrorBody,
    GetSandbox,
    Heartbeat,
    Image,
    KeepAlive,
    SandboxInfo,
    StopSandbox,
    edge_of,
    normalised,
)
from cloudyard.wire.messages import (
    CallCancel,
    CallCreate,
    CallList,
    CallOp,
    EdgeReply,
    SandboxPage,
    call_decoder,
    decode_op,
    encode,
    error_body,
    raw,
)

LEAVE_S = 10.0  # tear-downs under way may take so long when the edge leaves; the next start goes on with them

_log = logging.getLogger(__name__)
_STAMP = msgspec.msgpack.Encoder()
