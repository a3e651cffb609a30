"""A directory with all below it, as it goes over the wire: entries with names of bytes, small files whole."""

from __future__ import annotations

from msgspec import Struct

from cloudyard.errors import InvalidRequest, LimitExceeded
from cloudyard.model.basics import CHUNK_BYTES_MAX, MIB, PATH_BYTES_MAX, FileKind

TREE_PART_BYTES_MAX = MIB  # of file content in one part of a tree
TREE_PART_ENTRIES_MAX = 4096
TREE_INLINE_BYTES_MAX = CHUNK_BYTES_MAX  # of a file that travels in its entry; a larger one goes by itself
TREE_DIR_MAX = 100_000  # entries of one directory


class TreeEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One entry below the top of a tree."""

    name: bytes
    """Its path below the top, such as `src/main.c`; Linux takes any bytes but NUL in a name."""
    kind: FileKind
    mode: int = 0
    """Permission bits."""
    size: int = 0
    mtime_ns: int = 0
    data: bytes | None = None
    """The content of a file of up to TREE_INLINE_BYTES_MAX; None where it goes by itself."""
    sha256: bytes = b""
    """Of `data`, made where it was read; checked before the file gets its name. Empty: unchecked."""
    target: bytes = b""
    """Where a symlink points."""
    shared: str = ""
    """In what is read, for a file that has several names: entries with the same word here are one file."""
    same_as: bytes = b""
    """In what is written: the name of a file that this is to be another name of."""


def check_below(name: bytes) -> None:
    """Check a path below the top of a tree.

    Raises:
        InvalidRequest: it is absolute, leads out, is no path in its plainest form, or is too long.
    """
    if len(name) >= PATH_BYTES_MAX:
        raise InvalidRequest(
            f"A path below the directory has {len(name)} bytes.",
            code="name_too_long",
            hint=f"At most {PATH_BYTES_MAX - 1}.",
        )
    if b"\0" in name or any(part in (b"", b".", b"..") for part in name.split(b"/")):
        raise InvalidRequest(
            f"{name[:200]!r} is no path below a directory.",
            code="bad_path",
            hint="Paths are relative, such as src/main.c, without . and ..",
        )


def check_entries(entries: list[TreeEntry]) -> None:
    """Check what is to be written.

    Raises:
        InvalidRequest: a name leads elsewhere, or an entry lacks what belongs to its kind.
        LimitExceeded: it is more than one message may carry.
    """
    size = sum(len(entry.data or b"") for entry in entries)
    if len(entries) > TREE_PART_ENTRIES_MAX or size > TREE_PART_BYTES_MAX:
        raise LimitExceeded(
            f"{len(entries)} entries with {size} bytes are too many at once.",
            code="tree_too_large",
            hint=f"At most {TREE_PART_ENTRIES_MAX} entries and {TREE_PART_BYTES_MAX} bytes.",
        )
    for entry in entries:
        check_below(entry.name)
        if entry.same_as:
            check_below(entry.same_as)
        if not _is_whole(entry):
            raise InvalidRequest(
                f"The entry {entry.name[:200]!r} of kind {entry.kind} cannot be written.",
                code="bad_entry",
                hint="Files bring data or same_as, links a target; a device, FIFO or socket has no content.",
            )


def _is_whole(entry: TreeEntry) -> bool:
    match entry.kind:
        case "directory":
            return True
        case "file":
            return bool(entry.same_as) or entry.data is not None
        case "symlink":
            return b"\0" not in entry.target and 0 < len(entry.target) < PATH_BYTES_MAX
        case "other":
            return False
