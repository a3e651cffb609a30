"""What this machine's apt is told, for an image build: package sources of the release, proxies, certificates.

Both forms of sources are read: lines of `sources.list` and stanzas of `*.sources`. Only entries of the wanted
release are handed on. This file reads apt's configuration and changes nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cloudyard.errors import InvalidRequest

SUITE_DEFAULT = "bookworm"
SUITE_HINT = f"Name a release that the mirror has, such as: --suite {SUITE_DEFAULT}"
APT_CONFIG_WAIT_S = 10.0
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,99}(:[a-z0-9-]{1,20})?(=[A-Za-z0-9.+:~-]{1,99})?\Z")
_SUITE = re.compile(r"[a-z][a-z0-9.-]{0,62}\Z")
_LINE = re.compile(r"\s*deb\s+(\[[^]]*\]\s+)?\S+\s+(?P<suite>\S+)")
_HANDED_ON = re.compile(
    r"Acquire::(.*::)?(Proxy(-Auto-Detect)?(::.+)?|CaInfo|CaPath|SslCert|SslKey|Verify-Peer|Verify-Host"
    r"|Check-Valid-Until|Check-Date|ForceIPv4|ForceIPv6|Retries|Timeout) ",
    re.IGNORECASE,
)


def check_package(package: str) -> None:
    """Check the name of a Debian package: `name`, `name:arch` or `name=version`.

    Raises:
        InvalidRequest: it is none.
    """
    if not _PACKAGE.match(package):
        raise InvalidRequest(
            f"{package[:100]!r} is not the name of a Debian package.",
            code="bad_package_name",
            hint="Give one name at a time, such as: --package python3 --package git",
        )


def check_suite(suite: str) -> None:
    """Check the name of a Debian release, by its form alone.

    Raises:
        InvalidRequest: it is none.
    """
    if not _SUITE.match(suite):
        raise InvalidRequest(
            f"{suite[:100]!r} is not the name of a Debian release.",
            code="bad_suite_name",
            hint=SUITE_HINT,
        )


def apt_options() -> list[str]:
    """Options of this machine's apt that say how to reach a mirror, as lines of apt.conf."""
    dump = subprocess.run(
        ["apt-config", "dump", "--no-empty", "Acquire"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=APT_CONFIG_WAIT_S,
        check=False,
    )
    options = [line for line in dump.stdout.splitlines() if _HANDED_ON.match(line)]
    auth = Path("/etc/apt/auth.conf.d")
    if auth.is_dir() and any(auth.iterdir()):
        options.append(f'Dir::Etc::netrcparts "{auth}/";')
    return options


def apt_sources(suite: str, directory: Path, *, etc: Path = Path("/etc/apt")) -> list[Path]:
    """This machine's package sources for a release, in files as mmdebstrap takes them; empty if none.

    Args:
        suite: the release; its updates and security suites are taken too.
        directory: where the files are written.
        etc: apt's configuration directory.
    """
    made = []
    parts = etc / "sources.list.d"
    for number, source in enumerate(
        [etc / "sources.list", *(sorted(parts.iterdir()) if parts.is_dir() else [])]
    ):
        if source.suffix not in (".list", ".sources") or not source.is_file():
            continue
        text = source.read_text(errors="replace")
        kept = list(_stanzas(text, suite) if source.suffix == ".sources" else _lines(text, suite))
        if kept:
            target = directory / f"{number:02}{source.suffix}"
            target.write_text("\n".join(kept) + "\n")
            made.append(target)
    return made


def _lines(text: str, suite: str) -> Iterable[str]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and _is_of(match["suite"], suite):
            yield line.strip()


def _stanzas(text: str, suite: str) -> Iterable[str]:
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", plain):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                fields.setdefault(name, []).extend(line.split())
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.split()
        wanted = [word for word in fields.get("suites", []) if _is_of(word, suite)]
        if "deb" in fields.get("types", []) and wanted and fields.get("enabled", ["yes"])[:1] != ["no"]:
            head = {"types": ["deb"], "suites": wanted}
            rest = _without(stanza, ("types", "suites", "enabled"))
            yield (
                "\n".join([*(f"{key.title()}: {' '.join(words)}" for key, words in head.items()), *rest])
                + "\n"
            )


def _without(stanza: str, names: tuple[str, ...]) -> Iterable[str]:
    """The lines of a stanza but for some fields, with their continuation lines."""
    skipping = False
    for line in stanza.splitlines():
        if line[:1] not in (" ", "\t"):
            skipping = line.partition(":")[0].strip().lower() in names
        if line.strip() and not skipping:
            yield line


def _is_of(word: str, suite: str) -> bool:
    return word.split("/")[0] == suite or word.startswith((f"{suite}-updates", f"{suite}-security"))
