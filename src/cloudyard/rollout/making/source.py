"""The source distribution of a package: from the index that pip is configured with, checked by hash, unpacked
within bounds.

Nothing of a package runs here: pip is asked for its configuration and for nothing else, since it runs a
package's build to learn its name. Knows HTTP, archives and local files; no yard.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx
import msgspec
from msgspec import Struct

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import MIB

INDEX_DEFAULT = "https://pypi.org/simple"
INDEX_WAIT_S = 60.0  # for one answer
PIP_WAIT_S = 60.0
ARCHIVE_BYTES_MAX = 32 * MIB
TREE_BYTES_MAX = 128 * MIB  # unpacked
TREE_FILES_MAX = 5_000
VERSIONS_SHOWN = 5  # in the error about one that is missing
_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)"
)
_PIP_INDEX = re.compile(r"^(?::env:|global|install|download)\.(index-url|cert)='?([^'\n]*)'?$", re.MULTILINE)
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"


class Source(Struct, frozen=True, kw_only=True):
    """A source distribution on this machine, whose hash was checked."""

    name: str
    """Name of the package as asked for, in the index's own spelling: lower case, dashes."""
    version: str
    path: Path
    sha256: str


class _File(Struct, frozen=True):
    """A file that an index offers. `sha256` is empty where the index does not tell."""

    filename: str
    url: str = ""
    sha256: str = ""


class _Pip(Struct, frozen=True):
    """What pip's configuration says about where packages come from."""

    index: str = INDEX_DEFAULT
    cert: str = ""


def parse_requirement(text: str) -> tuple[str, str]:
    """Name and version of `PACKAGE==VERSION`.

    Raises:
        InvalidRequest: it is not written like that.
    """
    match = _REQUIREMENT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise InvalidRequest(
            f"{text!r} does not name one version of a package.",
            code="bad_requirement",
            hint="Write it like idna==3.11: tasks are made from one version, so that they can be made again.",
        )
    return _normal(match["name"]), match["version"]


def fetch(name: str, version: str, *, cache: Path, expected_sha256: str = "") -> Source:
    """The source distribution of one version of a package, from the cache or from pip's index.

    Args:
        name: the package.
        version: exactly as the index writes it.
        cache: directory in which archives are kept.
        expected_sha256: what the hash must be; if empty, what the index says it is.

    Raises:
        NotFound: the index has no such package or version, or no source distribution of it.
        InvalidRequest: the hash is another (`hash_mismatch`), or there is none to check against.
        LimitExceeded: it is larger than ARCHIVE_BYTES_MAX.
        CloudyardError: the index does not answer (`index_unavailable`).
    """
    name = _normal(name)
    note = cache / f"{name}-{version}.json"
    if (known := _cached(note, expected_sha256)) is not None:
        return Source(name=name, version=version, path=cache / known.filename, sha256=known.sha256)
    pip = _pip()
    with httpx.Client(follow_redirects=True, timeout=INDEX_WAIT_S, verify=_tls(pip)) as client:
        file = _choose(_files(client, pip.index, name), name, version, index=pip.index)
        wanted = expected_sha256 or file.sha256
        if not wanted:
            raise InvalidRequest(
                f"{_shown(pip.index)} gives no SHA-256 for {file.filename}.",
                code="no_hash",
                hint="Name the one that you expect with --sha256.",
            )
        data = _download(client, file)
    if (digest := sha256(data).hexdigest()) != wanted.lower():
        raise InvalidRequest(
            f"{file.filename} from {_shown(pip.index)} has the SHA-256 {digest} and not {wanted}.",
            code="hash_mismatch",
            hint="Nothing of it was unpacked. Fetch it again, or look into where it comes from.",
        )
    cache.mkdir(parents=True, exist_ok=True)
    _put(cache / file.filename, data)
    _put(note, msgspec.json.encode(_File(filename=file.filename, sha256=digest)))
    return Source(name=name, version=version, path=cache / file.filename, sha256=digest)


