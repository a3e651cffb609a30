"""Attempts that need a right: a capability, the guest's uid, a uid of the machine's. The last of them meet
walls that stand one behind another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from cloudyard.edge.host import syscalls
from cloudyard.images.depot import Depot
from cloudyard.testing.backend_contract import SPEC, guest_of, new_id
from cloudyard.wire.guest import Kind
from escapes.kit import Attempt, Scene, shown

SEEN_WITHIN_S = 5.0
GONE_WITHIN_S = 1.0

CAPABILITIES = [
    Attempt(
        name="open a raw socket",
        mechanism="raw network",
        program='socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("a socket")',
        refused="EPERM",
        succeeds="a socket",
        without="capabilities",
    ),
    Attempt(
        name="read every packet",
        mechanism="raw network",
        program='socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0); print("a socket")',
        refused="EPERM",
        succeeds="a socket",
        without="capabilities",
    ),
    Attempt(
        name="take the network device down",
        mechanism="network devices",
        program='fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0)); print("down")',
        refused="EPERM",
        succeeds="down",
        without="capabilities",
    ),
    Attempt(
        name="change the host name",
        mechanism="host name",
        program='call(170, b"other", 5); print(os.uname().nodename)',
        refused="EPERM",
        succeeds="other",
        without="capabilities",
    ),
    Attempt(
        name="trace PID 1",
        mechanism="ptrace",
        program='call(101, 0x4206, 1, 0, 0); print("traced")',
        refused="EPERM",
        succeeds="traced",
        without="capabilities",
    ),
    Attempt(
        name="read the memory of PID 1",
        mechanism="files of PID 1",
        program='os.open("/proc/1/mem", os.O_RDWR); print("its memory")',
        refused="EACCES",
        succeeds="its memory",
        without="capabilities",
    ),
    Attempt(
        name="read what PID 1 was started with",
        mechanism="files of PID 1",
        program='print(len(open("/proc/1/environ").read()) > 0)',
        refused="EACCES",
        succeeds="True",
        without="capabilities",
    ),
    Attempt(
        name="see where a descriptor of PID 1 leads",
        mechanism="files of PID 1",
        program='print(os.readlink("/proc/1/fd/0"))',
        refused="EACCES",
        succeeds="/dev/null",
        without="capabilities",
    ),
    Attempt(
        name="take the socket from PID 1 on which it hears the edge",
        mechanism="descriptors of others",
        program="""
            it, taken = call(434, 1, 0), []
            for number in range(3, 32):
                try:
                    fd = call(438, it, number, 0)
                    one = socket.socket(fileno=fd)
                    taken.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                except OSError as refusal:
                    if refusal.errno == errno.EPERM:
                        raise
            print("its listener" if any(taken) else taken)
        """,
        refused="EPERM",
        succeeds="its listener",
        without="capabilities",
    ),
    Attempt(
        name="give a program capabilities for whoever runs it",
        mechanism="file capabilities",
        program="""
            open("/tmp/program", "w")
            os.setxattr("/tmp/program", "security.capability", struct.pack("<5I", 0x02000000, 1, 0, 0, 0))
            print("given")
        """,
        refused="EPERM",
        succeeds="given",
        without="capabilities",
    ),
]

SLOWER = {
    "give PID 1 less of the processor": 'os.setpriority(os.PRIO_PROCESS, 1, 19); print("slower")',
    "pin PID 1 to one processor": 'os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}); print("slower")',
    "have PID 1 run only when nobody else does": "none = os.sched_param(0); "
    'os.sched_setscheduler(1, os.SCHED_IDLE, none); print("slower")',
    "leave PID 1 no room for descriptors": "import resource; "
    'resource.prlimit(1, resource.RLIMIT_NOFILE, (8, 8)); print("slower")',
    "have PID 1 wait for every other on the disk": 'call(251, 1, 1, 3 << 13); print("slower")',
}
BECOME_GUEST = "libc.prctl(8, 1, 0, 0, 0); call(119, 65533, 65533, 65533); call(117, 65533, 65533, 65533)\n"
GUEST_UID = [
    Attempt(
        name=name,
        mechanism="scheduling and limits of PID 1",
        program=program,
        refused="EPERM",
        succeeds="slower",
        without="guest_uid",
    )
    for name, program in SLOWER.items()
] + [
    Attempt(
        name=f"become the guest's uid and {name}",
        mechanism="the guest's uid",
        program=BECOME_GUEST + program,
        refused="EPERM",
        succeeds="slower",
        without="GUEST_SHARES_UID",
    )
    for name, program in SLOWER.items()
]


@asynccontextmanager
async def own_cgroup(scene: Scene) -> AsyncIterator[None]:
    """The sandbox's cgroup can be seen in it, as if somebody had mounted it there."""
    lines = [line.split(":") for line in Path(f"/proc/{scene.pid}/cgroup").read_text().split()]
    paths = {controllers: path for _, controllers, path in lines}
    if "memory" in paths:
        folder, limit = Path(f"/sys/fs/cgroup/memory{paths['memory']}"), "memory.limit_in_bytes"
    else:
        folder, limit = Path(f"/sys/fs/cgroup{paths['']}"), "memory.max"
    scene.words.append(limit)
    with shown(scene, folder):
        yield


