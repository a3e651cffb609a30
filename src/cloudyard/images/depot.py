"""The depot: a directory of layers and images that every node reads.

    DEPOT/layers/<sha256>.erofs   one immutable EROFS file system each, named by its own content
    DEPOT/images/<name>.json      model.Image
    DEPOT/tmp/<random>/           work in progress, each held by a lock that dies with the process
    DEPOT/lock                    held while layers and images are added or removed

What has its final name is whole and on disk: it was written elsewhere on the same file system, synced, then
renamed. Images share layers by content; a layer goes with the last image that uses it.

This file knows directories and locks; it does not know how a layer is made, nor who reads it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cloudyard.errors import CloudyardError, Conflict, Forbidden, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import MIB, Image, ImageConfig

BUILD_HINT = "Build one with: cloudyard image build debian --package python3"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_LAYER = re.compile(r"[0-9a-f]{64}\Z")
_HASH_BLOCK = 1 * MIB


@dataclass(frozen=True)
class Work:
    """A directory for work in progress. A tool that may outlive this process inherits `lock`, a descriptor:
    while it is open anywhere, no writer removes the directory."""

    path: Path
    lock: int


class Depot:
    """A depot in a directory. Reading takes no lock, writing does. One object is for one thread."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._layers = self.path / "layers"
        self._images = self.path / "images"
        self._tmp = self.path / "tmp"
        self._lock_depth = 0

    def names(self) -> list[str]:
        """Names of the images, sorted."""
        with translated("read", self.path):
            try:
                found = [entry.name for entry in os.scandir(self._images)]
            except FileNotFoundError:
                return []
        return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))

    def images(self) -> list[Image]:
        """All images, sorted by name. One that is removed meanwhile is left out."""
        found = []
        for name in self.names():
            try:
                found.append(self.image(name))
            except NotFound:
                continue
        return found

    def image(self, name: str) -> Image:
        """The image of that name.

        Raises:
            InvalidRequest: that is no image name.
            NotFound: there is none; the message lists those there are, the hint says how to build one.
            Forbidden: this user may not read the depot.
            CloudyardError: its file cannot be read as an image.
        """
        path = self._image_path(name)
        try:
            with translated("read", self.path, passing=FileNotFoundError):
                data = path.read_bytes()
        except FileNotFoundError as exc:
            there = ", ".join(self.names()) or "none"
            raise NotFound(
                f"There is no image {name!r} in the depot {self.path} (images there: {there}).",
                code="image_not_found",
                hint=BUILD_HINT,
            ) from exc
        try:
            return msgspec.json.decode(data, type=Image)
        except msgspec.MsgspecError as exc:
            raise CloudyardError(
                f"The image file {path} is damaged: {exc}.",
                code="image_damaged",
                hint=f"Remove it with: cloudyard image rm {name}",
            ) from exc

    def layer_path(self, layer: str) -> Path:
        """The EROFS file of a layer, as named in `Image.layers`.

        Raises:
            InvalidRequest: that is no name of a layer.
            NotFound: the depot does not hold it.
        """
        if not _LAYER.match(layer):
            raise InvalidRequest(f"{layer[:80]!r} is not the name of a layer.", code="bad_layer_name")
        path = self._layers / f"{layer}.erofs"
        with translated("read", self.path):
            there = path.exists()
        if not there:
            raise NotFound(
                f"The layer {layer} is not in the depot {self.path}.",
                code="layer_not_found",
                hint="Build the image that uses it again.",
            )
        return path

    def add_layer(self, file: Path) -> str:
        """Move a finished EROFS file, made in a `work_dir`, into the depot, and give the layer's name.

        Hold `locked()` from here until an image that uses it is saved: a removal in between would drop it.

        Raises:
            LimitExceeded: the disk is full.
        """
        with translated("add a layer to", self.path), self.locked():
            layer = _sync_and_hash(file)
            target = self._layers / f"{layer}.erofs"
            if target.exists():
                file.unlink()
                return layer
            self._layers.mkdir(parents=True, exist_ok=True)
            file.chmod(0o644)
            file.rename(target)
            _sync_directory(self._layers)
            return layer

    def add_image(self, name: str, file: Path, *, config: ImageConfig) -> Image:
        """Move a finished EROFS file into the depot, as the one layer of an image (also in place of one).

        If that fails, the layer does not stay.

        Raises:
            InvalidRequest: that is no image name.
            LimitExceeded: the disk is full.
        """
        check_image_name(name)
        with translated("add an image to", self.path), self.locked():
            size = file.stat().st_size
            there = set(self._layers.glob("*.erofs"))
            try:
                layer = self.add_layer(file)
                image = Image(
                    name=name, layers=[layer], config=config, created_at=time.time(), size_bytes=size
                )
                self._write(image)
            except BaseException:
                for fresh in set(self._layers.glob("*.erofs")) - there:
                    fresh.unlink()
                raise
            _sync_directory(self._images)
            self._collect()
            return image

    def save(self, image: Image) -> None:
        """Write an image, in place of one of that name. Layers that only the old one used are removed.

        Raises:
            InvalidRequest: its name is no image name.
            NotFound: a layer of it is not in the depot.
            LimitExceeded: the disk is full.
        """
        check_image_name(image.name)
        with translated("save an image in", self.path), self.locked():
            self._write(image)
            _sync_directory(self._images)
            self._collect()

    def remove(self, name: str) -> int:
        """Remove an image and every layer that no image uses any more. Gives the bytes of the layers removed.

        A sandbox that runs on a removed layer keeps it: the file lives until its last mount goes.

        Raises:
            NotFound: there is no such image.
            Forbidden: this user may not change the depot.
        """
        path = self._image_path(name)
        with translated("remove an image from", self.path):
            there = path.exists()
        if not there:
            self.image(name)  # raises the error that lists what there is
        with translated("remove an image from", self.path), self.locked():
            path.unlink(missing_ok=True)
            _sync_directory(self._images)
            return self._collect()

    @contextmanager
    def work_dir(self) -> Iterator[Work]:
        """A new directory on the depot's file system, removed on leaving, by whatever way.

        After a kill -9 the next writer removes it.
        """
        self._prepare()
        path = self._tmp / secrets.token_hex(8)
        # locked, so that no other writer can meet it before its own lock is held
        with translated("work in", self.path), self.locked():
            path.mkdir(mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield Work(path, lock)
        finally:
            shutil.rmtree(path)
            os.close(lock)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The depot's lock against other writers. It may be taken again inside; only short work goes in."""
        if self._lock_depth:
            self._lock_depth += 1
            try:
                yield
            finally:
                self._lock_depth -= 1
            return
        self._prepare()
        with translated("use", self.path):
            held = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            self._lock_depth = 1
            yield
        finally:
            self._lock_depth = 0
            os.close(held)

    def _prepare(self) -> None:
        with translated("use", self.path):
            self._tmp.mkdir(parents=True, exist_ok=True)

    def _write(self, image: Image) -> None:
        """Put an image's file in place, as the last thing done."""
        with self.work_dir() as work:
            for layer in image.layers:
                self.layer_path(layer)
            self._images.mkdir(parents=True, exist_ok=True)
            fresh = work.path / "image.json"
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(image)) + b"\n")
            _sync_and_hash(fresh)
            fresh.rename(self._image_path(image.name))

    def _image_path(self, name: str) -> Path:
        check_image_name(name)
        return self._images / f"{name}.json"

    def _collect(self) -> int:
        """Remove layers that no image names and work directories that no process holds."""
        try:
            used = {layer for image in self.images() for layer in image.layers}
        except CloudyardError:
            return 0  # a damaged image may use any of them
        freed = 0
        for path in self._layers.glob("*.erofs"):
            if path.stem not in used:
                freed += path.stat().st_size
                path.unlink()
        for work in self._tmp.iterdir():
            if not _is_held(work):
                shutil.rmtree(work)
        return freed


