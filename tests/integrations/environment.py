"""Environments of their own for outside frameworks: what those depend on stays out of ours.

Each framework has a directory here with `constraints.txt` (the versions that were tried), `pytest.ini` and
checks, which run in its environment below BUILD_DIR against the yard that a client file names. They are not
collected with other tests: a test in tests/live runs them, so that a failure there is one of `make test`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from support import BUILD_DIR, REPOSITORY

HERE = Path(__file__).resolve().parent
INSTALL_S = 180.0
CHECKS_S = 240.0
NOWHERE = "http://127.0.0.1:9"  # a proxy that nobody serves: whoever asks for the Internet is refused at once


def environment(framework: str, extra: str) -> Path:
    """The directory of a framework's virtual environment, with ours and its extra; made once and kept."""
    where, stamp = BUILD_DIR / f"{extra}-venv", BUILD_DIR / f"{extra}-venv" / "cloudyard-stamp"
    constraints = HERE / framework / "constraints.txt"
    said = constraints.read_text(), (REPOSITORY / "pyproject.toml").read_text(), sys.version
    wanted = hashlib.sha256("\0".join(said).encode()).hexdigest()
    BUILD_DIR.mkdir(exist_ok=True)
    with open(BUILD_DIR / f"{extra}-venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            _do("venv", "--clear", "--without-pip", str(where))
            # What is never imported need not be compiled, which is most of it.
            _do("pip", "--python", str(where / "bin" / "python"), "install", "--quiet", "--no-compile",
                "--disable-pip-version-check", "--constraint", str(constraints),
                "--editable", f"{REPOSITORY}[{extra}]", "pytest")  # fmt: skip
            stamp.write_text(wanted)
    return where


def run_checks(
    framework: str, extra: str, *, client_file: Path, home: Path
) -> subprocess.CompletedProcess[str]:
    """Run a framework's checks in its environment.

    Args:
        framework: name of its directory here.
        extra: the extra of ours that it is installed by.
        client_file: of the yard.
        home: an empty directory for what the framework writes.
    """
    where = environment(framework, extra)
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    proxies = {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "no_proxy": "127.0.0.1,localhost"}
    return subprocess.run(
        [where / "bin" / "python", "-m", "pytest", "-q", "-c", HERE / framework / "pytest.ini",
         "--rootdir", HERE / framework, *sorted((HERE / framework).glob("check_*.py"))],
        cwd=home,
        env={
            **kept,
            **proxies,
            "PATH": f"{where / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "CLOUDYARD_CLIENT_FILE": str(client_file),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CHECKS_S,
    )  # fmt: skip


def _do(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", *words],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=INSTALL_S,
    )