@asynccontextmanager
async def guests_sockets(scene: Scene) -> AsyncIterator[None]:
    """The sockets of guests can be seen in it."""
    scene.words.append(f"{scene.instance.facts.slot}.sock")
    with shown(scene, scene.options.guests):
        yield


@asynccontextmanager
async def neighbour_with_pipes(scene: Scene) -> AsyncIterator[None]:
    """Another sandbox fills as many pipes as one user of the machine may."""
    other = await scene.backend.create(new_id(), SPEC, Depot(scene.depot).image("debian"))
    program = "import fcntl, os, time; held = [os.pipe() for _ in range(80)]\n"
    program += "try: [fcntl.fcntl(end, 1031, 1 << 20) for end, _ in held]\n"
    program += "except OSError: pass\n"
    program += "print('full', flush=True); time.sleep(60)"
    try:
        async with guest_of(other) as guest:
            await guest.start("/usr/bin/python3", "-c", program)
            while (await guest.frame()).kind != Kind.OUTPUT:
                pass
            yield
    finally:
        await other.stop()


@asynccontextmanager
async def hierarchy_of_the_machine(scene: Scene) -> AsyncIterator[None]:
    """A hierarchy of cgroups, of this test's own, can be seen in it, and a program lies on the host."""
    folder, agent = scene.host / "hierarchy", scene.host / "agent"
    folder.mkdir()
    agent.write_text(f"#!/bin/sh\necho ran > {scene.host}/ran\n")
    agent.chmod(0o755)
    syscalls.mount("cgroup", str(folder), "cgroup", options=f"none,name={scene.token}")
    try:
        scene.words.append(str(agent))
        with shown(scene, folder):
            yield
        for left in folder.glob("*/"):
            left.rmdir()
    finally:
        syscalls.unmount(str(folder))
        # It goes with its last mount; but if a cgroup of it was still about to go, only with the next one.
        while not await _gone_soon(scene.token):
            syscalls.mount("cgroup", str(folder), "cgroup", options=f"none,name={scene.token}")
            syscalls.unmount(str(folder))


async def _gone_soon(hierarchy: str) -> bool:
    with anyio.move_on_after(GONE_WITHIN_S):
        while hierarchy in Path("/proc/self/cgroup").read_text():
            await anyio.sleep(0.02)
        return True
    return False


async def agent_ran(scene: Scene) -> str:
    with anyio.move_on_after(SEEN_WITHIN_S):
        while not (scene.host / "ran").exists():
            await anyio.sleep(0.02)
        return "it ran on the machine"
    return "it never ran"


