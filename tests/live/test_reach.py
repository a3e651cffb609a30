"""From inside, nothing of ours can be reached, read, signalled, traced, filled or slowed.

What root inside may do to its own sandbox is its own affair, as long as the guest goes on to answer, and
answers the truth.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.images.depot import Depot
from cloudyard.testing.backend_contract import SPEC, guest_of, new_id, run
from cloudyard.wire.guest import Kind
from escapes.kit import python

pytestmark = pytest.mark.live

ANSWER_WITHIN_S = 2.0
OURS = """
def is_ours(pid):
    return pid.isdigit() and open(f"/proc/{pid}/comm").read().strip() in ("guest", "keeper")
our = list(filter(is_ours, os.listdir("/proc")))
"""


@pytest.fixture
async def box(node: ContainerOptions, depot: Path) -> AsyncIterator[Instance]:
    async with ContainerBackend(replace(node, pool_size=0), Depot(depot).layer_path) as backend:
        instance = await backend.create(new_id(), SPEC, Depot(depot).image("debian"))
        yield instance
        await instance.stop()


@asynccontextmanager
async def meanwhile(box: Instance, program: str) -> AsyncIterator[None]:
    """A program of root inside goes on; it has said that it is there."""
    async with guest_of(box) as guest:
        await guest.start("/usr/bin/python3", "-c", f"import os, signal, time\n{program}")
        while (await guest.frame()).kind != Kind.OUTPUT:
            pass
        yield


async def answers(box: Instance) -> None:
    """A command by its arguments runs, soon, and what is said of it is true."""
    begun = time.monotonic()
    with anyio.fail_after(10 * ANSWER_WITHIN_S):
        done = await run(box, "/usr/bin/env", "printf", "%s", "the truth")
    assert (done.stdout, done.exit_code) == ("the truth", 0), done
    assert time.monotonic() - begun < ANSWER_WITHIN_S


async def test_what_runs_of_ours_tells_nothing_and_takes_no_orders(box: Instance) -> None:
    outcome = await python(
        box,
        OURS
        + """
import resource
def tried(act):
    try:
        return act()
    except OSError as refusal:
        return errno.errorcode[refusal.errno]
