"""The container backend: bubblewrap over an overlay of EROFS layers, in namespaces, uids and cgroups of its
own.

How a sandbox is made: a launcher of the pool (guest/launch.c) already sits in the slot's cgroups with its
user namespace; told to go, it builds the root in a private copy of the template mount namespace and becomes
bubblewrap, whose child becomes the guest, PID 1 of the sandbox. When the guest has answered, bubblewrap's
monitor is killed: nothing needs it, and it is 185 KB. A few sandboxes of the shapes in demand are raised so
far before anyone asks for them (`stock`). The host's mount table never changes. What a sandbox is made of
bears its slot's number (`site`), so that the next edge finds all of it again, or removes it.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from anyio import CancelScope, create_task_group, sleep, to_thread

from cloudyard.edge.backends.base import Instance, InstanceFacts
from cloudyard.edge.backends.container.defences import Defences
from cloudyard.edge.backends.container.instance import ContainerInstance
from cloudyard.edge.backends.container.maker import PARKED_DISK_BYTES, Maker
from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.backends.container.pool import Pool
from cloudyard.edge.backends.container.site import SOCKET_PATH_MAX, Site
from cloudyard.edge.backends.container.sites import Sites
from cloudyard.edge.backends.container.stock import Raised, Shape, Stock
from cloudyard.edge.host import syscalls
from cloudyard.edge.host.cgroups import open_cgroups
from cloudyard.edge.host.disk_pool import is_in_use, open_pool
from cloudyard.edge.host.disks import Disks, PlainDisks
from cloudyard.edge.host.lxcfs import Lxcfs
from cloudyard.edge.host.processes import Process, Watcher, start_time
from cloudyard.edge.host.seccomp import build_filters
from cloudyard.edge.host.slots import SLOTS_MAX, Slots
from cloudyard.edge.host.template import LAYERS_MAX, Template
from cloudyard.edge.meminfo import swap_total_bytes
from cloudyard.errors import CloudyardError, InvalidRequest, Unsupported
from cloudyard.model import GIB, Image, SandboxId, SandboxSpec, parse_size

__all__ = ["ContainerBackend", "ContainerOptions", "Defences"]

NESTING_WEIGHT = 3000  # of the processor: short work that somebody waits for, beside much that takes long
MOST_BYTES = 65_536 * GIB  # of a pool that takes what there is
PIDS_PER_SANDBOX = 8  # of kernel.pid_max, for `capacity`
DESCRIPTORS_PER_SANDBOX = 4  # of the edge's own limit, for `capacity`
_log = logging.getLogger(__name__)


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
        if spec.swap:
            self._refuse_swap()
        if parse_size(spec.disk, what="disk") != PARKED_DISK_BYTES and not self._disks.limited:
            raise _no_pool(spec)
        _refuse_files(spec.open_files)
        raised = await self._stock.take(await self._shape(spec, image))
        return await self._fitted(raised, sandbox, spec, weight=spec.cpu_weight)

    async def create_nesting(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        # Past the stock: few are made, and none may take the place of one that a user is about to ask for.
        shape = (await self._shape(spec, image))._replace(profile="worker")
        raised = await self._maker.start(await self._pool.take(shape.cpu_class), shape)
        return await self._fitted(raised, sandbox, spec, weight=NESTING_WEIGHT)

    async def _shape(self, spec: SandboxSpec, image: Image) -> Shape:
        if not 0 < len(image.layers) <= LAYERS_MAX:
            raise InvalidRequest(
                f"The image {image.name} has {len(image.layers)} layers.",
                code="bad_layers",
                hint=f"An image has between 1 and {LAYERS_MAX} layers.",
            )
        layers = [await self._template.layer(self._layer_path(name)) for name in image.layers]
        config = image.config
        return Shape(
            image=image.name,
            layers=tuple(layers),
            hostname=spec.hostname,
            probe=tuple(config.probe),
            env=tuple(config.env.items()),
            cpu_class=spec.cpu_class,
            lxcfs=await self._lxcfs.show(self._template) if spec.lxcfs else 0,
            profile="user_namespaces" if spec.user_namespaces else "sandbox",
        )

    async def _fitted(
        self, raised: Raised, sandbox: SandboxId, spec: SandboxSpec, *, weight: int
    ) -> Instance:
        try:
            self._maker.fit(raised, spec, weight=weight)
        except BaseException:
            await self._maker.drop(raised)
            raise
        facts = InstanceFacts(
            sandbox=sandbox, slot=raised.site.slot, pid=raised.process.pid, pid_start=raised.started
        )
        return self._instance(facts, raised.site, raised.process)

    async def adopt(self, facts: InstanceFacts) -> Instance | None:
        try:
            process = self._watcher.watch(facts.pid)
        except ProcessLookupError:
            await self._sites.remove_if_left(facts.slot)
            return None
        if start_time(facts.pid) != facts.pid_start:
            self._watcher.forget(process)
            await self._sites.remove_if_left(facts.slot)
            return None
        return self._instance(facts, self._sites.adopted(facts.slot), process)

    async def sweep(self, keep: set[int]) -> list[str]:
        removed = await self._sites.sweep(keep)
        if not keep and await self._lxcfs.end():  # nobody reads its files any more
            removed.append("ended the daemon lxcfs")
        return removed

    def capacity(self) -> int:
        pids = int(Path("/proc/sys/kernel/pid_max").read_text())
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(SLOTS_MAX, pids // PIDS_PER_SANDBOX, descriptors // DESCRIPTORS_PER_SANDBOX)

    def _instance(self, facts: InstanceFacts, site: Site, process: Process) -> ContainerInstance:
        return ContainerInstance(
            facts,
            site=site,
            process=process,
            watcher=self._watcher,
            remove=self._sites.remove,
        )

    async def _let_go_of_layers(self) -> None:
        """Layers of images that were removed take no room on the disk for our sake."""
        while True:
            await sleep(self._options.layers_checked_s)
            try:
                await self._stock.forget(await self._template.let_go())
            except (OSError, CloudyardError) as exc:
                _log.warning("Letting go of a removed image failed: %s", exc)

    def _refuse_swap(self) -> None:
        why = "" if swap_total_bytes() else "this machine has no swap"
        if not self._groups.limits_swap:
            why = "the kernel does not count it"
        if why:
            raise Unsupported(
                f"A sandbox with swap cannot be made here: {why}.",
                code="no_swap",
                hint="Ask for swap=0 and more memory; or add swap to the node, where the kernel counts it.",
            )

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Hold everything that lasts as long as the backend."""
        options = self._options
        _check(options)
        _prepare_process()
        for path in (options.boxes, options.trash, options.guests):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as closing:
            slots = Slots(options.state / "edge", claims=options.claims)
            await to_thread.run_sync(slots.open)
            closing.callback(slots.close)
            groups = self._groups = open_cgroups(options.tag, options.cgroup_subtree)
            closing.callback(groups.close)
            guest = os.open(options.guest, os.O_RDONLY | os.O_CLOEXEC)
            closing.callback(os.close, guest)
            watcher = self._watcher = Watcher()
            closing.callback(watcher.close)
            self._lxcfs = Lxcfs(options.lxcfs, options.run / "lxcfs", groups.group("lxcfs"), watcher)
            filters = await to_thread.run_sync(build_filters)
            disks = self._disks = await to_thread.run_sync(_open_disks, options)
            closing.callback(disks.close)
            template = self._template = await Template.make(
                options.boxes, options.layer_mount, filters=filters, disks=disks.mount
            )
            closing.callback(template.close)
            async with create_task_group() as behind:
                needed = CancelScope(shield=True)  # emptying the pool waits for ends, also when cancelled
                behind.start_soon(_watch, watcher, needed)
                sites = Sites(
                    options, slots=slots, groups=groups, disks=disks, watcher=watcher, behind=behind
                )
                maker = Maker(options, sites=sites, watcher=watcher, template=template, guest=guest)
                pool = Pool(
                    maker.park,
                    maker.take_down,
                    size=options.pool_size,
                    at_once=options.prepared_at_once,
                )

                async def raise_one(shape: Shape) -> Raised:
                    return await maker.start(await pool.take(shape.cpu_class), shape)

                stock = Stock(raise_one, maker.drop, size=options.stock_size, at_once=options.raised_at_once)
                self._sites, self._maker, self._pool, self._stock = sites, maker, pool, stock
                try:
                    async with create_task_group() as filling:
                        filling.start_soon(disks.run)
                        filling.start_soon(pool.run)
                        filling.start_soon(stock.run)
                        filling.start_soon(self._let_go_of_layers)
                        yield
                        filling.cancel_scope.cancel()
                finally:
                    with CancelScope(shield=True):
                        for raised in stock.drain():
                            await maker.drop(raised)
                        for launcher in pool.drain():
                            await maker.take_down(launcher)
                    needed.cancel()
                behind.cancel_scope.cancel()


