"""The container backend: bubblewrap over an overlay of EROFS layers, in namespaces, uids and cgroups of its
own.

How a sandbox is made: a launcher of the pool (guest/launch.c) already sits in the slot's cgroups with its
user namespace; told to go, it builds the root in a private copy of the template mount namespace and becomes
bubblewrap, whose child becomes the guest, PID 1 of the sandbox. When the guest has answered, bubblewrap's
monitor is killed: nothing needs it, and it is 185 KB. The host's mount table never changes. What a sandbox is
made of bears its slot's number (`site`), so that the next edge finds all of it again, or removes it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread, wait_readable

from cloudyard.edge.backends.base import Instance, InstanceFacts
from cloudyard.edge.backends.container.instance import ContainerInstance
from cloudyard.edge.backends.container.launcher import Launcher, bubblewrap, launch
from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.backends.container.pool import Pool
from cloudyard.edge.backends.container.site import SOCKET_PATH_MAX, Site, refused
from cloudyard.edge.host import syscalls
from cloudyard.edge.host.cgroups import Limits, open_cgroups
from cloudyard.edge.host.processes import Watcher, start_time
from cloudyard.edge.host.slots import SLOTS_MAX, Slots
from cloudyard.edge.host.template import LAYERS_MAX, Template
from cloudyard.edge.host.trash import discard
from cloudyard.errors import CloudyardError, InvalidRequest, SandboxUnavailable, Unsupported
from cloudyard.model import MIB, Image, SandboxId, SandboxSpec, parse_size
from cloudyard.wire.guest import PROTOCOL_VERSION, Decoder, FrameError, Kind, Tag, encode

__all__ = ["ContainerBackend", "ContainerOptions"]

PARK_WAIT_S = 20.0  # a launcher that is not ready then has failed
START_WAIT_S = 20.0  # from go to the guest's answer
OWN_PIDS = 8  # processes of ours in a sandbox, beyond those that its user may have
PARKED_LIMITS = Limits(memory_bytes=512 * MIB, cpu=1.0, pids=256 + OWN_PIDS)
PIDS_PER_SANDBOX = 8  # of kernel.pid_max, for `capacity`
DESCRIPTORS_PER_SANDBOX = 4  # of the edge's own limit, for `capacity`
REMOVED_AT_ONCE = 4  # sites
DISCARD_SLICE_S = 0.5
SWEPT_AT_ONCE = 16  # sites


class ContainerBackend:
    """Containers of one yard on this machine.

    Args:
        options: paths and sizes.
        layer_path: the EROFS file of a layer's name; raises NotFound.
    """

    name = "container"

    def __init__(self, options: ContainerOptions, layer_path: Callable[[str], Path]) -> None:
        self._options = options
        self._layer_path = layer_path
        self._slots = Slots(options.state / "edge", claims=options.claims)
        self._pool = Pool(self._prepare, size=options.pool_size, at_once=options.prepared_at_once)
        self._threads = CapacityLimiter(REMOVED_AT_ONCE)
        self._disks = CapacityLimiter(1)
        self._found: set[int] = set()  # slots that were there when we came, not yet adopted or swept

    async def __aenter__(self) -> Self:
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is under way in the body is its own affair: the task groups below only come to their end.
        await self._running.__aexit__(None, None, None)

    async def create(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        if not 0 < len(image.layers) <= LAYERS_MAX:
            raise InvalidRequest(
                f"The image {image.name} has {len(image.layers)} layers.",
                code="bad_layers",
                hint=f"An image has between 1 and {LAYERS_MAX} layers.",
            )
        layers = [await self._template.layer(self._layer_path(name)) for name in image.layers]
        launcher = await self._pool.take()
        try:
            return await self._start(launcher, sandbox, spec, layers)
        except BaseException:
            await self._take_down(launcher)
            raise
        finally:
            launcher.close()

    async def adopt(self, facts: InstanceFacts) -> Instance | None:
        site = self._site(facts.slot)
        try:
            process = self._watcher.watch(facts.pid)
        except ProcessLookupError:
            await self._remove_found(site)
            return None
        if start_time(facts.pid) != facts.pid_start:
            self._watcher.forget(process)
            await self._remove_found(site)
            return None
        self._found.discard(facts.slot)
        self._slots.keep({facts.slot})
        return ContainerInstance(facts, site=site, process=process, remove=self._remove)

    async def sweep(self, keep: set[int]) -> list[str]:
        done: list[str] = []

        async def one(slot: int) -> None:
            async with turns:
                try:
                    await self._remove_found(self._site(slot))
                except CloudyardError as exc:
                    done.append(f"could not remove what was left of slot {slot}: {exc}")
                else:
                    done.append(f"removed what was left of slot {slot}")

        turns = CapacityLimiter(SWEPT_AT_ONCE)
        async with create_task_group() as tasks:
            for slot in self._found - keep:
                tasks.start_soon(one, slot)
        for path in self._options.trash.iterdir():
            self._behind.start_soon(self._discard, path)
            done.append(f"removing the disk {path.name}")
        return done

    def capacity(self) -> int:
        pids = int(Path("/proc/sys/kernel/pid_max").read_text())
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(SLOTS_MAX, pids // PIDS_PER_SANDBOX, descriptors // DESCRIPTORS_PER_SANDBOX)

    # Its own life

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        with ExitStack() as closing:
            await self._open(closing)
            async with create_task_group() as self._behind:
                needed = CancelScope(shield=True)  # emptying the pool waits for ends, also when cancelled
                self._behind.start_soon(self._watch, needed)
                try:
                    async with create_task_group() as filling:
                        filling.start_soon(self._pool.run)
                        yield
                        filling.cancel_scope.cancel()
                finally:
                    await self._empty_pool()
                    needed.cancel()
                self._behind.cancel_scope.cancel()

    async def _watch(self, needed: CancelScope) -> None:
        with needed:
            await self._watcher.run()

    async def _open(self, closing: ExitStack) -> None:
        """Take everything that lasts as long as the backend."""
        options = self._options
        for path in (options.boxes, options.trash, options.guests):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        longest = len(os.fsencode(options.guests / f"{SLOTS_MAX}.sock"))
        if longest > SOCKET_PATH_MAX:
            raise InvalidRequest(
                f"The run directory {options.run} is too long: a socket in it would take {longest} bytes.",
                code="run_dir_too_long",
                hint=f"The kernel takes {SOCKET_PATH_MAX} bytes; use a shorter one, such as /run/cloudyard.",
            )
        for program in (options.launcher, options.guest, options.bubblewrap):
            if not os.access(program, os.X_OK):
                raise Unsupported(
                    f"The program {program} is missing.",
                    code="program_missing",
                    hint="Run make, or scripts/setup.",
                )
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        syscalls.become_subreaper()
        await to_thread.run_sync(self._slots.open)
        closing.callback(self._slots.close)
        self._cgroups = open_cgroups(options.tag, options.cgroup_subtree)
        closing.callback(self._cgroups.close)
        self._guest = os.open(options.guest, os.O_RDONLY | os.O_CLOEXEC)
        closing.callback(os.close, self._guest)
        self._watcher = Watcher()
        closing.callback(self._watcher.close)
        self._template = await Template.make(options.boxes, options.layer_mount)
        closing.callback(self._template.close)
        self._found = self._slots_in_use()
        self._slots.keep(self._found)

    def _slots_in_use(self) -> set[int]:
        """Slots of which something is there."""
        names = [*self._cgroups.names(), *os.listdir(self._options.boxes)]
        names += [name.removesuffix(".sock") for name in os.listdir(self._options.guests)]
        return {int(name) for name in names if name.isdigit()}

    async def _empty_pool(self) -> None:
        with CancelScope(shield=True):
            for launcher in self._pool.drain():
                await self._take_down(launcher)
                launcher.close()

    # One sandbox

    def _site(self, slot: int) -> Site:
        return Site(slot, self._options, self._cgroups)

    async def _prepare(self) -> Launcher:
        """Park a launcher in a slot of its own; leaves nothing if it fails."""
        site = self._site(self._slots.take())
        program, template, guest = str(self._options.launcher), self._template.fd, self._guest
        try:
            launcher = await to_thread.run_sync(
                lambda: launch(site, PARKED_LIMITS, program=program, template=template, guest=guest)
            )
        except BaseException as exc:
            await self._remove(site)
            if isinstance(exc, OSError):
                raise refused(exc, site.slot) from exc
            raise
        try:
            launcher.process = self._watcher.watch(launcher.pid)
            with anyio.fail_after(PARK_WAIT_S):
                await launcher.parked()
        except BaseException as exc:
            await self._take_down(launcher)
            launcher.close()
            if isinstance(exc, TimeoutError):
                raise SandboxUnavailable(
                    f"Preparing slot {site.slot} failed: its launcher was not ready after {PARK_WAIT_S:g} s.",
                    code="launcher_timeout",
                    retry_safe=True,
                ) from exc
            raise
        return launcher

    async def _start(
        self, launcher: Launcher, sandbox: SandboxId, spec: SandboxSpec, layers: Sequence[str]
    ) -> Instance:
        site = launcher.site
        limits = Limits(
            memory_bytes=parse_size(spec.memory, what="memory"), cpu=spec.cpu, pids=spec.pids + OWN_PIDS
        )
        if limits != PARKED_LIMITS:
            try:
                site.group.limit(limits)
            except OSError as exc:
                raise refused(exc, site.slot) from exc
        argv = bubblewrap(str(self._options.bubblewrap), shm_bytes=self._options.shm_bytes)
        try:
            with anyio.fail_after(START_WAIT_S):
                pid = await launcher.go(spec.hostname, layers, argv)
                process = self._watcher.watch(pid)
                started = start_time(pid)
                await _greeted(site)
        except ProcessLookupError as exc:
            raise _died(launcher) from exc
        except _GuestSilent as exc:
            raise _died(launcher) from exc
        except TimeoutError as exc:
            raise SandboxUnavailable(
                f"Starting the sandbox failed: no answer from its guest. {launcher.words()}",
                code="start_timeout",
                retry_safe=True,
            ) from exc
        if started is None:
            raise _died(launcher)
        # Not before the guest's answer: the monitor says who its child is before it lets the child go on.
        if launcher.process is not None:
            launcher.process.kill()
        facts = InstanceFacts(sandbox=sandbox, slot=site.slot, pid=pid, pid_start=started)
        return ContainerInstance(facts, site=site, process=process, remove=self._remove)

    async def _take_down(self, launcher: Launcher) -> None:
        """End a launcher, whatever it has become by now, and remove its site."""
        with CancelScope(shield=True):
            if launcher.process is not None:
                launcher.process.kill()
            else:
                launcher.kill_unwatched()
            await self._remove(launcher.site)

    async def _remove_found(self, site: Site) -> None:
        """Remove what an earlier edge left of a slot."""
        if site.slot in self._found:
            await self._remove(site)
            self._found.discard(site.slot)

    async def _remove(self, site: Site) -> None:
        left = await site.remove(self._watcher, self._threads)
        self._slots.give_back(site.slot)
        if left is not None:
            self._behind.start_soon(self._discard, left)

    async def _discard(self, path: Path) -> None:
        """Remove a large disk, a slice at a time, behind everything else."""
        while not await to_thread.run_sync(discard, path, DISCARD_SLICE_S, limiter=self._disks):
            pass


class _GuestSilent(Exception):
    """The guest's connection ended before it had answered."""


async def _greeted(site: Site) -> None:
    """Return when the guest has answered a HELLO: the first moment at which the sandbox is known to be
    whole."""
    with site.connect() as link:
        link.send(encode(Kind.HELLO, 0, (Tag.VERSION_MIN, 1), (Tag.VERSION_MAX, PROTOCOL_VERSION)))
        decoder = Decoder()
        while True:
            await wait_readable(link)
            try:
                data = link.recv(4096)
            except OSError as exc:
                raise _GuestSilent from exc
            if not data:
                raise _GuestSilent
            for frame in decoder.feed(data):
                if frame.kind == Kind.WELCOME:
                    return
                raise FrameError(
                    f"The guest answered HELLO with a frame of kind {frame.kind}: {frame.text(Tag.TEXT)}"
                )


def _died(launcher: Launcher) -> SandboxUnavailable:
    words = launcher.words() or "it said nothing"
    return SandboxUnavailable(
        f"Starting the sandbox failed: it ended before its guest answered ({words}).", code="start_failed"
    )
