"""A small directory as one compressed tar, packed once and unpacked by one command.

A task's environment/ goes into a fresh sandbox at every attempt. File by file that is an operation each; as a
bundle it is one. It needs the sandbox's own tar, so it is for sandboxes in which nobody has acted yet.
"""

from __future__ import annotations

import io
import tarfile
from functools import lru_cache
from pathlib import Path

from cloudyard.model import MIB
from cloudyard.rollout.box import Box

BUNDLE_BYTES_MAX = 4 * MIB  # of files, before they are compressed; more goes file by file
BUNDLES_KEPT = 16
UNPACK_S = 60.0
_COMPRESSION = 6


async def bring(box: Box, local: Path, path: str, *, digest: str) -> None:
    """Copy a directory of this machine into a fresh sandbox, with permission bits and links, owned by root.

    Args:
        box: of the sandbox.
        local: the directory.
        path: where its entries go; it exists.
        digest: changes when anything in the directory does.
    """
    bundle = _packed(local, digest)
    if bundle is not None:
        done = await box.run(["tar", "-xzf", "-", "-C", path], stdin=bundle, timeout_s=UNPACK_S)
        if done.ok:
            return
    await box.upload(local, path)


@lru_cache(maxsize=BUNDLES_KEPT)
def _packed(local: Path, digest: str) -> bytes | None:
    """The bundle of a directory; None where it is too large for one."""
    if sum(entry.lstat().st_size for entry in local.rglob("*") if entry.is_file()) > BUNDLE_BYTES_MAX:
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=_COMPRESSION) as tar:
        for entry in sorted(local.iterdir()):
            tar.add(entry, arcname=entry.name, filter=_owned_by_root)
    return packed.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