for pid in our:
    files = ("mem", "environ", "maps", "auxv", "stack", "personality", "syscall")
    for name in files:
        got = tried(lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        assert got in ("EACCES", "EPERM"), (name, got)
    for name in ("exe", "cwd", "root", "fd/0", "ns/user"):
        got = tried(lambda: os.readlink(f"/proc/{pid}/{name}"))
        assert got == "EACCES", (name, got)
    number, room = int(pid), ctypes.create_string_buffer(8)
    here, there = struct.pack("QQ", ctypes.addressof(room), 8), struct.pack("QQ", 0x400000, 8)
    orders = {
        "ptrace": lambda: call(101, 0x4206, number, 0, 0),
        "take a descriptor": lambda: call(438, call(434, number, 0), 0, 0),
        "read its memory": lambda: call(310, number, here, 1, there, 1, 0),
        "write its memory": lambda: call(311, number, here, 1, there, 1, 0),
        "slow": lambda: os.setpriority(os.PRIO_PROCESS, number, 19),
        "pin": lambda: os.sched_setaffinity(number, {0}),
        "limit": lambda: resource.prlimit(number, resource.RLIMIT_NOFILE, (3, 3)),
        "move its pages": lambda: call(279, number, 0, 0, 0, 0, 0),
    }
    for name, order in orders.items():
        got = tried(order)
        assert got == "EPERM", (name, got)
print(len(our) >= 2)
""",
    )
    assert outcome == "True"


async def test_no_file_socket_or_setting_of_ours_is_there(box: Instance) -> None:
    words = "cloudyard|keeper|launch|bwrap|bubblewrap|/boxes|/guests"
    everything = "find / -path /proc -prune -o -print 2>/dev/null; cat /proc/self/mountinfo"
    assert (await run(box, f"({everything}) | grep -E '{words}'")).stdout == ""
    environment = {line.split("=")[0] for line in (await run(box, "/usr/bin/env")).stdout.splitlines()}
    assert environment == {"PATH", "HOME", "USER", "LOGNAME"}
    sockets = (await run(box, "cat /proc/net/unix")).stdout.splitlines()[1:]
    assert all(len(line.split()) == 7 for line in sockets), "a socket with a name"
    listening = "cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp | grep -v local_address"
    assert (await run(box, listening)).stdout == ""


async def test_a_command_has_its_three_descriptors_and_nothing_else(box: Instance) -> None:
    assert (await run(box, "ls /proc/self/fd")).stdout.split() == ["0", "1", "2", "3"]  # the last is ls's own
    assert (await run(box, "readlink /proc/self/fd/0")).stdout == "/dev/null\n"


@pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM", "SEGV", "CHLD", "HUP"])
async def test_signals_to_all_of_ours_change_nothing(box: Instance, signal: str) -> None:
    await run(box, f"for i in 1 2 3; do kill -{signal} -1 1; done; kill -{signal} $PPID 1")
    await answers(box)


async def test_a_keeper_that_is_stopped_again_and_again_holds_up_nobody_else(box: Instance) -> None:
    program = "print(1, flush=True)\nwhile True: os.kill(os.getppid(), signal.SIGSTOP)"
    async with meanwhile(box, program):
        for _ in range(5):
            await answers(box)


async def test_it_answers_while_the_processor_is_hogged(box: Instance) -> None:
    program = (
        "[os.fork() or exec('while True: pass') for _ in range(32)]\nprint(1, flush=True)\ntime.sleep(60)"
    )
    async with meanwhile(box, program):
        for _ in range(3):
            await answers(box)


async def test_it_answers_while_no_process_more_can_be_made(box: Instance) -> None:
    program = """
try:
    while True:
        os.fork() or time.sleep(60)
except OSError:
    print(1, flush=True)
time.sleep(60)
"""
    async with meanwhile(box, program):
        async with guest_of(box) as guest:
            await guest.start("/usr/bin/true")
            assert (await guest.frame()).kind in (Kind.STARTED, Kind.NOT_STARTED)
        await box.end_processes()
    await answers(box)


async def test_it_answers_while_memory_and_files_in_memory_are_full(box: Instance) -> None:
    program = """
with open("/dev/shm/full", "wb", 0) as file:
    try:
        while True:
            file.write(bytes(1 << 20))
    except OSError:
        print(1, flush=True)
held = []
while True:
    held.append(bytearray(b"x") * (1 << 20))
"""
    async with meanwhile(box, program):
        for _ in range(3):
            await answers(box)


async def test_orphans_by_the_thousand_are_reaped(box: Instance) -> None:
    program = (
        "for _ in range(2000):\n if not os.fork():\n  os.fork() and os._exit(0); os._exit(0)\n os.wait()"
    )
    assert (await run(box, "/usr/bin/python3", "-c", f"import os\n{program}")).exit_code == 0
    await answers(box)
    zombies = "print(sum('Z (zombie)' in open(one).read() for one in glob.glob('/proc/[0-9]*/status')))"
    left = await python(box, zombies)
    assert left == "0"


async def test_it_answers_with_a_world_torn_down_around_it(box: Instance) -> None:
    """A shell that was overwritten to hijack who comes later has no say in what is run by its arguments."""
    hijack = "cp /bin/false /bin/hijack; mv /bin/hijack /bin/sh"
    await run(box, f"rm -rf /dev/* /run/* /etc/* /tmp/* /home /root; {hijack}")
    assert (await run(box, "echo $((6 * 7))")).stdout == ""
    await answers(box)


async def test_reading_every_file_there_is_harms_nobody(box: Instance) -> None:
    """As `grep -r / ` did elsewhere, to the machine."""
    program = """
import itertools
end = time.monotonic() + 5
for folder, _, names in itertools.chain(os.walk("/proc"), os.walk("/sys"), os.walk("/dev")):
    for name in names:
        if time.monotonic() > end:
            break
        try:
            fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            continue
        try:
            os.read(fd, 4096)
        except OSError:
            pass
        os.close(fd)
print("read")
"""
    assert await python(box, program) == "read"
    await answers(box)
