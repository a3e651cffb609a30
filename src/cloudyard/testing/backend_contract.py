"""What every backend promises, as tests. A backend's own test file subclasses a suite and says how to make
the backend.

`BackendContract` is the life of an instance, which the fake keeps too. `SandboxContract` adds what only a
real sandbox
can keep: isolation and limits. Tests talk to the guest with the frames of `wire/guest.py` and know no
backend.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from anyio import wait_readable, wait_writable

from cloudyard.edge.backends.base import Backend, Freezable, Instance, InstanceFacts
from cloudyard.errors import CloudyardError, SandboxUnavailable
from cloudyard.model import MIB, Image, SandboxId, SandboxSpec
from cloudyard.wire.guest import PROTOCOL_VERSION, STDERR, STDOUT, Decoder, Frame, Kind, Tag, encode

WAIT_S = 20.0  # bound of one wait
MEMORY_BYTES = 256 * MIB
SPEC = SandboxSpec(image="debian", cpu=1.0, memory=MEMORY_BYTES, pids=64)
PATH = b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CANCELLED_CREATES = 50
CYCLES = 100

# What may be seen of the host's tree in a sandbox's mounts: the roots of mounts that it has for itself, and
# devices.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "console")
MASKS = ("nothing", "nowhere")  # what hides others
MOUNT_ROOTS = {"/", *(f"/{name}" for name in (*DEVICES, *MASKS))}

MakeBackend = Callable[[], AbstractAsyncContextManager[Backend]]


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str


class Guest:
    """A connection to an instance's guest that runs one command at a time."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._decoder = Decoder()
        self._frames: list[Frame] = []
        self._commands = secrets.randbits(40) << 20  # an instance may be asked over several connections

    async def run(self, *argv: str) -> Ran:
        """Run a program to its end, or one string through /bin/sh."""
        command = await self.start(*argv)
        output = {STDOUT: b"", STDERR: b""}
        while True:
            frame = await self.frame()
            if frame.kind == Kind.OUTPUT:
                stream, data = frame.number(Tag.STREAM), frame.data(Tag.DATA)
                output[stream] += data
                acked = frame.number(Tag.OFFSET) + len(data)
                await self.send(Kind.OUTPUT_ACK, command, (Tag.STREAM, stream), (Tag.OFFSET, acked))
            elif frame.kind in (Kind.EXITED, Kind.NOT_STARTED):
                await self.send(Kind.FORGET, command)
                out, err = (output[stream].decode(errors="replace") for stream in (STDOUT, STDERR))
                return Ran(frame.maybe_number(Tag.EXIT_CODE), frame.maybe_number(Tag.SIGNAL), out, err)

    async def start(self, *argv: str) -> int:
        """Start it and give its command number."""
        self._commands += 1
        program: list[tuple[Tag, bytes | int]] = [(Tag.ARG, part.encode()) for part in argv]
        if len(argv) == 1 and " " in argv[0]:
            program = [(Tag.SHELL, argv[0].encode())]
        await self.send(Kind.EXEC, self._commands, *program, (Tag.ENV, PATH), (Tag.CWD, b"/"))
        return self._commands

    async def frame(self) -> Frame:
        """The next frame."""
        with anyio.fail_after(WAIT_S):
            while not self._frames:
                await wait_readable(self._link)
                data = self._link.recv(65_536)
                if not data:
                    raise ConnectionResetError("the guest closed the connection")
                self._frames.extend(self._decoder.feed(data))
        return self._frames.pop(0)

    async def send(self, kind: Kind, command: int = 0, *fields: tuple[Tag, bytes | int]) -> None:
        """Send one frame."""
        data = encode(kind, command, *fields)
        while data:
            await wait_writable(self._link)
            data = data[self._link.send(data) :]


@asynccontextmanager
async def guest_of(instance: Instance) -> AsyncIterator[Guest]:
    """A connection to the guest, past its hello."""
    with instance.connect() as link:
        guest = Guest(link)
        await guest.send(Kind.HELLO, 0, (Tag.VERSION_MIN, 1), (Tag.VERSION_MAX, PROTOCOL_VERSION))
        assert (await guest.frame()).kind == Kind.WELCOME
        yield guest


async def run(instance: Instance, *argv: str) -> Ran:
    """Run a program in an instance: one string goes through /bin/sh."""
    async with guest_of(instance) as guest:
        return await guest.run(*argv)


def new_id() -> SandboxId:
    """An id that no other sandbox has."""
    return SandboxId(f"sb-t-{secrets.token_hex(6)}")