def check_image_name(name: str) -> None:
    """Check that an image may be called so.

    Raises:
        InvalidRequest: it may not.
    """
    if not _NAME.match(name):
        raise InvalidRequest(
            f"{name[:80]!r} is not an image name.",
            code="bad_image_name",
            hint="Names are lower-case letters, digits, dots, dashes and underscores, such as debian.",
        )


@contextmanager
def translated(doing: str, path: Path, *, passing: type[OSError] | None = None) -> Iterator[None]:
    """Turn the kernel's refusals of work on a depot's files into our errors.

    Args:
        doing: the verb, such as "save an image in".
        path: the directory it is about.
        passing: an error that the caller handles.
    """
    try:
        yield
    except OSError as exc:
        if passing is not None and isinstance(exc, passing):
            raise
        message = f"Cannot {doing} the depot {path}: {exc.strerror or exc}."
        match exc.errno:
            case errno.ENOSPC | errno.EDQUOT:
                raise LimitExceeded(
                    message,
                    code="disk_full",
                    hint=f"Free space on the disk of {path}, or name another with --depot.",
                ) from exc
            case errno.EPERM | errno.EACCES | errno.EROFS:
                raise Forbidden(
                    message,
                    code="depot_not_readable" if doing == "read" else "depot_not_writable",
                    hint="Run it with sudo, or name a directory of yours with --depot.",
                ) from exc
            case errno.EEXIST | errno.ENOTDIR:
                raise Conflict(
                    message, code="depot_not_a_directory", hint="Name a directory with --depot."
                ) from exc
            case _:
                raise CloudyardError(message, code="depot_failed") from exc


def _sync_and_hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(_HASH_BLOCK):
            digest.update(block)
        os.fsync(source.fileno())
    return digest.hexdigest()


def _sync_directory(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _is_held(work: Path) -> bool:
    try:
        opened = os.open(work / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False
