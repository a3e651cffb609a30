"""Cloudyard: a yard of sandboxes in which agents are trained and evaluated.

The public names load on first use, so that `import cloudyard` costs next to nothing. This file knows where
each name lives and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudyard import blocking as blocking
    from cloudyard.errors import (
        CloudyardError as CloudyardError,
        Conflict as Conflict,
        Forbidden as Forbidden,
        InvalidRequest as InvalidRequest,
        LimitExceeded as LimitExceeded,
        NotFound as NotFound,
        SandboxUnavailable as SandboxUnavailable,
        Unauthorized as Unauthorized,
        Unsupported as Unsupported,
        YardUnavailable as YardUnavailable,
    )
    from cloudyard.model import CallResult as CallResult, CallSpec as CallSpec, Case as Case, Pty as Pty
    from cloudyard.sdk.client import Yard as Yard, connect as connect
    from cloudyard.sdk.process import Completed as Completed, Process as Process
    from cloudyard.sdk.sandbox import Sandbox as Sandbox
    from cloudyard.sdk.session import Session as Session, SessionResult as SessionResult
    from cloudyard.sdk.trees import Transfer as Transfer

__version__ = "0.1.0"

_ERRORS = (
    "CloudyardError",
    "Conflict",
    "Forbidden",
    "InvalidRequest",
    "LimitExceeded",
    "NotFound",
    "SandboxUnavailable",
    "Unauthorized",
    "Unsupported",
    "YardUnavailable",
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "cloudyard.errors"),
    **dict.fromkeys(("CallResult", "CallSpec", "Case"), "cloudyard.model"),
    "Completed": "cloudyard.sdk.process",
    "Pty": "cloudyard.model",
    "Process": "cloudyard.sdk.process",
    "Sandbox": "cloudyard.sdk.sandbox",
    **dict.fromkeys(("Session", "SessionResult"), "cloudyard.sdk.session"),
    "Transfer": "cloudyard.sdk.trees",
    "Yard": "cloudyard.sdk.client",
    "connect": "cloudyard.sdk.client",
}

__all__ = [*sorted([*_HOMES, "blocking", "__version__"])]


def __getattr__(name: str) -> Any:
    if name == "blocking":
        value: Any = import_module("cloudyard.blocking")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'cloudyard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
