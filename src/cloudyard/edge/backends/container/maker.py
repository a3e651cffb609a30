"""How one sandbox is made: a launcher is parked ahead of need, told to go, and the guest is heard."""

from __future__ import annotations

import anyio
from anyio import CancelScope, to_thread
from msgspec.structs import replace

from cloudyard.edge.backends.container.bubblewrap import order
from cloudyard.edge.backends.container.defences import Defences
from cloudyard.edge.backends.container.launcher import Launcher, launch
from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.backends.container.site import Site, refused
from cloudyard.edge.backends.container.sites import Sites
from cloudyard.edge.backends.container.stock import Raised, Shape
from cloudyard.edge.host.cgroups import Limits
from cloudyard.edge.host.masks import Masks, masks_here
from cloudyard.edge.host.processes import Watcher, start_time
from cloudyard.edge.host.template import Template
from cloudyard.edge.probe import GuestSilent, prove
from cloudyard.errors import SandboxUnavailable
from cloudyard.model import MIB, CpuClass, SandboxSpec, parse_size

PARK_WAIT_S = 20.0  # a launcher that is not ready then has failed
START_WAIT_S = 20.0  # from go to the guest's answer
OWN_PIDS = 8  # processes of ours in a sandbox, beyond those that its user may have
NO_LIMIT_BYTES, NO_LIMIT_PIDS = 2**50, 2**22  # more than any machine has
PARKED_DISK_BYTES = parse_size(SandboxSpec(image="").disk, what="disk")
PARKED_LIMITS = Limits(memory_bytes=512 * MIB, cpu=1.0, pids=256 + OWN_PIDS)


class Maker:
    """Parks launchers and makes sandboxes of them.

    Args:
        options: the programs' paths.
        sites: where to make them.
        watcher: sees the ends of processes; it must run.
        template: the mount namespace that sandboxes start from.
        guest: descriptor of the guest's program.
    """

    def __init__(
        self, options: ContainerOptions, *, sites: Sites, watcher: Watcher, template: Template, guest: int
    ) -> None:
        self._options = options
        self._sites = sites
        self._watcher = watcher
        self._template = template
        self._guest = guest
        self._masks = masks_here() if options.defences.proc_masks else Masks((), ())

    async def park(self, cpu_class: CpuClass) -> Launcher:
        """A launcher that waits in a slot of its own, to make a sandbox of that class; leaves nothing if it
        fails."""
        site = self._sites.take(cpu_class)
        try:
            launcher = await to_thread.run_sync(self._launch, site)
        except BaseException as exc:
            await self._sites.remove(site)
            if isinstance(exc, OSError):
                raise refused(exc, site.slot) from exc
            raise
        try:
            with anyio.fail_after(PARK_WAIT_S):
                launcher.watched(self._watcher)
                await launcher.parked()
        except BaseException as exc:
            await self.take_down(launcher)
            if isinstance(exc, TimeoutError):
                raise SandboxUnavailable(
                    f"Preparing slot {site.slot} failed: its launcher was not ready in {PARK_WAIT_S:g} s.",
                    code="launcher_timeout",
                    retry_safe=True,
                ) from exc
            if isinstance(exc, OSError):
                raise refused(exc, site.slot) from exc
            raise
        return launcher

    async def start(self, launcher: Launcher, shape: Shape) -> Raised:
        """Make a sandbox of a parked launcher, which is used up by it. Its image's probe has run.

        Leaves nothing if it fails.
        """
        try:
            return await self._start(launcher, shape)
        except BaseException:
            await self.take_down(launcher)
            raise

    async def _start(self, launcher: Launcher, shape: Shape) -> Raised:
        try:
            with anyio.fail_after(START_WAIT_S):
                child = await launcher.go(order(self._options, shape, self._masks))
                process = self._watcher.watch(child)
                started = start_time(process.pid)
                await _proved(launcher.site, shape)
        except TimeoutError as exc:
            raise SandboxUnavailable(
                f"Starting the sandbox failed: no answer from its guest. {launcher.words()}",
                code="start_timeout",
                retry_safe=True,
            ) from exc
        except (ProcessLookupError, GuestSilent) as exc:
            raise launcher.died() from exc
        except OSError as exc:
            raise refused(exc, launcher.site.slot) from exc
        if started is None:
            raise launcher.died()
        # Not before the guest has answered: the monitor says who its child is before it lets the child go on.
        launcher.kill()
        launcher.close()
        return Raised(launcher.site, process, started)

    def fit(self, raised: Raised, spec: SandboxSpec, *, weight: int, pinned: bool) -> None:
        """Give a sandbox what its spec, which is normalised, asks for.

        Args:
            raised: the sandbox.
            spec: with its limits.
            weight: its share of a busy processor.
            pinned: whether it sees only as many processors as it has cores.

        Raises:
            CloudyardError: the kernel refused.
        """
        limits = _limits(limits_of(spec), self._options.defences)
        try:
            if pinned:
                self._sites.pin(raised.site, spec.cpu)
            raised.site.group.set_weight(weight)
            if limits != PARKED_LIMITS:
                raised.site.group.limit(limits)
            if (disk := parse_size(spec.disk, what="disk")) != PARKED_DISK_BYTES:
                raised.site.limit_disk(self._disk_bytes(disk))
        except OSError as exc:
            raise refused(exc, raised.site.slot) from exc

    async def drop(self, raised: Raised) -> None:
        """End a sandbox that nobody has, and remove its site."""
        with CancelScope(shield=True):
            raised.process.kill()
            await self._sites.remove(raised.site)

    async def take_down(self, launcher: Launcher) -> None:
        """End a launcher, whatever it has become by now, and remove its site."""
        with CancelScope(shield=True):
            launcher.kill()
            try:
                await self._sites.remove(launcher.site)
            finally:
                launcher.close()

    def _disk_bytes(self, wanted: int) -> int:
        return wanted if self._options.defences.disk_limit else NO_LIMIT_BYTES

    def _launch(self, site: Site) -> Launcher:
        return launch(
            site,
            PARKED_LIMITS,
            disk_bytes=self._disk_bytes(PARKED_DISK_BYTES),
            program=str(self._options.launcher),
            template=self._template.fd,
            guest=self._guest,
            namespaces=self._options.defences.namespaces,
        )


def limits_of(spec: SandboxSpec) -> Limits:
    """What a sandbox of this spec, which is normalised, may use, with what is ours in it."""
    memory = parse_size(spec.memory, what="memory")
    swap = parse_size(spec.swap, what="swap")
    return Limits(memory_bytes=memory, swap_bytes=swap, cpu=spec.cpu, pids=spec.pids + OWN_PIDS)


def _limits(limits: Limits, defences: Defences) -> Limits:
    """What is left of them where a defence is down."""
    return replace(
        limits,
        memory_bytes=limits.memory_bytes if defences.memory_limit else NO_LIMIT_BYTES,
        pids=limits.pids if defences.pids_limit else NO_LIMIT_PIDS,
    )


async def _proved(site: Site, shape: Shape) -> None:
    """Return when a command has run: only then the sandbox is known to be whole."""
    try:
        link = site.connect()
    except SandboxUnavailable as exc:
        raise GuestSilent from exc
    with link:
        await prove(link, shape.image, probe=shape.probe, env=shape.env)
