"""Attempts to take more than one's share, from the machine and from neighbours."""

from __future__ import annotations

from msgspec.structs import replace

from cloudyard.model import MIB
from cloudyard.testing.backend_contract import SPEC
from escapes.calls import NAMESPACES_INSIDE, NEST
from escapes.kit import Attempt

FORKS = 64
CHILDREN = """
children = []
def end():
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""

ATTEMPTS = [
    Attempt(
        name="hold more memory than the limit",
        mechanism="memory",
        program='held = bytearray(b"x") * (192 << 20); print("held")',
        refused="killed by signal 9",
        succeeds="held",
        without="memory_limit",
        spec=replace(SPEC, memory=64 * MIB),
    ),
    Attempt(
        name="hold more memory than the limit, as files in memory",
        mechanism="files in memory",
        program="""
            with open("/dev/shm/file", "wb", 0) as file:
                for _ in range(160):
                    file.write(bytes(1 << 20))
            print("held")
        """,
        refused="ENOSPC",
        succeeds="held",
        without="shm_bytes",
    ),
    Attempt(
        name="fill the disk that all sandboxes share",
        mechanism="disk quota",
        program="""
            with open("/root/file", "wb", 0) as file:
                for _ in range(24):
                    file.write(bytes(1 << 20))
            print("written")
        """,
        refused="EDQUOT",
        succeeds="written",
        without="disk_limit",
        spec=replace(SPEC, disk=16 * MIB),
    ),
    Attempt(
        name="have more processes than the limit",
        mechanism="processes",
        program=CHILDREN
        + f"""
try:
    for _ in range({FORKS}):
        children.append(os.fork() or signal.pause())
finally:
    end()
print("{FORKS} processes")
""",
        refused="EAGAIN",
        succeeds=f"{FORKS} processes",
        without="pids_limit",
        spec=replace(SPEC, pids=FORKS // 2),
    ),
    Attempt(
        name="use up the machine's namespaces",
        mechanism="namespaces",
        program=NEST
        + CHILDREN
        + """
total, (end_of_pipe, pipe) = 0, os.pipe()
for _ in range(48):
    child = os.fork()
    if not child:
        made = 0
        try:
            while True:  # to the depth that there may be
                nest(0)
                made += 1
        except OSError:
            os.write(pipe, bytes([made]))
        signal.pause()
    children.append(child)
    total += os.read(end_of_pipe, 1)[0]
end()
if total <= 1024:
    raise OSError(errno.ENOSPC, "")
print("over 1024 namespaces")
""",
        refused="ENOSPC",
        succeeds="over 1024 namespaces",
        without="userns_limit",
        spec=NAMESPACES_INSIDE,
    ),
]
