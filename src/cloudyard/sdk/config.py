"""Which yard to talk to. Only this file reads the environment and the client file of a local yard."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from cloudyard.errors import InvalidRequest, YardUnavailable

URL_VARIABLE = "CLOUDYARD_URL"
TOKEN_VARIABLE = "CLOUDYARD_TOKEN"
CLIENT_FILE_VARIABLE = "CLOUDYARD_CLIENT_FILE"
CLIENT_FILE = "/var/lib/cloudyard/client.json"
_HOW_TO_NAME_A_YARD = (
    f"Start one here with `cloudyard up`, or name one: set {URL_VARIABLE} and {TOKEN_VARIABLE}, "
    "or call connect(url=..., token=...)."
)


class Config(Struct, frozen=True):
    """Where the gateway is and who we are to it."""

    url: str
    """Without a slash at the end."""
    token: str

    def __repr__(self) -> str:
        return f"Config(url={self.url!r}, token={'***' if self.token else ''!r})"


class _ClientFile(Struct, frozen=True):
    url: str
    token: str


def find(url: str | None, token: str | None, *, client_file: str | Path | None = None) -> Config:
    """The yard that the caller, the environment or the local client file names, in this order.

    A URL from one place is never sent the token of the client file, which belongs to the local yard alone.

    Raises:
        YardUnavailable: none of the three names a yard.
        InvalidRequest: what they say cannot be right.
    """
    url = url or os.environ.get(URL_VARIABLE)
    token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
    if not url:
        local = _read(Path(client_file) if client_file else local_client_file())
        url, token = local.url, local.token if token is None else token
    return Config(_checked(url), token or "")


def local_client_file() -> Path:
    """Where the client file of the local yard lies: where the environment says, or the usual place."""
    return Path(os.environ.get(CLIENT_FILE_VARIABLE) or CLIENT_FILE)


def _read(path: Path) -> _ClientFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_ClientFile)
    except FileNotFoundError as exc:
        raise YardUnavailable(
            f"No yard was found: {URL_VARIABLE} is not set and {path} does not exist.",
            code="no_yard",
            hint=_HOW_TO_NAME_A_YARD,
            retry_safe=False,
        ) from exc
    except OSError as exc:
        raise YardUnavailable(
            f"The local yard's client file {path} cannot be read: {exc.strerror}.",
            code="no_yard",
            hint="It belongs to whoever ran `cloudyard up`: be that user, or name a yard: "
            f"set {URL_VARIABLE} and {TOKEN_VARIABLE}, or call connect(url=..., token=...).",
            retry_safe=False,
        ) from exc
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(
            f"The client file {path} cannot be understood: {exc}.",
            code="bad_client_file",
            hint='It holds {"url": ..., "token": ...} and is written anew by `cloudyard up`.',
        ) from exc


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        good = False
    if not good:
        raise InvalidRequest(
            f"The yard's address is {url!r}, which is no URL of a yard.",
            code="bad_url",
            hint="It looks like http://127.0.0.1:8470 or https://yard.example.com.",
        )
    return url.rstrip("/")
