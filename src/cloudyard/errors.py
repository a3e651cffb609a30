"""Every error that Cloudyard raises.

CloudyardError
├── InvalidRequest      the request itself is wrong: a misspelt field, a limit out of range, a bad path
├── Unauthorized        no token, or one that nobody issued
├── Forbidden           a known caller that may not do this
├── NotFound            no such image, sandbox, command or file
├── Conflict            it exists already, or its state does not allow this now
├── LimitExceeded       a documented bound was reached: sandboxes, disk, message size, rate
├── Unsupported         this machine, kernel or backend cannot do it
├── SandboxUnavailable  the sandbox is gone or never became usable; never the command's own failure
└── YardUnavailable     a part of the yard is starting, stopping or unreachable

Each has a `code` (stable, for programs), a sentence that says what was attempted, on what and why it failed,
a `hint` that says what to do, and `retry_safe`: whether the same call may be sent again as it is. This file
knows nothing of Cloudyard.
"""

from __future__ import annotations

from typing import ClassVar, Literal

__all__ = [
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
    "error_from_wire",
]


class CloudyardError(Exception):
    """The root of the tree. Raised itself only for a fault of ours that has no better name.

    Args:
        message: one sentence: what was attempted, on what, and the reason that was given.
        code: stable snake_case name of this very failure, such as `image_not_found`; else the class's own.
        hint: one sentence: what the reader can do about it.
        retry_safe: whether sending the same call again is harmless and may help.
        fault: `policy` where it is the doing of whoever asked, `infra` where it is ours, such as a machine
            that is full; the class's own if left out.
    """

    kind: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retry_default: ClassVar[bool] = False
    fault_default: ClassVar[Literal["policy", "infra"]] = "infra"

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        hint: str = "",
        retry_safe: bool | None = None,
        fault: Literal["policy", "infra"] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.kind
        self.hint = hint
        self.retry_safe = self.retry_default if retry_safe is None else retry_safe
        self.fault = fault or self.fault_default

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidRequest(CloudyardError):
    """The request is wrong and will stay wrong."""

    kind = "invalid_request"
    status = 400
    fault_default = "policy"


class Unauthorized(CloudyardError):
    """No token was sent, or one that this yard never issued."""

    kind = "unauthorized"
    status = 401
    fault_default = "policy"


class Forbidden(CloudyardError):
    """The caller is known and may not do this."""

    kind = "forbidden"
    status = 403
    fault_default = "policy"


class NotFound(CloudyardError):
    """There is no such image, sandbox, command or file."""

    kind = "not_found"
    status = 404
    fault_default = "policy"


class Conflict(CloudyardError):
    """It exists already, or its present state does not allow this."""

    kind = "conflict"
    status = 409
    fault_default = "policy"


class LimitExceeded(CloudyardError):
    """A documented bound was reached."""

    kind = "limit_exceeded"
    status = 429
    fault_default = "policy"


class Unsupported(CloudyardError):
    """This machine, kernel, backend or version cannot do it."""

    kind = "unsupported"
    status = 501
    fault_default = "policy"


class SandboxUnavailable(CloudyardError):
    """The sandbox is gone, or never became usable. Never the failure of the command itself."""

    kind = "sandbox_unavailable"
    status = 410
    fault_default = "infra"


class YardUnavailable(CloudyardError):
    """A part of the yard is starting, stopping or cannot be reached."""

    kind = "yard_unavailable"
    status = 503
    retry_default = True
    fault_default = "infra"


_BY_KIND: dict[str, type[CloudyardError]] = {
    cls.kind: cls
    for cls in (
        CloudyardError,
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        LimitExceeded,
        Unsupported,
        SandboxUnavailable,
        YardUnavailable,
    )
}


def error_from_wire(
    kind: str,
    message: str,
    *,
    code: str,
    hint: str,
    retry_safe: bool,
    fault: Literal["policy", "infra"] | None = None,
) -> CloudyardError:
    """The error that a message describes. An unknown kind, from a newer yard, becomes the root class."""
    cls = _BY_KIND.get(kind, CloudyardError)
    return cls(message, code=code, hint=hint, retry_safe=retry_safe, fault=fault)