async def owner_on_the_disk(scene: Scene) -> str:
    facts = Path(f"/proc/{scene.pid}/root/tmp/program").stat()
    return (
        "set-uid and of the machine's root" if facts.st_uid == 0 and facts.st_mode & 0o4000 else "of nobody"
    )


UID_RANGE = [
    Attempt(
        name="name the program that gets the core dumps of the machine",
        mechanism="settings of the kernel",
        program="""
            now = open("/proc/sys/kernel/core_pattern").read()
            open("/proc/sys/kernel/core_pattern", "w").write(now); print("named")
        """,
        refused="EACCES",
        succeeds="named",
        without="uid_range",
    ),
    Attempt(
        name="read whom each page of the machine's memory is charged to",
        mechanism="files of the kernel",
        program='print(len(open("/proc/kpagecgroup", "rb", 0).read(8)))',
        refused="EACCES",
        succeeds="8",
        without="uid_range",
    ),
    Attempt(
        name="leave a set-uid program for an accomplice on the machine",
        mechanism="set-uid programs",
        program='open("/tmp/program", "w"); os.chmod("/tmp/program", 0o4755); print("left")',
        refused="of nobody",
        succeeds="set-uid and of the machine's root",
        without="uid_range",
        evidence=owner_on_the_disk,
    ),
    Attempt(
        name="use up what one user of the machine may have, for the neighbours too",
        mechanism="limits by user",
        program="""
            end, _ = os.pipe()
            try:
                print(fcntl.fcntl(end, 1031, 1 << 20))
            except PermissionError:
                print("nothing left for the neighbour")
        """,
        refused=str(1 << 20),
        succeeds="nothing left for the neighbour",
        without="uid_range",
        arrange=neighbour_with_pipes,
    ),
    Attempt(
        name="lift one's own limit of memory",
        mechanism="cgroup files",
        program='open(f"/mnt/{sys.argv[1]}", "w").write(str(1 << 40)); print("lifted")',
        refused="EACCES",
        succeeds="lifted",
        without="uid_range",
        arrange=own_cgroup,
    ),
    Attempt(
        name="speak to a guest in the place of the edge",
        mechanism="the guest's socket",
        program='socket.socket(socket.AF_UNIX).connect(f"/mnt/{sys.argv[1]}"); print("connected")',
        refused="EACCES",
        succeeds="connected",
        without="uid_range",
        arrange=guests_sockets,
    ),
]

