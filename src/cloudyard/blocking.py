"""`import cloudyard.blocking`: the client with plain calls, under the name its users know it by."""

from __future__ import annotations

from cloudyard.sdk.blocking import Process, Sandbox, Yard, connect

__all__ = ["Process", "Sandbox", "Yard", "connect"]
