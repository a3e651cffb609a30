"""What root finds around it in a sandbox, and in a call: filters, capabilities, a /proc that tells little."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.host.masks import masks_here
from cloudyard.images.depot import Depot
from cloudyard.model import MIB
from cloudyard.testing.backend_contract import SPEC, new_id, run
from functions_kit import Calls

pytestmark = pytest.mark.live

CAPABILITIES = "00000000000400eb"  # chown, dac_override, fowner, kill, setgid, setuid, sys_chroot
OF_THE_MACHINES_ROOT = ("kcore", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "vmallocinfo", "slabinfo")
FLOOD = """
import socket
listener, held, sent = socket.create_server(("127.0.0.1", 0)), [], 0
for _ in range(200):
    client = socket.create_connection(listener.getsockname())
    held += [client, listener.accept()]
    client.setblocking(False)
    try:
        while True: sent += client.send(bytes(65536))
    except BlockingIOError: pass
print(sent)
"""
NOBODY = "import os; os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"


@pytest.fixture
async def backend(node: ContainerOptions, depot: Path) -> AsyncIterator[ContainerBackend]:
    async with ContainerBackend(replace(node, pool_size=1), Depot(depot).layer_path) as made:
        yield made


@pytest.fixture
async def box(backend: ContainerBackend, depot: Path) -> AsyncIterator[Instance]:
    instance = await backend.create(new_id(), SPEC, Depot(depot).image("debian"))
    yield instance
    await instance.stop()


async def said(box: Instance, command: str) -> str:
    done = await run(box, command)
    assert done.exit_code == 0, done
    return done.stdout


async def test_root_has_few_capabilities_no_new_privileges_and_three_filters(box: Instance) -> None:
    rows = dict(line.split(":\t") for line in (await said(box, "cat /proc/self/status")).splitlines())
    assert {rows["CapPrm"], rows["CapEff"], rows["CapBnd"]} == {CAPABILITIES}
    assert {rows["CapInh"], rows["CapAmb"]} == {"0" * 16}
    assert (rows["NoNewPrivs"], rows["Seccomp"].strip(), rows["Seccomp_filters"].strip()) == (
        "1",
        "2",
        "3",
    )  # the last is the guest's own


async def test_what_tells_of_the_machine_is_empty(box: Instance) -> None:
    masks = masks_here()
    assert "cmdline" in masks.files
    files, folders = (" ".join(f"/proc/{name}" for name in names) for names in masks)
    assert await said(box, f"cat {files}") == ""
    assert await said(box, f"find {folders} -mindepth 1") == ""
    assert (await run(box, f"echo x > /proc/{masks.files[0]}")).exit_code != 0
    assert (await run(box, "umount /proc/cmdline")).exit_code != 0


async def test_files_of_the_machine_s_root_are_refused(box: Instance) -> None:
    there = [name for name in OF_THE_MACHINES_ROOT if Path(f"/proc/{name}").exists()]
    for name in there:
        assert "Permission denied" in (await run(box, f"head -c 1 /proc/{name}")).stderr, name


async def test_there_is_no_sys_and_settings_of_the_kernel_cannot_be_written(box: Instance) -> None:
    assert await said(box, "ls -A /sys") == ""
    for name in ("kernel/core_pattern", "kernel/randomize_va_space", "vm/overcommit_memory", "fs/file-max"):
        assert "Permission denied" in (await run(box, f"echo 1 > /proc/sys/{name}")).stderr


async def test_terminals_and_what_is_written_to_dev_have_bounds_of_their_own(box: Instance) -> None:
    opened = await said(
        box,
        """python3 -c '
import os
held = []
try:
    while len(held) < 1000: held.append(os.openpty())
except OSError as error: print(len(held), error.strerror)'""",
    )
    assert opened == "128 No space left on device\n"
    assert "No space left" in (await run(box, "head -c 2M /dev/zero >/dev/file")).stderr


async def test_what_connections_hold_is_within_a_bound_of_the_memory(
    backend: ContainerBackend, depot: Path
) -> None:
    small = await backend.create(new_id(), replace(SPEC, memory=64 * MIB), Depot(depot).image("debian"))
    done = await run(small, "python3", "-c", FLOOD)
    await small.stop()
    assert done.signal is not None or int(done.stdout) < 64 * MIB, done


async def test_a_set_uid_file_gives_nobody_anything(box: Instance) -> None:
    await said(box, "cp /usr/bin/id /tmp/id; chmod 6755 /tmp/id")
    ids = await said(box, f"python3 -c \"{NOBODY}; os.execv('/tmp/id', ['id'])\"")
    assert "uid=65534" in ids
    assert "euid" not in ids
    assert "egid" not in ids


async def test_user_namespaces_are_made_only_where_the_spec_asks_for_them(
    backend: ContainerBackend, box: Instance, depot: Path
) -> None:
    refused = await run(box, "unshare -Ur id -u")
    assert refused.stderr == "unshare: unshare failed: Operation not permitted\n"
    spec = replace(SPEC, user_namespaces=True)
    nesting = await backend.create(new_id(), spec, Depot(depot).image("debian"))
    assert await said(nesting, "unshare -Ur id -u") == "0\n"
    as_nobody = f"python3 -c \"{NOBODY}; os.execvp('unshare', ['unshare', '-Urnp', 'id', '-u'])\""
    assert await said(nesting, as_nobody) == "0\n"
    mounted = await run(nesting, "unshare -Urm --propagation unchanged mount -t tmpfs none /mnt")
    assert "permission denied" in mounted.stderr
    await nesting.stop()


async def test_a_call_is_under_the_filter_of_sandboxes_and_sees_as_little(calls: Calls) -> None:
    done = await calls("""
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        for number in (425, 308, 237, 272):  # io_uring_setup, setns, mbind, unshare
            libc.syscall(number, 0x20000000, 0, 0, 0, 0, 0)
            print(errno.errorcode[ctypes.get_errno()])
        print(open("/proc/cmdline").read(), os.listdir("/proc/bus"), os.path.exists("/proc/1/stat"))
        print([line.split()[1] for line in open("/proc/self/status") if line.startswith("Seccomp")])
    """)  # fmt: skip
    assert done.text.split("\n") == ["ENOSYS", "EPERM", "EPERM", "EPERM", " [] False", "['2', '4']", ""]
