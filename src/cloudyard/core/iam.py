"""Who may do what: a token's hash leads to a grant, and a grant allows actions of a principal in one project.

Tokens themselves are never stored: what is kept is their SHA-256, which is enough for a random token of 256
bits.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Literal, get_args

from msgspec import Struct, field

from cloudyard.errors import Forbidden, InvalidRequest, Unauthorized
from cloudyard.model import ProjectId

Action = Literal[
    "sandbox.create", "sandbox.read", "sandbox.use", "sandbox.stop", "image.read", "function.call"
]
ACTIONS: tuple[str, ...] = get_args(Action)
TOKEN_PREFIX = "cy_"  # so that secret scanners and people know one when they see it
TOKEN_CHARS_MAX = 256
PROJECT_CHARS_MAX = 40


class Grant(Struct, frozen=True, kw_only=True):
    """What one token allows. A principal is a person, a service or an agent: all are treated alike."""

    project: ProjectId
    principal: str
    token_hash: str
    actions: list[str] = field(default_factory=lambda: list(ACTIONS))
    expires_at: float | None = None
    """Seconds since 1970; None: never."""


def hash_token(token: str) -> str:
    """The name under which a token's grant is kept."""
    return sha256(token.encode()).hexdigest()


def bearer_token(authorization: str | None) -> str:
    """The token in an Authorization header.

    Raises:
        Unauthorized: there is none, or it cannot be one of ours.
    """
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized(
            "The request has no bearer token.",
            code="no_token",
            hint="Send the header Authorization: Bearer TOKEN; the local yard's token is in its client file.",
        )
    if len(token) > TOKEN_CHARS_MAX or not token.isascii():
        raise unknown_token()
    return token


def unknown_token() -> Unauthorized:
    """The error for a token that nobody issued. It never holds the token."""
    return Unauthorized(
        "This token is unknown to the yard.",
        code="unknown_token",
        hint="Take a fresh one from the yard's client file, or from whoever runs the yard.",
    )


def check_grant(grant: Grant, token_hash: str, *, now: float) -> Grant:
    """The grant, if it is this token's and has not expired.

    Raises:
        Unauthorized: it is not, or it has.
    """
    if not hmac.compare_digest(grant.token_hash, token_hash):
        raise unknown_token()
    if grant.expires_at is not None and now >= grant.expires_at:
        raise Unauthorized("This token has expired.", code="token_expired", hint="Ask for a new one.")
    return grant


def allow(grant: Grant, action: Action) -> None:
    """Do nothing if the grant allows the action.

    Raises:
        Forbidden: it does not.
    """
    if action not in grant.actions:
        raise Forbidden(
            f"{grant.principal} may not do {action} in project {grant.project}.",
            code="action_not_granted",
            hint=f"This token allows: {', '.join(grant.actions) or 'nothing'}.",
        )


def action_of(op: str) -> Action:
    """The action that an operation is, by its tag."""
    if op == "stop_sandbox":
        return "sandbox.stop"
    return "sandbox.read" if op == "get_sandbox" else "sandbox.use"


def check_project(project: str) -> ProjectId:
    """A project's name, which is part of keys and subjects: lower-case letters, digits and dashes.

    Raises:
        InvalidRequest: it is not such a name.
    """
    plain = project.replace("-", "a")
    if not (
        plain.isascii() and plain.isalnum() and plain == plain.lower() and len(project) <= PROJECT_CHARS_MAX
    ):
        raise InvalidRequest(
            f"{project!r} is no project name.",
            code="bad_project",
            hint=f"Lower-case letters, digits and dashes, at most {PROJECT_CHARS_MAX}.",
        )
    return ProjectId(project)
