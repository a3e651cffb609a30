"""Source distributions: from a small but real index, and archives that are not what they should be."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded
from cloudyard.rollout.making import source


def archive(**files: bytes) -> bytes:
    """A source distribution of these files; `__` stands for a slash."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"pkg-1.0/{name.replace('__', '/')}.py")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


SDIST = archive(pkg__core=b"x = 1\n")
DIGEST = sha256(SDIST).hexdigest()


class Index(BaseHTTPRequestHandler):
    """`pkg` as JSON with its true hash, `lies` with another, `html` as HTML, `wheels` without any sdist."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.strip("/").rpartition("/")[2]
        match name:
            case "pkg" | "lies":
                digest = DIGEST if name == "pkg" else "0" * 64
                row = {"filename": f"{name}-1.0.tar.gz", "url": "../file", "hashes": {"sha256": digest}}
                self.answer(json.dumps({"files": [row]}).encode(), "application/vnd.pypi.simple.v1+json")
            case "html":
                self.answer(f'<a href="/html-1.0.tar.gz#sha256={DIGEST}">x</a>'.encode(), "text/html")
            case "wheels":
                self.answer(b'<a href="/wheels-1.0-py3-none-any.whl">x</a>', "text/html")
            case "file" | "html-1.0.tar.gz":
                self.answer(SDIST, "application/gzip")
            case "broken":
                self.send_error(503)
            case _:
                self.send_error(404)

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An index that pip is configured with; what it was asked for."""
    handler = type("Asked", (Index,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{server.server_port}/simple/")
    yield handler.asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_package_comes_from_pips_index_once(asked: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        got = source.fetch("Pkg", "1.0", cache=tmp_path)
        assert (got.name, got.sha256, got.path.read_bytes()) == ("pkg", DIGEST, SDIST)
    assert asked == ["/simple/pkg/", "/simple/file"]


def test_a_damaged_file_of_the_cache_is_fetched_again(asked: list[str], tmp_path: Path) -> None:
    source.fetch("pkg", "1.0", cache=tmp_path).path.write_bytes(b"damaged")
    assert source.fetch("pkg", "1.0", cache=tmp_path).path.read_bytes() == SDIST


def test_an_index_of_html_is_read_too(asked: list[str], tmp_path: Path) -> None:
    assert source.fetch("html", "1.0", cache=tmp_path).sha256 == DIGEST


@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("pkg", "2.0", "no_sdist"),
        ("wheels", "1.0", "no_sdist"),
        ("missing", "1.0", "package_not_found"),
        ("lies", "1.0", "hash_mismatch"),
        ("broken", "1.0", "index_unavailable"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_so(
    asked: list[str], tmp_path: Path, name: str, version: str, code: str
) -> None:
    with pytest.raises(CloudyardError) as error:
        source.fetch(name, version, cache=tmp_path)
    assert error.value.code == code
    assert "secret" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_hash_that_a_user_names_must_be_it(asked: list[str], tmp_path: Path) -> None:
    source.fetch("pkg", "1.0", cache=tmp_path)
    with pytest.raises(InvalidRequest, match="SHA-256"):
        source.fetch("pkg", "1.0", cache=tmp_path, expected_sha256="1" * 64)


def test_an_index_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(CloudyardError) as error:
        source.fetch("pkg", "1.0", cache=tmp_path)
    assert error.value.code == "index_unavailable"


@pytest.mark.parametrize("text", ["pkg", "pkg>=1.0", "pkg==", "==1", "-x==1", "pkg==1.0; rm", "../x==1"])
def test_what_names_no_single_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="one version"):
        source.parse_requirement(text)


def test_names_are_spelt_as_the_index_does() -> None:
    assert source.parse_requirement("Ruamel.Yaml_x==0.1.post2") == ("ruamel-yaml-x", "0.1.post2")


def unpack(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path = tmp_path / "made.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    source.unpack(path, tmp_path / "tree")
    return tmp_path / "tree"


def test_files_land_below_the_target_with_plain_modes(tmp_path: Path) -> None:
    script = tarfile.TarInfo("pkg-1.0/bin/run")
    script.mode = 0o4777
    where = unpack(tmp_path, (tarfile.TarInfo("pkg-1.0/a.py"), b"a"), (script, b"b"))
    assert (where / "a.py").read_bytes() == b"a"
    assert (where / "bin/run").stat().st_mode & 0o7777 == 0o755


def test_links_are_left_out(tmp_path: Path) -> None:
    link = tarfile.TarInfo("pkg-1.0/link.py")
    link.type, link.linkname = tarfile.SYMTYPE, "a.py"
    where = unpack(tmp_path, (tarfile.TarInfo("pkg-1.0/a.py"), b"a"), (link, b""))
    assert [path.name for path in where.iterdir()] == ["a.py"]


@pytest.mark.parametrize("name", ["../evil", "pkg-1.0/../../evil", "/tmp/evil"])
def test_a_member_that_would_land_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        unpack(tmp_path, (tarfile.TarInfo(name), b"x"))
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_that_claims_too_much_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = tarfile.TarInfo("pkg-1.0/zeros")
    bomb.size = source.TREE_BYTES_MAX + 1
    path = tmp_path / "bomb.tar"
    path.write_bytes(bomb.tobuf())
    with pytest.raises(LimitExceeded, match="more than"):
        source.unpack(path, tmp_path / "tree")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        source.unpack(tmp_path / "x.tar.gz", tmp_path / "tree")
