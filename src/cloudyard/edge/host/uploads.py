"""Large files on their way into a sandbox, kept on its own disk until they are whole.

An upload is a file in `/.cloudyard-uploads` of the sandbox, mode 0700: so it counts to the sandbox's own disk
limit, is one rename away from most targets, outlives a restart of the edge and goes with the sandbox. The
directory goes with its last upload; uploads that nothing was added to for an hour are dropped when another
begins.

Everything here blocks; `files` runs it in threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cloudyard.edge.host import inroot, replacing
from cloudyard.edge.host.inroot import closing
from cloudyard.errors import Conflict, InvalidRequest, LimitExceeded

UPLOADS_DIR = ".cloudyard-uploads"
UPLOADS_MAX = 64  # of one sandbox at once
UPLOAD_IDLE_S = 3600.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def check_upload_id(upload: str) -> None:
    """Check what is to name an upload.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _ID.match(upload):
        raise InvalidRequest(
            f"{upload[:80]!r} is no upload id.",
            code="bad_upload_id",
            hint="Use 1 to 64 letters, digits, dashes and underscores.",
        )


def check_data(data: bytes, sha256: bytes, path: str) -> None:
    """Check a file that came in one message against its hash, where it has one.

    Raises:
        Conflict: it is another.
    """
    if sha256 and hashlib.sha256(data).digest() != sha256:
        raise Conflict(
            f"Cannot write {inroot.shown(path)}: what arrived has the SHA-256 "
            f"{hashlib.sha256(data).hexdigest()} and not {sha256.hex()[:64]}.",
            code="upload_hash",
            hint="Send the file again.",
        )


def held(root: int, upload: str) -> int:
    """Bytes of the upload that are here. Raises OSError."""
    try:
        with closing(inroot.open_child(root, UPLOADS_DIR, os.O_PATH | os.O_DIRECTORY)) as directory:
            return os.stat(upload, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def add(root: int, upload: str, offset: int, data: bytes, *, base: int) -> int:
    """Write a piece and give the bytes now held. Raises LimitExceeded (too many uploads), Conflict,
    OSError."""
    with _directory(root, base) as directory, closing(_open(directory, upload, os.O_WRONLY)) as target:
        if offset == os.fstat(target).st_size and data == bytes(len(data)):
            os.ftruncate(target, offset + len(data))  # a hole stays a hole
        else:
            replacing.write_all(target, data, offset)
        return os.fstat(target).st_size


def commit(
    root: int, upload: str, path: str, *, size: int, sha256: str, mode: int | None, parents: bool, base: int
) -> os.stat_result:
    """Put the upload in its place, if size and hash agree. Whatever happens, the upload is gone after it.

    Raises:
        Conflict: size or hash differ, or the place is taken by what is no regular file.
        OSError: the kernel refused.
    """
    with _directory(root, base) as directory:
        try:
            with closing(_open(directory, upload, os.O_RDWR)) as source:
                _check(source, upload, size, sha256)
                with replacing.find_target(root, path, parents=parents, base=base) as target:
                    if not target.mounted:
                        replacing.set_owner(source, target, mode=mode, base=base)
                        try:
                            os.rename(upload, target.name, src_dir_fd=directory, dst_dir_fd=target.directory)
                            return os.fstat(source)
                        except OSError as exc:
                            if exc.errno != errno.EXDEV:  # the target lies on another disk, such as a tmpfs
                                raise
                    return replacing.replace(
                        target,
                        path,
                        lambda made: replacing.copy_all(source, made, size),
                        mode=mode,
                        base=base,
                    )
        finally:
            replacing.unlink_quietly(upload, directory)


@contextmanager
def _directory(root: int, base: int) -> Iterator[int]:
    """The directory of uploads, made if need be and removed again if nothing is left in it."""
    with closing(_open_directory(root, base)) as directory:
        try:
            yield directory
        finally:
            try:
                os.rmdir(UPLOADS_DIR, dir_fd=root)
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR):
                    raise


def _open_directory(root: int, base: int) -> int:
    for _ in range(inroot.RACES_MAX):
        try:
            return inroot.open_child(root, UPLOADS_DIR, _DIRECTORY)
        except FileNotFoundError:
            try:
                with closing(inroot.open_directory(root, "/", "upload to")) as top:
                    return inroot.make_child(top, UPLOADS_DIR, mode=0o700, owner=base)
            except (FileExistsError, FileNotFoundError):
                continue  # another upload has just made it, or removed it
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _open(directory: int, upload: str, flags: int) -> int:
    try:
        there = inroot.open_child(directory, upload, os.O_PATH)
    except FileNotFoundError:
        _make_room(directory, upload)
        new = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(upload, flags | new, 0o600, dir_fd=directory)
    with closing(there):
        inroot.check_regular(os.fstat(there).st_mode, f"/{UPLOADS_DIR}/{upload}", "upload to")
        return inroot.reopen(there, flags)


def _make_room(directory: int, upload: str) -> None:
    """Drop uploads that were given up."""
    oldest = time.time() - UPLOAD_IDLE_S
    kept = 0
    with os.scandir(directory) as entries:
        for entry in itertools.islice(entries, UPLOADS_MAX):
            with contextlib.suppress(FileNotFoundError):  # it has just been put in its place
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    replacing.unlink_quietly(entry.name, directory)
                else:
                    kept += 1
    if kept >= UPLOADS_MAX:
        raise LimitExceeded(
            f"Cannot begin upload {upload}: {UPLOADS_MAX} others are under way in this sandbox.",
            code="too_many_uploads",
            hint="Finish or wait for some of them first.",
            retry_safe=True,
        )


def _check(source: int, upload: str, size: int, sha256: str) -> None:
    there = os.fstat(source).st_size
    if there != size:
        raise Conflict(
            f"Upload {upload} holds {there} bytes and not {size}; it was dropped.",
            code="upload_size",
            hint="Send the file again.",
        )
    digest = hashlib.sha256()
    for offset in range(0, size, inroot.BLOCK_BYTES):  # and no further, if it still grows
        digest.update(os.pread(source, min(inroot.BLOCK_BYTES, size - offset), offset))
    if digest.hexdigest() != sha256.lower():
        raise Conflict(
            f"Upload {upload} has the SHA-256 {digest.hexdigest()} and not {sha256[:64]}; it was dropped.",
            code="upload_hash",
            hint="Send the file again.",
        )