UNMASK = 'call(166, b"/proc/cmdline", 2); print("the boot line" if open("/proc/cmdline").read() else "")'
MOUNT = 'call(165, b"none", b"/mnt", b"tmpfs", 0, 0); print("mounted")'
RING = 'call(103, 10, 0, 0); print("the kernel\'s words")'
CLOCK = """
    now = struct.pack("<I", 0x4000) + bytes(84) + struct.pack("<q", 10_000) + bytes(112)
    call(305, 0, now); print("the machine's clock")
"""
RELEASE = """
    open("/mnt/release_agent", "w").write(sys.argv[1])
    os.mkdir("/mnt/group"); open("/mnt/group/notify_on_release", "w").write("1")
    child = os.fork() or os.execv("/bin/sh", ["sh", "-c", "echo $$ > /mnt/group/cgroup.procs"])
    os.waitpid(child, 0); print("named")
"""
# Where walls stand one behind another, each alone holds: one is up, and the others are away both times.
BEHIND = [
    Attempt(
        name="take the mask off the machine's boot line, past every capability",
        mechanism="masks of /proc",
        program=UNMASK,
        refused="EPERM",
        succeeds="the boot line",
        without="seccomp",
        behind=("capabilities",),
    ),
    Attempt(
        name="take the mask off the machine's boot line, past the filter",
        mechanism="masks of /proc",
        program=UNMASK,
        refused="EPERM",
        succeeds="the boot line",
        without="capabilities",
        behind=("seccomp",),
    ),
    Attempt(
        name="mount over what is there, past every capability",
        mechanism="mounts",
        program=MOUNT,
        refused="EPERM",
        succeeds="mounted",
        without="seccomp",
        behind=("capabilities",),
    ),
    Attempt(
        name="mount over what is there, past the filter",
        mechanism="mounts",
        program=MOUNT,
        refused="EPERM",
        succeeds="mounted",
        without="capabilities",
        behind=("seccomp",),
    ),
    Attempt(
        name="read the kernel's ring of words, past the filter",
        mechanism="kernel rings",
        program=RING,
        refused="EPERM",
        succeeds="the kernel's words",
        without="user_namespace",
        behind=("seccomp", "capabilities"),
    ),
    Attempt(
        name="read the kernel's ring of words, past every right",
        mechanism="kernel rings",
        program=RING,
        refused="EPERM",
        succeeds="the kernel's words",
        without="seccomp",
        behind=("user_namespace", "capabilities"),
    ),
    Attempt(
        name="set the clock of the machine, past the filter",
        mechanism="clocks",
        program=CLOCK,
        refused="EPERM",
        succeeds="the machine's clock",
        without="user_namespace",
        behind=("seccomp", "capabilities"),
    ),
    Attempt(
        name="set the clock of the machine, past every right",
        mechanism="clocks",
        program=CLOCK,
        refused="EPERM",
        succeeds="the machine's clock",
        without="seccomp",
        behind=("user_namespace", "capabilities"),
    ),
    Attempt(
        name="make a node of the machine's disk, with every capability",
        mechanism="device nodes",
        program='os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)); print("a disk")',
        refused="EPERM",
        succeeds="a disk",
        without="user_namespace",
        behind=("capabilities",),
    ),
    Attempt(
        name="make a node of the machine's disk, as root of the machine",
        mechanism="device nodes",
        program='os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)); print("a disk")',
        refused="EPERM",
        succeeds="a disk",
        without="capabilities",
        behind=("user_namespace",),
    ),
    Attempt(
        name="write a mark of overlayfs's own, with every capability",
        mechanism="overlay",
        program='os.setxattr("/tmp", "trusted.overlay.opaque", b"y"); print("marked")',
        refused="EPERM",
        succeeds="marked",
        without="user_namespace",
        behind=("capabilities",),
        since=(6, 7),
    ),
    Attempt(
        name="run before everybody else on the machine, with every capability",
        mechanism="priorities",
        program='os.setpriority(os.PRIO_PROCESS, 0, -10); print("first")',
        refused="EACCES",
        succeeds="first",
        without="user_namespace",
        behind=("capabilities",),
    ),
    Attempt(
        name="have the machine run a program when a cgroup is empty, with every capability",
        mechanism="cgroup release agents",
        program=RELEASE,
        refused="EACCES",
        succeeds="it ran on the machine",
        without="user_namespace",
        behind=("capabilities",),
        arrange=hierarchy_of_the_machine,
        evidence=agent_ran,
    ),
    Attempt(
        name="become the guest's uid and trace PID 1",
        mechanism="ptrace",
        program=BECOME_GUEST + 'call(101, 0x4206, 1, 0, 0); print("traced")',
        refused="EPERM",
        succeeds="traced",
        without="GUEST_DUMPABLE",
        behind=("GUEST_SHARES_UID",),
    ),
]

DESCRIPTORS = [
    Attempt(
        name="hear the edge on a socket that was inherited",
        mechanism="inherited descriptors",
        program="""
            for number in range(3, 64):
                try:
                    one = socket.socket(fileno=number)
                except OSError:
                    continue
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    print("the guest's listener")
                    sys.exit()
            raise OSError(errno.EBADF, "none")
        """,
        refused="EBADF",
        succeeds="the guest's listener",
        without="GUEST_KEEPS_DESCRIPTORS",
    ),
]

ATTEMPTS = [*CAPABILITIES, *GUEST_UID, *UID_RANGE, *BEHIND, *DESCRIPTORS]
