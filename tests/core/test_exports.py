"""What `cloudyard` exports, what that costs, and that the blocking facade lacks nothing."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest

import cloudyard
from cloudyard import errors
from cloudyard.sdk import blocking, client, process, sandbox, session
from support import REPOSITORY

IMPORT_MS_MAX = 150.0
PUBLIC = {
    *errors.__all__,
    "CallResult",
    "CallSpec",
    "Case",
    "Completed",
    "Process",
    "Pty",
    "Sandbox",
    "Session",
    "SessionResult",
    "Transfer",
    "Yard",
    "__version__",
    "blocking",
    "connect",
} - {"error_from_wire"}


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )
    return done.stdout


def test_the_public_names_are_exactly_these() -> None:
    assert set(cloudyard.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(cloudyard, name) is not None
    assert set(dir(cloudyard)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        cloudyard.nothing_like_this  # noqa: B018


def test_every_error_says_whose_doing_it_is() -> None:
    ours = {"CloudyardError", "SandboxUnavailable", "YardUnavailable"}
    for name in sorted(set(errors.__all__) - {"error_from_wire"}):
        error = getattr(errors, name)("Something failed.")
        assert error.fault == ("infra" if name in ours else "policy"), name
        assert getattr(errors, name)("Something failed.", fault="infra").fault == "infra"


@pytest.mark.parametrize("code", ["import cloudyard", "from cloudyard.cli import main; main(['--version'])"])
def test_starting_is_cheap(code: str) -> None:
    """The best of five processes, by their own CPU time: this machine may be busy."""
    measured = (
        "import time, json, sys, contextlib, io\nbegun = time.process_time()\n"
        f"with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps((time.process_time() - begun) * 1000))"
    )
    assert min(json.loads(_python("-c", measured)) for _ in range(5)) < IMPORT_MS_MAX


def test_importing_loads_neither_client_nor_server() -> None:
    heavy = ["anyio", "asyncio", "httpx", "websockets", "nats", "msgspec"]
    code = f"import sys, cloudyard, cloudyard.cli; print([m for m in {heavy} if m in sys.modules])"
    assert _python("-c", code).strip() == "[]"


def test_help_lists_every_command() -> None:
    from cloudyard.cli import COMMANDS

    text = _python("-m", "cloudyard.cli", "--help")
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("plain", "behind"),
    [
        (blocking.Yard, client.Yard),
        (blocking.Sandbox, sandbox.Sandbox),
        (blocking.Process, process.Process),
        (blocking.Session, session.Session),
    ],
)
def test_the_blocking_facade_has_every_public_member_with_its_docstring(plain: type, behind: type) -> None:
    wanted = {name for name in vars(behind) if not name.startswith("_")}
    assert {name for name in vars(plain) if not name.startswith("_")} == wanted
    for name in wanted:
        assert inspect.getdoc(getattr(plain, name)), name


def test_every_public_member_has_a_docstring() -> None:
    for cls in (client.Yard, sandbox.Sandbox, process.Process, process.Completed, session.Session):
        for name, value in vars(cls).items():
            if not name.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{cls.__name__}.{name}"
