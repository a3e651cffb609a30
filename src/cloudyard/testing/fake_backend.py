"""A backend without isolation: the real guest as a plain process, its files in a directory. Needs no root.

For tests of everything above a backend. It passes the same contract suite as the real ones, but for
limits: it has no cgroups, so a test sets an instance's counters itself. Commands run on this machine, as
this user.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from cloudyard.edge.backends.base import DiskUse, Files, Instance, InstanceFacts, Usage
from cloudyard.edge.host.files import RootFiles
from cloudyard.edge.host.processes import Process, Watcher, ended_within, start_time
from cloudyard.edge.probe import GuestSilent, prove
from cloudyard.errors import LimitExceeded, NotFound, SandboxUnavailable
from cloudyard.model import Image, ImageConfig, SandboxId, SandboxSpec

END_WAIT_S = 10.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def fake_image(name: str = "debian", *, probe: list[str] | None = None) -> Image:
    """An image of no layers for the fake: commands see this machine's own files."""
    config = ImageConfig(
        env={"PATH": PATH, "LANG": "C.UTF-8"}, cwd="/", user="", probe=probe or ["/bin/true"]
    )
    return Image(name=name, layers=[], config=config)


def fake_images(name: str) -> Image:
    """Images by name: `debian`, and `broken`, whose probe fails.

    Raises:
        NotFound: any other.
    """
    match name:
        case "debian":
            return fake_image()
        case "broken":
            return fake_image(name, probe=["/bin/sh", "-c", "echo no good >&2; exit 3"])
        case _:
            raise NotFound(f"There is no image {name!r}.", code="image_not_found", hint="There is debian.")


class FakeInstance:
    """One guest process and a directory."""

    def __init__(self, backend: FakeBackend, facts: InstanceFacts, process: Process) -> None:
        self._backend = backend
        self._facts = facts
        self._process = process
        self._stopped = False
        self._turn = anyio.Lock()
        self._files = RootFiles(self._open_root, os.getuid())
        self.directory = backend.directory_of(facts.slot)
        self.killed_for_memory = 0
        self.disk_use = DiskUse(used_bytes=0, limit_bytes=0, free_bytes=1 << 40)
        self.forks_over_limit = 0

    @property
    def facts(self) -> InstanceFacts:
        return self._facts

    @property
    def files(self) -> Files:
        return self._files

    def connect(self) -> socket.socket:
        if self._process.ended.is_set():
            raise self._gone("Connecting to the guest")
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.connect(str(self.directory / "guest.sock"))
        except OSError as exc:
            link.close()
            raise self._gone("Connecting to the guest") from exc
        return link

    async def wait_gone(self) -> None:
        await self._process.ended.wait()

    def usage(self) -> Usage:
        if self._process.ended.is_set():
            raise self._gone("Reading the counters")
        return Usage(
            memory_bytes=0,
            memory_peak_bytes=0,
            cpu_s=0.0,
            oom_kills=self.oom_kills(),
            pids=1,
            pids_refused=self.forks_over_limit,
        )

    def disk(self) -> DiskUse:
        if self._process.ended.is_set():
            raise self._gone("Reading the counters")
        return self.disk_use

    def oom_kills(self) -> int:
        if self._process.ended.is_set():
            raise self._gone("Reading the counters")
        return self.killed_for_memory

    def forks_refused(self) -> int:
        if self._process.ended.is_set():
            raise self._gone("Reading the counters")
        return self.forks_over_limit

    async def crash(self) -> None:
        """Kill PID 1 as the kernel might, and wait until all it had started is gone too."""
        with anyio.CancelScope(shield=True):
            left = _descendants(self._facts.pid)
            self._process.kill()
            await ended_within(self._process, END_WAIT_S)
            with anyio.move_on_after(END_WAIT_S):
                while any(start_time(pid) == started for pid, started in left.items()):  # noqa: ASYNC110
                    await anyio.sleep(0.005)  # they are not our children: nothing tells

    async def end_processes(self) -> None:
        if self._process.ended.is_set():
            raise self._gone("Ending the processes")
        with anyio.move_on_after(END_WAIT_S, shield=True):
            while left := _descendants(self._facts.pid):
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await anyio.sleep(0.005)  # they are not our children: nothing tells
            return
        raise self._gone("Ending the processes")

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._turn:
                if not self._stopped:
                    await self.crash()
                    self._backend.give_back(self._facts.slot)
                    self._stopped = True

    def _open_root(self) -> int:
        if self._process.ended.is_set():
            raise self._gone("Opening its files")
        return os.open(self._backend.files_root or self.directory / "root", os.O_PATH | os.O_CLOEXEC)

    def _gone(self, what: str) -> SandboxUnavailable:
        message = f"{what} of sandbox {self._facts.sandbox} failed: it has ended."
        return SandboxUnavailable(message, code="sandbox_gone")


