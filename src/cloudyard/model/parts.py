"""What our own parts send each other. A field that a part does not know is skipped: others may be newer."""

from __future__ import annotations

from msgspec import Struct

from cloudyard.model.results import FaultLabel


class ErrorBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire; the one JSON shape of the HTTP API is {"error": this}."""

    kind: str
    code: str
    message: str
    hint: str = ""
    retry_safe: bool = False
    fault: FaultLabel | None = None


class EdgeLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an edge has and what is promised of it. The unit of placement."""

    cpu_total: float
    memory_total_bytes: int
    cpu_promised: float = 0.0
    memory_promised_bytes: int = 0
    sandboxes: int = 0
    sandboxes_max: int = 0
    memory_available_bytes: int = 0


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge's word that it lives, sent every HEARTBEAT_S and at once after its start. `boot` changes with
    every start; for `listening_s` seconds it has heard every call, through one connection: what was asked
    before that will not be answered.
    """

    edge: str
    boot: str
    backends: list[str]
    load: EdgeLoad
    images: list[str] = []
    draining: bool = False
    listening_s: float = 0.0


HEARTBEAT_S = 1.0
EDGE_SILENT_S = 5.0  # after so long without a heartbeat nothing is placed on an edge
