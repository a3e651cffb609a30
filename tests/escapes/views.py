"""Attempts to see or reach what is the machine's: its processes, network, memory, names, devices."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from escapes.kit import Attempt, Scene

libc = ctypes.CDLL(None, use_errno=True)


def done(result: int) -> int:
    """The result of a C function that is -1 when it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@asynccontextmanager
async def process(scene: Scene) -> AsyncIterator[None]:
    """A process of the machine's."""
    with subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.DEVNULL) as sleeping:
        scene.words.append(str(sleeping.pid))
        try:
            yield
        finally:
            sleeping.kill()


@asynccontextmanager
async def loopback(scene: Scene) -> AsyncIterator[None]:
    """A service of the machine's on its loopback device, as the yard's NATS is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        scene.words.append(str(server.getsockname()[1]))
        yield


@asynccontextmanager
async def abstract_socket(scene: Scene) -> AsyncIterator[None]:
    """A socket of the machine's that lies in no directory."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{scene.token}")
        server.listen()
        scene.words.append(scene.token)
        yield


def key(scene: Scene) -> int:
    """A key of System V that belongs to this test."""
    return int(scene.token[-6:].encode().hex(), 16) & 0x7FFFFFFF


@asynccontextmanager
async def shared_memory(scene: Scene) -> AsyncIterator[None]:
    """Memory that processes of the machine's share."""
    segment = done(libc.shmget(key(scene), 4096, 0o1666))
    scene.words.append(str(key(scene)))
    try:
        yield
    finally:
        done(libc.shmctl(segment, 0, None))


@asynccontextmanager
async def messages(scene: Scene) -> AsyncIterator[None]:
    """Messages that processes of the machine's leave for each other."""
    queue = done(libc.msgget(key(scene), 0o1666))
    scene.words.append(str(key(scene)))
    try:
        yield
    finally:
        done(libc.msgctl(queue, 0, None))


@asynccontextmanager
async def named_queue(scene: Scene) -> AsyncIterator[None]:
    """The same, by the newer calls."""
    name = scene.token.encode()
    before = os.umask(0)
    queue = done(libc.syscall(240, name, os.O_CREAT | os.O_RDWR, 0o666, None))
    os.umask(before)
    scene.words.append(scene.token)
    try:
        yield
    finally:
        os.close(queue)
        done(libc.syscall(241, name))


@asynccontextmanager
async def names(scene: Scene) -> AsyncIterator[None]:
    """What the machine is called, and the yard on it."""
    scene.words += [os.uname().nodename, scene.options.tag]
    yield


@asynccontextmanager
async def device(scene: Scene) -> AsyncIterator[None]:
    """A device of the machine's that anybody may open; here it gives zeros."""
    node = Path("/dev") / scene.token
    os.mknod(node, 0o20666, os.makedev(1, 5))
    node.chmod(0o666)
    scene.words.append(str(node))
    try:
        yield
    finally:
        node.unlink()


@asynccontextmanager
async def node_in_the_image(scene: Scene) -> AsyncIterator[None]:
    """A device node among the files of the sandbox, as an image may bring it along."""
    node = Path(f"/proc/{scene.pid}/root/tmp/node")
    os.mknod(node, 0o20666, os.makedev(1, 5))
    node.chmod(0o666)
    yield


ATTEMPTS = [
    Attempt(
        name="read the command line of a process of the machine's",
        mechanism="processes",
        program='print(open(f"/proc/{sys.argv[1]}/cmdline").read().split("\\0")[0])',
        refused="ENOENT",
        succeeds="/bin/sleep",
        without="pid_namespace",
        arrange=process,
    ),
    Attempt(
        name="connect to a service on the machine's loopback device",
        mechanism="loopback",
        program='socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5); print("connected")',
        refused="ECONNREFUSED",
        succeeds="connected",
        without="network_namespace",
        arrange=loopback,
    ),
    Attempt(
        name="connect to an abstract socket of the machine's",
        mechanism="abstract sockets",
        program='socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[1]); print("connected")',
        refused="ECONNREFUSED",
        succeeds="connected",
        without="network_namespace",
        arrange=abstract_socket,
    ),
    Attempt(
        name="find memory that processes of the machine's share",
        mechanism="shared memory",
        program='call(30, call(29, int(sys.argv[1]), 0, 0), 0, 0); print("attached")',
        refused="ENOENT",
        succeeds="attached",
        without="ipc_namespace",
        arrange=shared_memory,
    ),
    Attempt(
        name="leave a message for processes of the machine's",
        mechanism="message queues",
        program="""
            message = struct.pack("<q", 1) + b"hello"
            call(69, call(68, int(sys.argv[1]), 0), message, 5, 0); print("left")
        """,
        refused="ENOENT",
        succeeds="left",
        without="ipc_namespace",
        arrange=messages,
    ),
    Attempt(
        name="open a queue of the machine's by its name",
        mechanism="message queues",
        program='call(240, sys.argv[1].encode(), os.O_RDWR, 0, 0); print("opened")',
        refused="ENOENT",
        succeeds="opened",
        without="ipc_namespace",
        arrange=named_queue,
    ),
    Attempt(
        name="learn what the machine is called",
        mechanism="names",
        program='print("its name" if os.uname().nodename == sys.argv[1] else "another")',
        refused="another",
        succeeds="its name",
        without="uts_namespace",
        arrange=names,
    ),
    Attempt(
        name="learn where the yard keeps its things",
        mechanism="names",
        program='print("the yard" if sys.argv[2] in open("/proc/self/cgroup").read() else "nothing")',
        refused="nothing",
        succeeds="the yard",
        without="cgroup_namespace",
        arrange=names,
    ),
    Attempt(
        name="read what the machine was started with",
        mechanism="masks of /proc",
        program='print("the boot line" if open("/proc/cmdline").read() else "nothing")',
        refused="nothing",
        succeeds="the boot line",
        without="proc_masks",
    ),
    Attempt(
        name="have the kernel watch the whole machine",
        mechanism="masks of /proc",
        program="""
            watch = os.open("/proc/pressure/cpu", os.O_RDWR)
            os.write(watch, b"some 500000 2000000\\0"); print("watched")
        """,
        refused="ENOENT",
        succeeds="watched",
        without="proc_masks",
    ),
    Attempt(
        name="have PID 1 killed first when memory runs out",
        mechanism="choice of the out-of-memory killer",
        program='open("/proc/1/oom_score_adj", "w").write("1000"); print("chosen")',
        refused="EROFS",
        succeeds="chosen",
        without="proc_masks",
    ),
    Attempt(
        name="open a device of the machine's",
        mechanism="devices",
        program='print(open(sys.argv[1], "rb").read(1))',
        refused="ENOENT",
        succeeds="b'\\x00'",
        without="own_devices",
        arrange=device,
    ),
    Attempt(
        name="open a device by a node that came with the image",
        mechanism="device nodes",
        program='print(open("/tmp/node", "rb").read(1))',
        refused="EACCES",
        succeeds="b'\\x00'",
        without="nodev",
        arrange=node_in_the_image,
    ),
]
