"""Attempts through system calls, that the two filters stop and nothing else does."""

from __future__ import annotations

from msgspec.structs import replace

from cloudyard.testing.backend_contract import SPEC
from escapes.kit import Attempt

NAMESPACES_INSIDE = replace(SPEC, user_namespaces=True)

# A namespace of users inside, as root of it, with another of mounts where the name says so.
NEST = """
def nest(flags):
    uid = os.getuid()
    call(272, 0x10000000 | flags)
    open("/proc/self/setgroups", "w").write("deny")
    for kind in ("uid", "gid"):
        open(f"/proc/self/{kind}_map", "w").write(f"0 {uid} 1")
MOUNTS = 0x20000
"""

# Runs bytes of machine code that take the stack's place of a function without arguments.
MACHINE_CODE = """
page = mmap.mmap(-1, 4096, prot=7)
def machine(code):
    page[: len(code)] = code
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(start)()
def call_32(number):
    "A call of 32-bit programs, with arguments of zero."
    # push rbx; mov eax, number; xor of ebx, ecx, edx and esi; int 0x80; pop rbx; ret
    code = "53 b8" + struct.pack("<I", number).hex() + "31db 31c9 31d2 31f6 cd80 5b c3"
    done = machine(bytes.fromhex(code))
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return done
"""

ATTEMPTS = [
    Attempt(
        name="put a key into a keyring, which is the machine's and outlives the sandbox",
        mechanism="keyrings",
        program='call(248, b"user", b"name", b"secret", 6, -4); print("a key")',
        refused="EPERM",
        succeeds="a key",
        without="seccomp",
    ),
    Attempt(
        name="put a key there by the call of 32-bit programs",
        mechanism="32-bit calls",
        program=MACHINE_CODE + "print(call_32(288))",  # keyctl(0): the thread's keyring
        refused="EPERM",
        succeeds="EINVAL",  # the kernel looked at what there is no keyring of
        without="seccomp",
    ),
    Attempt(
        name="set up an io_uring",
        mechanism="io_uring",
        program='call(425, 4, bytes(120)); print("a ring")',
        refused="ENOSYS",
        succeeds="a ring",
        without="seccomp",
    ),
    Attempt(
        name="hold the kernel at a page fault",
        mechanism="userfaultfd",
        program='call(323, 1); print("a handler")',
        refused="EPERM",
        succeeds="a handler",
        without="seccomp",
    ),
    Attempt(
        name="watch a whole file system",
        mechanism="fanotify",
        program='call(300, 0x200, 0); print("a watch")',
        refused="EPERM",
        succeeds="a watch",
        without="seccomp",
    ),
    Attempt(
        name="speak to the hypervisor",
        mechanism="socket families",
        program='socket.socket(40, socket.SOCK_STREAM); print("a socket")',
        refused="EAFNOSUPPORT",
        succeeds="a socket",
        without="seccomp",
    ),
    Attempt(
        name="speak to the packet filter",
        mechanism="netlink protocols",
        program='socket.socket(16, socket.SOCK_RAW, 12); print("a socket")',
        refused="EPROTONOSUPPORT",
        succeeds="a socket",
        without="seccomp",
    ),
    Attempt(
        name="type into a terminal",
        mechanism="terminals",
        program="""
            ours, theirs = os.openpty()
            fcntl.ioctl(theirs, 0x540E, 0)
            fcntl.ioctl(theirs, 0x5412, b"x"); print("typed")
        """,
        refused="EPERM",
        succeeds="typed",
        without="seccomp",
    ),
    Attempt(
        name="write a segment of the processor's into a table of its own",
        mechanism="processor tables",
        program='call(154, 0, bytes(16), 16); print("a table")',
        refused="EPERM",
        succeeds="a table",
        without="seccomp",
    ),
    Attempt(
        name="compare addresses in the kernel",
        mechanism="kernel pointers",
        program='call(312, os.getpid(), os.getpid(), 0, 0, 0); print("compared")',
        refused="EPERM",
        succeeds="compared",
        without="seccomp",
    ),
    Attempt(
        name="place memory on a node of the machine's",
        mechanism="NUMA",
        program='call(238, 0, 0, 0); print("placed")',
        refused="EPERM",
        succeeds="placed",
        without="seccomp",
    ),
    Attempt(
        name="fork by the call whose flags no filter sees",
        mechanism="clone3",
        program='call(435, 0, 0); print("forked")',
        refused="ENOSYS",
        succeeds="EINVAL",  # the kernel looked at what is no argument at all
        without="seccomp",
    ),
    Attempt(
        name="synchronise the quotas of every disk",
        mechanism="quotas",
        program='call(179, 0x80000100, 0, 0, 0); print("all disks")',
        refused="EPERM",
        succeeds="all disks",
        without="seccomp",
    ),
    Attempt(
        name="mount in a namespace of one's own",
        mechanism="mounts",
        program=NEST + 'nest(MOUNTS); call(165, b"none", b"/mnt", b"tmpfs", 0, 0); print("mounted")',
        refused="EPERM",
        succeeds="mounted",
        without="seccomp",
        spec=NAMESPACES_INSIDE,
    ),
    Attempt(
        name="mount an overlay with a work directory of one's own",
        mechanism="overlay",
        program=NEST
        + """
nest(MOUNTS)
for name in ("upper", "work"):
    os.mkdir(f"/dev/shm/{name}")
options = b"userxattr,lowerdir=/usr,upperdir=/dev/shm/upper,workdir=/dev/shm/work"
call(165, b"none", b"/mnt", b"overlay", 0, options)
print("mounted")
""",
        refused="EPERM",
        succeeds="mounted",
        without="seccomp",
        spec=NAMESPACES_INSIDE,
    ),
    Attempt(
        name="open a file system by the newer calls",
        mechanism="mounts",
        program=NEST + 'nest(MOUNTS); call(430, b"tmpfs", 0); print("a file system")',
        refused="EPERM",
        succeeds="a file system",
        without="seccomp",
        spec=NAMESPACES_INSIDE,
    ),
    Attempt(
        name="go back into a namespace",
        mechanism="setns",
        program=NEST + 'nest(0x04000000); call(308, os.open("/proc/self/ns/uts", 0), 0); print("entered")',
        refused="EPERM",
        succeeds="entered",
        without="seccomp",
        spec=NAMESPACES_INSIDE,
    ),
    Attempt(
        name="list every mount by a call that is newer than the filter's library",
        mechanism="newer calls",
        program="""
            found = call(458, struct.pack("<IIQQ", 24, 0, 2**64 - 1, 0), (ctypes.c_ulong * 64)(), 64, 0)
            print("mounts" if found > 1 else found)
        """,
        refused="ENOSYS",
        succeeds="mounts",
        without="seccomp_newer",
        since=(6, 8),
    ),
    Attempt(
        name="ask which security modules the machine has",
        mechanism="newer calls",
        program='call(461, bytes(64), ctypes.byref(ctypes.c_uint(64)), 0); print("modules")',
        refused="ENOSYS",
        succeeds="modules",
        without="seccomp_newer",
        since=(6, 8),
    ),
]