class FakeBackend:
    """Makes sandboxes that are plain processes.

    Args:
        directory: where they live; short, for the sockets in it.
        guest: the guest's program.
        name: the backend that it stands for.
        files_root: what file operations see; a directory of the sandbox's own if left out. With `/` they
            see what commands see.
        slots: how many it makes at most.
    """

    def __init__(
        self,
        directory: Path,
        guest: Path,
        *,
        name: str = "container",
        files_root: Path | None = None,
        slots: int = 4096,
    ) -> None:
        self.name = name
        self.files_root = files_root
        self.instances: dict[str, FakeInstance] = {}
        """Every instance that was made or adopted, by sandbox."""
        self._directory = directory
        self._guest = guest
        self._slots = slots
        self._used: set[int] = set()
        self._found: set[int] = set()
        """Slots of an earlier backend that were neither adopted nor swept yet."""
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._found = {int(path.name) for path in self._directory.iterdir()}
        self._used = set(self._found)
        async with AsyncExitStack() as stack:
            self._watcher = Watcher()
            stack.callback(self._watcher.close)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._watcher.run)
            stack.callback(tasks.cancel_scope.cancel)
            self._running = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.__aexit__(None, None, None)

    async def create(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        for layer in image.layers:
            raise NotFound(f"There is no layer {layer}: the fake knows none.", code="layer_not_found")
        slot = next((number for number in range(self._slots) if number not in self._used), None)
        if slot is None:
            raise LimitExceeded(f"All {self._slots} slots are taken.", code="no_slot")
        self._used.add(slot)
        directory = self.directory_of(slot)
        try:
            (directory / "root").mkdir(parents=True)
            pid = self._start(directory)
            started = start_time(pid)
            if started is None:
                raise SandboxUnavailable("The guest ended at once.", code="start_failed")
            (directory / "pid").write_text(f"{pid} {started}")
            facts = InstanceFacts(sandbox=sandbox, slot=slot, pid=pid, pid_start=started)
            instance = FakeInstance(self, facts, self._watcher.watch(pid))
        except BaseException:
            self.give_back(slot)
            raise
        try:
            with instance.connect() as link:
                await prove(link, image.name, probe=image.config.probe, env=list(image.config.env.items()))
        except BaseException as exc:
            await instance.stop()
            if isinstance(exc, GuestSilent):
                raise SandboxUnavailable("The guest ended at once.", code="start_failed") from exc
            raise
        self.instances[sandbox] = instance
        return instance

    async def adopt(self, facts: InstanceFacts) -> Instance | None:
        if start_time(facts.pid) != facts.pid_start:
            return None
        instance = FakeInstance(self, facts, self._watcher.watch(facts.pid))
        self._found.discard(facts.slot)
        self.instances[facts.sandbox] = instance
        return instance

    async def sweep(self, keep: set[int]) -> list[str]:
        done: list[str] = []
        for slot in sorted(self._found - keep):
            with suppress(OSError, ValueError):
                pid, started = map(int, (self.directory_of(slot) / "pid").read_text().split())
                if start_time(pid) == started:
                    process = self._watcher.watch(pid)
                    process.kill()
                    await ended_within(process, END_WAIT_S)
            self.give_back(slot)
            done.append(f"removed slot {slot}")
        self._found &= keep
        return done

    def capacity(self) -> int:
        return self._slots

    def directory_of(self, slot: int) -> Path:
        """Where an instance keeps its socket and its files."""
        return self._directory / str(slot)

    def give_back(self, slot: int) -> None:
        """Nothing of a slot is wanted any more."""
        shutil.rmtree(self.directory_of(slot), ignore_errors=True)
        self._used.discard(slot)

    def _start(self, directory: Path) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(directory / "guest.sock"))
            listener.listen(8)
            listener.set_inheritable(True)
            with (directory / "log").open("wb") as log:
                # the guest outlives whoever started it, so nobody holds its Popen: the watcher reaps it
                return os.posix_spawn(
                    self._guest,
                    [str(self._guest), "--listen", str(listener.fileno())],
                    {"PATH": PATH},
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                        (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                        (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    ],
                    setsid=True,
                )


def _descendants(pid: int) -> dict[int, int]:
    """Every process below this one, with its start time."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(path.name))
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            started = start_time(child)
            if started is not None:
                found[child] = started
                waiting.append(child)
    return found