async def gone(instance: Instance) -> None:
    """Return when the instance has ended."""
    with anyio.fail_after(WAIT_S):
        await instance.wait_gone()


class BackendContract:
    """The life of an instance. Subclasses override `make_backend` and `image`."""

    spec = SPEC

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Makes a backend of one and the same yard, each time it is called; two are never open at once."""
        raise NotImplementedError("override make_backend")

    @pytest.fixture
    def image(self) -> Image:
        """An image with /bin/sh and coreutils."""
        raise NotImplementedError("override image")

    @pytest.fixture
    async def backend(self, make_backend: MakeBackend) -> AsyncIterator[Backend]:
        """A backend that has swept."""
        async with make_backend() as backend:
            await backend.sweep(set())
            yield backend

    @pytest.fixture
    async def instance(self, backend: Backend, image: Image) -> AsyncIterator[Instance]:
        """One live instance."""
        instance = await backend.create(new_id(), self.spec, image)
        yield instance
        await instance.stop()

    async def test_a_command_runs_as_soon_as_create_has_returned(self, instance: Instance) -> None:
        assert (await run(instance, "/bin/true")).exit_code == 0
        assert (await run(instance, "echo out; echo err >&2; exit 3")) == Ran(3, None, "out\n", "err\n")

    async def test_facts_name_the_sandbox_and_its_first_process(self, backend: Backend, image: Image) -> None:
        name = new_id()
        instance = await backend.create(name, self.spec, image)
        facts = instance.facts
        await instance.stop()
        assert facts.sandbox == name
        assert facts.pid > 0
        assert facts.pid_start > 0

    async def test_a_stopped_instance_is_gone_and_stopping_again_is_no_error(
        self, instance: Instance
    ) -> None:
        await instance.stop()
        await gone(instance)
        await instance.stop()
        with pytest.raises(SandboxUnavailable):
            instance.connect()
        with pytest.raises(SandboxUnavailable):
            instance.usage()

    async def test_every_process_but_the_first_can_be_ended(self, instance: Instance) -> None:
        async with guest_of(instance) as guest:
            hidden = "trap '' TERM HUP; setsid sh -c 'sleep 1000 & sleep 1000' & sleep 1000"
            await guest.start("/bin/sh", "-c", f"({hidden}) & echo; sleep 1000")
            while (frame := await guest.frame()).kind != Kind.OUTPUT:
                pass
            await instance.end_processes()
            while (frame := await guest.frame()).kind != Kind.EXITED:
                pass
            assert frame.number(Tag.SIGNAL) == signal.SIGKILL
        assert (await run(instance, "/bin/true")).exit_code == 0
        await instance.end_processes()

    async def test_processes_of_a_stopped_instance_cannot_be_ended(self, instance: Instance) -> None:
        await instance.stop()
        with pytest.raises(SandboxUnavailable):
            await instance.end_processes()

    async def test_stops_at_the_same_time_all_return_when_it_is_stopped(self, instance: Instance) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(instance.stop)
        with pytest.raises(SandboxUnavailable):
            instance.connect()

    async def test_instances_live_at_once_in_slots_of_their_own(self, backend: Backend, image: Image) -> None:
        instances = [await backend.create(new_id(), self.spec, image) for _ in range(3)]
        assert len({instance.facts.slot for instance in instances}) == 3
        await run(instances[0], "echo mine > /tmp/note")
        assert (await run(instances[1], "cat /tmp/note")).exit_code == 1
        await instances[0].stop()
        assert (await run(instances[1], "/bin/true")).exit_code == 0
        for instance in instances:
            await instance.stop()

    async def test_an_instance_outlives_its_backend_and_is_adopted_by_the_next(
        self, make_backend: MakeBackend, image: Image
    ) -> None:
        async with make_backend() as first:
            facts = (await first.create(new_id(), self.spec, image)).facts
        async with make_backend() as second:
            instance = await second.adopt(facts)
            assert instance is not None
            assert instance.facts == facts
            assert (await run(instance, "/bin/true")).exit_code == 0
            other = await second.create(new_id(), self.spec, image)
            assert other.facts.slot != facts.slot
            await other.stop()
            await instance.stop()
            await gone(instance)
            assert await second.adopt(facts) is None

    async def test_another_process_with_the_same_number_is_not_adopted(
        self, instance: Instance, backend: Backend
    ) -> None:
        facts = instance.facts
        elsewhen = InstanceFacts(
            sandbox=facts.sandbox, slot=facts.slot, pid=facts.pid, pid_start=facts.pid_start + 1
        )
        assert await backend.adopt(elsewhen) is None
        assert (await run(instance, "/bin/true")).exit_code == 0

    async def test_sweep_removes_what_is_not_kept_and_nothing_else(
        self, make_backend: MakeBackend, image: Image
    ) -> None:
        async with make_backend() as first:
            kept = (await first.create(new_id(), self.spec, image)).facts
            left = (await first.create(new_id(), self.spec, image)).facts
        async with make_backend() as second:
            said = await second.sweep({kept.slot})
            assert any(str(left.slot) in sentence for sentence in said)
            assert await second.adopt(left) is None
            instance = await second.adopt(kept)
            assert instance is not None
            assert (await run(instance, "/bin/true")).exit_code == 0
            await instance.stop()
            assert await second.sweep(set()) == []

    async def test_sweep_leaves_this_backends_own_instances_alone(
        self, instance: Instance, backend: Backend
    ) -> None:
        await backend.sweep(set())
        assert (await run(instance, "/bin/true")).exit_code == 0

    async def test_a_create_that_is_cancelled_leaves_no_instance(
        self, backend: Backend, image: Image
    ) -> None:
        dice = random.Random(7)
        for _ in range(CANCELLED_CREATES):
            instance = None
            with anyio.move_on_after(dice.uniform(0, 0.02)):
                instance = await backend.create(new_id(), self.spec, image)
            if instance is not None:
                await instance.stop()
        await self.check_empty(backend)

    async def test_a_missing_layer_is_named_and_nothing_is_left(self, backend: Backend, image: Image) -> None:
        absent = Image(name=image.name, layers=["0" * 64])
        with pytest.raises(CloudyardError, match="layer"):
            await backend.create(new_id(), self.spec, absent)
        await self.check_empty(backend)

    async def test_many_cycles_of_create_and_stop_leave_nothing(self, backend: Backend, image: Image) -> None:
        async def cycle() -> None:
            for _ in range(CYCLES // 4):
                instance = await backend.create(new_id(), self.spec, image)
                assert (await run(instance, "/bin/true")).exit_code == 0
                await instance.stop()

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(cycle)
        await self.check_empty(backend)

    async def test_capacity_is_a_number_to_plan_with(self, backend: Backend) -> None:
        assert backend.capacity() > 0

    async def check_empty(self, backend: Backend) -> None:
        """Fail if the backend holds anything of an instance. Backends with things on the host check those."""


class SandboxContract(BackendContract):
    """Isolation and limits, which only a real sandbox keeps."""

    async def test_its_host_name_is_the_one_asked_for(self, backend: Backend, image: Image) -> None:
        spec = SandboxSpec(image="debian", hostname="workshop", memory=MEMORY_BYTES)
        instance = await backend.create(new_id(), spec, image)
        assert (await run(instance, "cat /proc/sys/kernel/hostname")).stdout == "workshop\n"
        await instance.stop()

    async def test_its_root_is_nobody_on_the_host(self, instance: Instance) -> None:
        uid, *maps = (await run(instance, "id -u; cat /proc/self/uid_map /proc/self/gid_map")).stdout.split()
        assert uid == "0"
        assert maps[:3] == maps[3:]
        first, base, count = (int(number) for number in maps[:3])
        assert (first, count) == (0, 65_536)
        assert base >= 0x7000_0000

    async def test_it_has_no_network_but_its_own_loopback(self, instance: Instance) -> None:
        devices = (await run(instance, "tail -n +3 /proc/net/dev")).stdout.split("\n")
        assert [line.split(":")[0].strip() for line in devices if line] == ["lo"]
        talk = (
            "import socket; s = socket.create_server(('127.0.0.1', 0)); "
            "socket.create_connection(s.getsockname()).send(b'hello'); print(s.accept()[0].recv(5).decode())"
        )
        assert (await run(instance, "python3", "-c", talk)).stdout == "hello\n"

    async def test_its_programs_may_listen_on_any_port_and_ping(self, instance: Instance) -> None:
        listen = "import socket; socket.create_server(('127.0.0.1', 80))"
        assert await run(instance, "python3", "-c", listen) == Ran(0, None, "", "")
        ping = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)"
        assert await run(instance, "python3", "-c", ping) == Ran(0, None, "", "")

    async def test_it_sees_its_own_processes_only(self, instance: Instance) -> None:
        async with guest_of(instance) as guest:
            await guest.start("/bin/sleep", "60")
            assert (await guest.frame()).kind == Kind.STARTED
            seen = (await guest.run("for p in /proc/[0-9]*; do cat $p/comm; done")).stdout.split()
        assert "sleep" in seen
        assert "systemd" not in seen
        assert len(seen) < 12

    async def test_no_path_of_the_host_shows_in_its_mounts(self, instance: Instance) -> None:
        mounts = (await run(instance, "cat /proc/self/mountinfo")).stdout
        assert {line.split()[3] for line in mounts.splitlines()} <= MOUNT_ROOTS
        for word in ("/boxes", "/layers", ".erofs", "/state", "/var/"):
            assert word not in mounts

    async def test_it_writes_to_a_root_of_its_own_and_to_shared_memory(self, instance: Instance) -> None:
        change = "echo a > /etc/new; rm /etc/passwd; rm -r /root; mkdir /root; echo b > /dev/shm/x"
        seen = await run(instance, f"{change}; ls -d /root; cat /etc/new; test ! -e /etc/passwd")
        assert seen == Ran(0, None, "/root\na\n", "")

    async def test_it_cannot_signal_or_trace_its_guest(self, instance: Instance) -> None:
        assert (await run(instance, "kill -9 1; kill -STOP 1; cat /proc/1/environ")).exit_code != 0
        assert (await run(instance, "/bin/true")).exit_code == 0

    async def test_no_descriptor_of_ours_is_in_a_command(self, instance: Instance) -> None:
        links = (
            await run(instance, "for f in 0 1 2 3 4 5 6 7 8 9; do readlink /proc/self/fd/$f; done")
        ).stdout
        assert [line for line in links.split() if not line.startswith(("pipe:", "/dev/null", "/proc/"))] == []

    async def test_memory_over_the_limit_is_killed_and_counted(self, instance: Instance) -> None:
        hog = await run(instance, "python3", "-c", f"x = bytearray({MEMORY_BYTES * 2}); print(len(x))")
        assert hog.signal == signal.SIGKILL
        usage = instance.usage()
        assert usage.oom_kills == 1
        assert usage.memory_peak_bytes <= MEMORY_BYTES
        assert (await run(instance, "/bin/true")).exit_code == 0

    async def test_processes_over_the_limit_are_refused_and_counted(self, instance: Instance) -> None:
        fork = "i=0; while [ $i -lt 200 ]; do sleep 30 & i=$((i+1)); done"
        assert (await run(instance, f"({fork}) 2>/dev/null; true")).exit_code is not None
        usage = instance.usage()
        assert usage.pids_refused > 0
        assert usage.pids <= self.spec.pids + 8

    async def test_a_fork_bomb_is_ended_with_all_it_made(self, instance: Instance) -> None:
        async with guest_of(instance) as guest:
            bomb = 'f() { f & f & }; f; setsid sh -c "$0" & :'
            await guest.start("/bin/sh", "-c", bomb, bomb)
            with anyio.fail_after(WAIT_S):
                while instance.usage().pids_refused == 0:  # noqa: ASYNC110 (nothing else tells)
                    await anyio.sleep(0.005)
        await instance.end_processes()
        with anyio.fail_after(WAIT_S):
            while instance.usage().pids > 1:  # noqa: ASYNC110 (they have ended; PID 1 may still collect them)
                await anyio.sleep(0.005)
        assert (await run(instance, "/bin/true")).exit_code == 0

    async def test_a_busy_loop_gets_no_more_than_its_share_of_a_core(
        self, backend: Backend, image: Image
    ) -> None:
        spec = SandboxSpec(image="debian", cpu=0.2, memory=MEMORY_BYTES)
        instance = await backend.create(new_id(), spec, image)
        before = instance.usage().cpu_s
        await run(instance, "timeout 1 sh -c 'while :; do :; done'; true")
        used = instance.usage().cpu_s - before
        await instance.stop()
        assert 0.05 < used < 0.5

    async def test_the_end_of_its_first_process_is_seen(self, instance: Instance) -> None:
        os.kill(instance.facts.pid, signal.SIGKILL)
        await gone(instance)
        with pytest.raises(SandboxUnavailable):
            instance.connect()
        await instance.stop()

    async def test_a_frozen_instance_stops(self, instance: Instance) -> None:
        assert isinstance(instance, Freezable)
        await instance.freeze()
        with anyio.fail_after(WAIT_S):
            await instance.stop()
        await gone(instance)

    async def test_nothing_runs_in_a_frozen_instance_until_it_is_thawed(self, instance: Instance) -> None:
        assert isinstance(instance, Freezable)
        async with guest_of(instance) as guest:
            await guest.start("while :; do echo tick; sleep 0.01; done")
            await guest.frame()
            await instance.freeze()
            with anyio.move_on_after(0.3) as scope:
                while True:
                    await guest.frame()
            assert scope.cancelled_caught
            await instance.thaw()
            assert (await guest.frame()).kind == Kind.OUTPUT