def unpack(archive: Path, target: Path) -> None:
    """Unpack a source distribution into `target`, without its outermost directory.

    Plain files and directories are taken, with one of two modes each; links are left out. Where this Python
    has tarfile's `data` filter, each member has to pass it besides.

    Raises:
        InvalidRequest: it is damaged, or a member of it would land elsewhere.
        LimitExceeded: it holds more than TREE_FILES_MAX files or TREE_BYTES_MAX bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    left = TREE_BYTES_MAX
    try:
        with tarfile.open(archive) as tar:
            for count, member in enumerate(tar):
                left -= member.size
                if count >= TREE_FILES_MAX or left < 0:
                    raise LimitExceeded(
                        f"{archive.name} holds more than {TREE_FILES_MAX} files or "
                        f"{TREE_BYTES_MAX // MIB} MiB.",
                        code="source_too_large",
                    )
                _unpack_member(tar, member, target)
    except (tarfile.TarError, OSError, EOFError, ValueError) as exc:
        raise InvalidRequest(f"{archive.name} cannot be unpacked: {exc}.", code="bad_archive") from exc


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"it holds a file named {member.name!r}")
    if hasattr(tarfile, "data_filter"):
        member = tarfile.data_filter(member, str(target))
    inside = target.joinpath(*name.parts[1:])
    if member.isdir():
        inside.mkdir(parents=True, exist_ok=True)
    elif member.isfile() and len(name.parts) > 1:
        inside.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None
        with source, inside.open("xb") as out:
            shutil.copyfileobj(source, out)
        inside.chmod(0o755 if member.mode & 0o100 else 0o644)


def _cached(note: Path, expected: str) -> _File | None:
    """What the cache holds, if it is whole and is what is expected."""
    try:
        known = msgspec.json.decode(note.read_bytes(), type=_File)
        whole = sha256((note.parent / known.filename).read_bytes()).hexdigest() == known.sha256
    except (OSError, msgspec.DecodeError):
        return None
    return known if whole and expected.lower() in ("", known.sha256) else None


def _put(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


def _pip() -> _Pip:
    """What pip is configured with: files, then environment, as pip itself tells it."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PIP_WAIT_S,
        check=False,
    )
    said: dict[str, str] = {}
    for line in sorted(_PIP_INDEX.finditer(asked.stdout), key=lambda found: found[0].startswith(":env:")):
        said[line[1]] = line[2]
    return _Pip((said.get("index-url") or INDEX_DEFAULT).rstrip("/"), said.get("cert", ""))


def _tls(pip: _Pip) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=pip.cert) if pip.cert and Path(pip.cert).is_file() else True


def _files(client: httpx.Client, index: str, name: str) -> list[_File]:
    """The files of a package that an index offers."""
    page = _get(client, f"{index}/{name}/", what=name, index=index, headers={"Accept": _ACCEPT})
    base = str(page.url)
    if "json" not in page.headers.get("content-type", ""):
        links = _Links()
        links.feed(page.text)
        return [_from_link(urljoin(base, link)) for link in links.found]
    try:
        rows: list[dict[str, Any]] = page.json()["files"]
        return [
            _File(
                row["filename"], urljoin(str(page.url), row["url"]), row.get("hashes", {}).get("sha256", "")
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError) as exc:
        raise CloudyardError(
            f"{_shown(index)} does not answer like a package index.", code="index_unavailable"
        ) from exc


class _Links(HTMLParser):
    """Targets of all links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _from_link(link: str) -> _File:
    url, fragment = urldefrag(link)
    digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
    return _File(urlsplit(url).path.rpartition("/")[2], url, digest)


def _choose(files: list[_File], name: str, version: str, *, index: str) -> _File:
    versions: list[str] = []
    for file in files:
        suffix = next((suffix for suffix in _SUFFIXES if file.filename.endswith(suffix)), "")
        project, _, release = file.filename.removesuffix(suffix).rpartition("-")
        if suffix and _normal(project) == name:
            if release == version:
                return file
            versions.append(release)
    others = f"It has them of {', '.join(versions[-VERSIONS_SHOWN:])}." if versions else ""
    raise NotFound(
        f"{_shown(index)} has no source distribution of {name} {version}.",
        code="no_sdist",
        hint=others or "A wheel holds no tests: take another version, or another package.",
    )


def _download(client: httpx.Client, file: _File) -> bytes:
    data = bytearray()
    try:
        with client.stream("GET", file.url) as answer:
            answer.raise_for_status()
            for piece in answer.iter_bytes():
                data += piece
                if len(data) > ARCHIVE_BYTES_MAX:
                    raise LimitExceeded(
                        f"{file.filename} is larger than {ARCHIVE_BYTES_MAX // MIB} MiB.",
                        code="source_too_large",
                    )
    except httpx.HTTPError as exc:
        raise _unavailable(f"Fetching {file.filename}", exc) from exc
    return bytes(data)


def _get(client: httpx.Client, url: str, *, what: str, index: str, headers: dict[str, str]) -> httpx.Response:
    try:
        answer = client.get(url, headers=headers)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotFound(f"{_shown(index)} has no package {what}.", code="package_not_found")
        return answer.raise_for_status()
    except httpx.HTTPError as exc:
        raise _unavailable(f"Asking {_shown(index)} for {what}", exc) from exc


def _unavailable(attempt: str, exc: httpx.HTTPError) -> CloudyardError:
    if isinstance(exc, httpx.HTTPStatusError):
        reason = f"it answered {exc.response.status_code}"
    else:
        reason = str(exc) or type(exc).__name__
    return CloudyardError(
        f"{attempt} failed: {reason}.",
        code="index_unavailable",
        hint="It is the index that pip is configured with: see `pip config list`.",
        retry_safe=True,
    )


def _shown(index: str) -> str:
    """An index's address without the name and password that it may hold."""
    parts = urlsplit(index)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