def _no_pool(spec: SandboxSpec) -> Unsupported:
    return Unsupported(
        f"A sandbox with disk={spec.disk} cannot be made here: this yard has no disk pool.",
        code="no_disk_pool",
        hint="Leave disk out; or have a pool on the node: cloudyard doctor says what it needs.",
    )


def _open_disks(options: ContainerOptions) -> Disks:
    """The disks of sandboxes: in a pool, where the machine can make one."""
    if options.disk_pool_bytes != 0:
        most = MOST_BYTES if options.disk_pool_bytes is None else options.disk_pool_bytes
        try:
            return open_pool(options.disk_pool, most_bytes=most)
        except CloudyardError as exc:
            if options.disk_pool_bytes is not None or is_in_use(options.disk_pool):
                raise
            _log.warning("Sandboxes have no limit of disk here: %s", exc)
    return PlainDisks(options.boxes, options.trash)


async def _watch(watcher: Watcher, needed: CancelScope) -> None:
    with needed:
        await watcher.run()


def _prepare_process() -> None:
    """Make this process fit for many sandboxes: as many descriptors as it may have, for it and for what it
    starts, and heir of their first processes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = int(Path("/proc/sys/fs/nr_open").read_text())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, ceiling))
    except ValueError:  # no right to raise it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    syscalls.become_subreaper()


def _refuse_files(wanted: int) -> None:
    """What this process may not open, nothing that it starts may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > most:
        raise Unsupported(
            f"A sandbox with open_files={wanted} cannot be made here: the edge itself may open {most}.",
            code="open_files_unsupported",
            hint=f"Ask for at most {most}, or raise the limit before `cloudyard up`: ulimit -Hn {wanted}.",
        )


def _check(options: ContainerOptions) -> None:
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
