"""The template: a tiny mount namespace, kept by descriptor, of which every sandbox starts as a private copy.

Why: bubblewrap reads every mount of the namespace it starts in, and a copy of a namespace costs by the number
of its mounts. Sandboxes whose mounts were in the host's own namespace made creation four times slower at
1,200 alive. In here there are only what bubblewrap needs to start, the folder of the sandboxes' disks and the
layers of images that exist; the host's table never grows, and when the last descriptor and the last sandbox
are gone the kernel takes it all down.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from anyio import Lock, to_thread

from cloudyard.edge.host import syscalls
from cloudyard.edge.host.layers import LayerMount, mount_layer
from cloudyard.errors import LimitExceeded, Unsupported

LAYERS_MAX = 32  # layers of one image; the launcher has the same bound
TEMPLATE_LAYERS_MAX = 1024  # layers mounted at once
BOXES = "/boxes"  # where the template shows the folder of the sandboxes' disks
FILTERS = "/filters"  # and its programs for the kernel's filter of system calls
NOTHING, NOWHERE = "/nothing", "/nowhere"  # an empty file and an empty folder, to hide others with
NO_FILTERS: Mapping[str, bytes] = MappingProxyType({})
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Template:
    """A template mount namespace. Made by `Template.make`, ended by `close`; sandboxes made from it live
    on."""

    def __init__(self, fd: int, way: LayerMount) -> None:
        self.fd = fd
        self._way = way
        self._layers: dict[Path, _Layer] = {}
        self._leaving: list[str] = []
        self._numbers = itertools.count()
        self._lock = Lock()

    @classmethod
    async def make(
        cls,
        boxes: Path,
        way: LayerMount = "auto",
        *,
        filters: Mapping[str, bytes] = NO_FILTERS,
        disks: int | None = None,
    ) -> Template:
        """Build one that shows `boxes` at BOXES, or `disks`, a mount that is attached nowhere yet; and the
        filters, by name, in FILTERS.

        Raises:
            Unsupported: this process may not make mount namespaces.
        """
        try:
            fd = await to_thread.run_sync(syscalls.on_own_thread, partial(_build, boxes, filters, disks))
        except OSError as exc:
            raise Unsupported(
                f"Making a mount namespace failed at {exc.filename or 'unshare'}: {exc.strerror}.",
                code="mount_namespace_refused",
                hint="An edge needs root with CAP_SYS_ADMIN.",
            ) from exc
        return cls(fd, way)

    async def layer(self, path: Path) -> str:
        """Where the layer is in the template; mounted when it is asked for the first time.

        Raises:
            NotFound, Unsupported, LimitExceeded: as `mount_layer`; or too many layers are mounted.
        """
        layer = self._layers.get(path)
        if layer is not None:
            return layer.place
        async with self._lock:
            if path not in self._layers:
                if len(self._layers) >= TEMPLATE_LAYERS_MAX:
                    raise LimitExceeded(
                        f"Mounting the layer {path} failed: {TEMPLATE_LAYERS_MAX} layers are mounted here.",
                        code="too_many_layers",
                        fault="infra",
                        hint="Remove images that are not used; or restart the edge: sandboxes live on.",
                    )
                place = f"/layers/{next(self._numbers)}"
                self._layers[path] = await to_thread.run_sync(self._add, path, place)
            return self._layers[path].place

    async def let_go(self) -> list[str]:
        """Forget the layers whose files are removed, and give their places. They are unmounted the next time:
        whoever asked for one just now may be about to use it. Then their room on the disk is free, unless
        sandboxes live on them.

        Raises:
            OSError: the kernel refused.
        """
        async with self._lock:
            gone = await to_thread.run_sync(self._let_go)
            self._leaving = [self._layers.pop(path).place for path in gone]
            return list(self._leaving)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    async def show(self, mounted: int, place: str) -> None:
        """Put a mount, which is attached nowhere, in a place of its own, instead of what was there. Sandboxes
        made before do not see it."""
        await to_thread.run_sync(self._attach, mounted, place)

    def _add(self, path: Path, place: str) -> _Layer:
        mounted = mount_layer(path, self._way)
        try:
            self._attach(mounted, place)
        finally:
            os.close(mounted)
        return _Layer(place, _file(path))

    def _let_go(self) -> list[Path]:
        def detach() -> None:
            syscalls.enter_mount_namespace(self.fd)
            while self._leaving:
                syscalls.unmount(self._leaving[-1], syscalls.MNT_DETACH)
                os.rmdir(self._leaving.pop())

        if self._leaving:
            syscalls.on_own_thread(detach)
        return [path for path, layer in self._layers.items() if _file(path) != layer.file]

    def _attach(self, mounted: int, place: str) -> None:
        def attach() -> None:
            syscalls.enter_mount_namespace(self.fd)
            with suppress(OSError):  # nothing was there
                syscalls.unmount(place, syscalls.MNT_DETACH)
            os.makedirs(place, exist_ok=True)
            syscalls.move_mount(mounted, place)

        syscalls.on_own_thread(attach)


class _Layer(NamedTuple):
    """Where a layer is mounted, and the file that it was then: one that is built again is another."""

    place: str
    file: tuple[int, int] | None


def _file(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that has its name later; None where there is none."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _build(boxes: Path, filters: Mapping[str, bytes], disks: int | None) -> int:
    """Make the namespace on this thread, which must end after it. Gives its descriptor."""
    syscalls.unshare(syscalls.CLONE_FS | syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Any folder does to build upon: the new root hides it from this namespace alone.
    root = str(boxes)
    source = os.open(boxes, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.mount("none", root, "tmpfs", options="size=4m,mode=755")
        for name in _SYSTEM:
            _show_system(root, name)
        for name in ("proc", "dev"):
            _bind(f"/{name}", f"{root}/{name}")
        if disks is None:
            _bind(f"/proc/self/fd/{source}", root + BOXES)
        else:
            os.mkdir(root + BOXES)
            syscalls.move_mount(disks, root + BOXES)
        for name in ("tmp", "old", "root", "pts", "layers", *(f"lower/{i}" for i in range(LAYERS_MAX))):
            os.makedirs(f"{root}/{name}")
        for path in (NOWHERE, FILTERS):
            os.mkdir(root + path)
            os.chmod(root + path, 0o755)  # whatever our umask, here and below: sandboxes' uids open them
        files = {f"{FILTERS}/{name}": program for name, program in filters.items()}
        for path, content in {NOTHING: b"", **files}.items():
            Path(root + path).write_bytes(content)
            os.chmod(root + path, 0o444)
    finally:
        os.close(source)
    os.chdir(root)
    syscalls.pivot_root(".", "old")
    os.chdir("/")
    syscalls.unmount("/old", syscalls.MNT_DETACH)
    os.rmdir("/old")
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _show_system(root: str, name: str) -> None:
    """A folder of the host's system that bubblewrap's program or its libraries are in; a link where it is one
    there."""
    if os.path.islink(f"/{name}"):
        os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    elif os.path.isdir(f"/{name}"):
        _bind(f"/{name}", f"{root}/{name}")


def _bind(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    syscalls.mount(source, target, flags=syscalls.MS_BIND)
