"""What keeps a call apart from every other one, from the worker around it and from the host: tried, in one
worker, by code that wants to break it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import support
from cloudyard.edge.backends.container import ContainerOptions
from cloudyard.errors import SandboxUnavailable
from container_kit import places, sweep
from functions_kit import Calls, calls_in, hosts

pytestmark = pytest.mark.live

EVERYWHERE = """
import os
def places():
    found = []
    for top, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if top != "/" or name not in ("proc", "usr", "sys")]
        found.append(top)
    return found
"""
PLANT_FILES = (
    EVERYWHERE
    + """
planted = []
for place in [*places(), "/usr", "/usr/lib", "/usr/bin"]:
    path = os.path.join(place, ".planted")
    try:
        open(path, "w").write("planted")
        planted.append(path)
    except OSError:
        pass
print(*sorted(planted))
"""
)
FIND_FILES = EVERYWHERE + "\nprint([place for place in places() if os.path.exists(f'{place}/.planted')])"
PLANT_MODULES = """
import builtins, json, os, sys, types
sys.modules["planted"] = types.ModuleType("planted")
builtins.planted = json.planted = os.planted = 1
json.dumps = lambda *_, **__: "planted"
os.environ["PLANTED"] = "1"
os.putenv("PLANTED_TOO", "1")
sys.path.append("/planted")
print("planted" in sys.modules)
"""
FIND_MODULES = """
import builtins, json, os, sys
print("planted" in sys.modules, *(hasattr(module, "planted") for module in (builtins, json, os)))
print(json.dumps([1]), [name for name in os.environ if "PLANTED" in name], "/planted" in sys.path)
print(os.popen("env | grep -c PLANTED").read())
"""
PLANT_PROCESSES = """
import os, signal, time
def daemon():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    open(f"/tmp/{os.getpid()}", "w").close()
    time.sleep(1000)
for _ in range(3):
    daemon()
while len(os.listdir("/tmp")) < 4:
    time.sleep(0.001)
print("planted")
"""
FIND_PROCESSES = """
import os
print([int(name) for name in os.listdir("/proc") if name.isdigit()] == [os.getpid()], os.listdir("/tmp"))
"""
IPC = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
queue = libc.mq_open
queue.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
USER_RING, SESSION_RING, USER_SESSION_RING = -4, -3, -5
def keyctl(*args):
    return libc.syscall(250, *[ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args])
def add_key(ring):
    return libc.syscall(248, b"user", b"planted", b"data", ctypes.c_size_t(4), ctypes.c_long(ring))
def find_key(ring):
    return keyctl(10, ring, b"user", b"planted", 0)
"""
PLANT_IPC = (
    IPC
    + """
print(*(each >= 0 for each in (
    libc.shmget(77, 4096, 0o1666), libc.semget(77, 1, 0o1666), libc.msgget(77, 0o1666),
    queue(b"/planted", os.O_CREAT | os.O_RDWR, 0o666, None),
    libc.shm_open(b"/planted", os.O_CREAT | os.O_RDWR, 0o666),
)))
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0planted")
sock.listen()
for ring in (USER_RING, SESSION_RING, USER_SESSION_RING):
    key = add_key(ring)
    if key >= 0:
        keyctl(5, key, 0x3f3f3f3f)
if os.fork() == 0:
    os.setsid()
    sock.accept()
"""
)
FIND_IPC = (
    IPC
    + """
print(*(each >= 0 for each in (
    libc.shmget(77, 0, 0), libc.semget(77, 0, 0), libc.msgget(77, 0),
    queue(b"/planted", os.O_RDONLY, 0, None),
    libc.shm_open(b"/planted", os.O_RDONLY, 0),
)))
try:
    socket.socket(socket.AF_UNIX).connect("\\0planted")
    print("socket")
except ConnectionRefusedError:
    print("none")
print(*(find_key(ring) > 0 for ring in (USER_RING, SESSION_RING, USER_SESSION_RING)))
if os.path.exists("/proc/keys"):
    print(open("/proc/keys").read().count("planted"))
"""
)


async def test_files_written_anywhere_are_gone_in_the_next_call(calls: Calls) -> None:
    planted, found = await calls.one_after_the_other(PLANT_FILES, FIND_FILES)
    assert planted.stdout.split() == [b"/dev/shm/.planted", b"/tmp/.planted", b"/var/tmp/.planted"]
    assert (found.stdout, found.stderr) == (b"[]\n", b"")


async def test_modules_and_environment_are_as_they_were_in_the_next_call(calls: Calls) -> None:
    planted, found = await calls.one_after_the_other(PLANT_MODULES, FIND_MODULES, preload=["json"])
    assert planted.stdout == b"True\n"
    assert found.stdout.split(b"\n")[:3] == [b"False False False False", b"[1] [] False", b"0"]


async def test_daemons_that_ignore_every_signal_are_gone_in_the_next_call(calls: Calls) -> None:
    planted, found = await calls.one_after_the_other(PLANT_PROCESSES, FIND_PROCESSES)
    assert planted.stdout == b"planted\n"
    assert found.stdout == b"True ['main.py']\n"


async def test_what_the_kernel_keeps_by_name_is_gone_in_the_next_call(calls: Calls) -> None:
    planted, found = await calls.one_after_the_other(PLANT_IPC, FIND_IPC)
    assert planted.stdout == b"True True True True True\n"
    assert found.stdout == b"False False False False False\nnone\nFalse False False\n0\n"


async def test_keys_are_gone_in_the_next_worker_of_the_same_place(calls: Calls) -> None:
    """The uids of a place outlive its sandbox, and keys belong to uids."""
    for _ in range(4):
        done = await calls(PLANT_IPC + FIND_IPC.removeprefix(IPC).split("print(*(find")[0])
        assert done.text.startswith("True True True True True\n")
        found = await calls.one_after_the_other(FIND_IPC, project="other")
        assert found[0].stdout.endswith(b"False False False\n0\n")


async def test_no_two_calls_have_the_same_user_or_run_as_root(calls: Calls) -> None:
    look = "import os; print(os.getresuid(), os.getresgid(), os.getgroups(), os.getsid(0) == os.getpid())"
    status = "print(*(line.split()[1] for line in open('/proc/self/status') if line[:3] in ('Cap', 'NoN')))"
    done = await calls.one_after_the_other(look, look, look, status)
    assert len({each.stdout for each in done[:3]}) == 3
    for each in done[:3]:
        assert each.stdout.endswith(b" [] True\n")
        assert b"0," not in each.stdout.replace(b"00,", b"")
    assert done[3].stdout.split() == [b"0000000000000000"] * 5 + [b"1"]


async def test_code_finds_nothing_of_ours(calls: Calls) -> None:
    done = await calls(
        """
        import gc, os, sys
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:3], len(os.listdir("/proc/self/fd")))
        print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [os.getpid()])
        names = ("cmdline", "environ", "maps", "mem", "fd", "root", "cwd")
        print([name for name in names if os.access(f"/proc/1/{name}", os.R_OK)])
        names = set(sys.modules) | set(globals())
        print(sorted(name for name in names if "cloudyard" in name or "host" in name))
        frame = sys._getframe()
        while frame.f_back:
            frame = frame.f_back
        print(sorted(name for name in frame.f_globals if not name.startswith("__")))
        ours = ("serve", "make_cell", "Watch", "run_call", "write_frame")
        print([each for each in gc.get_objects() if getattr(each, "__name__", "") in ours])
        for path in ("/proc/1/mem", "/proc/1/fd/0", "/proc/1/root/etc"):
            try:
                os.open(path, os.O_RDONLY)
                print("opened", path)
            except OSError:
                pass
        """
    )
    lines = done.text.splitlines()
    assert lines[0] == "[0, 1, 2] 4"  # and the directory itself
    assert lines[1:4] == ["True", "[]", "[]"]
    assert not {"host", "text", "serve"} & set(lines[4].strip("[]").replace("'", "").split(", "))
    assert lines[5:] == ["[]"]


async def test_code_can_change_nothing_around_it(calls: Calls) -> None:
    done = await calls(
        """
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        def tried(name, result):
            if result != -1:
                print(name, "worked")
        for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000),
                           ("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000)):
            tried(f"unshare {name}", libc.unshare(flag))
        tried("mount", libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        tried("remount", libc.mount(b"none", b"/", b"", ctypes.c_ulong(32 | 4096), None))
        tried("umount", libc.umount2(b"/tmp", 2))
        tried("chroot", libc.chroot(b"/tmp"))
        tried("pivot_root", libc.syscall(155, b"/tmp", b"/tmp"))
        tried("ptrace", libc.ptrace(16, 1, None, None))
        tried("process_vm_readv", libc.syscall(310, 1, None, 0, None, 0, 0) or -1)
        tried("setuid", libc.setuid(0))
        tried("sethostname", libc.sethostname(b"x", 1))
        for pid in (1, -1):
            try:
                os.kill(1, signal.SIGKILL)
                print("killed", pid)
            except PermissionError:
                pass
        for path in ("/proc/sys/kernel/hostname", "/proc/1/oom_score_adj", "/proc/self/oom_score_adj",
                     "/proc/sys/user/max_user_namespaces", "/etc/passwd", "/new", "/usr/new", "/dev/new"):
            try:
                open(path, "w")
                print("opened", path)
            except OSError:
                pass
        print("tried")
        """
    )
    assert (done.text, done.stderr) == ("tried\n", b"")
    await calls.work_well()


async def test_a_listener_on_the_worker_s_loopback_does_not_outlive_its_call(calls: Calls) -> None:
    listen = """
        import socket
        place = ("127.0.0.1", 8080)
        server = socket.create_server(place)
        client = socket.create_connection(place)
        server.accept()[0].close()
        print("served")
    """
    done = await calls.one_after_the_other(listen, listen, listen)
    assert [each.stdout for each in done] == [b"served\n"] * 3, [each.stderr for each in done]


async def test_projects_share_no_worker(calls: Calls) -> None:
    assert (await calls("print(1)", project="one")).ok
    before = hosts(calls.options)
    assert (await calls("print(1)", project="two")).ok
    assert set(hosts(calls.options)) > set(before)


# --- workers that die, and calls that nobody waits for --------------------------------------------------


def kill_hosts(calls: Calls) -> None:
    for pid in hosts(calls.options):
        os.kill(pid, signal.SIGKILL)


async def test_a_call_whose_host_is_killed_is_made_again_by_itself(calls: Calls) -> None:
    await calls.work_well()
    done: list[str] = []

    async def call() -> None:
        done.append((await calls("import time\ntime.sleep(0.3)\nprint('done')")).text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        kill_hosts(calls)
    assert done == ["done\n"]
    await calls.work_well()


async def test_a_call_whose_hosts_are_killed_again_and_again_is_our_failure(calls: Calls) -> None:
    async with anyio.create_task_group() as tasks:

        async def kill() -> None:
            while True:
                kill_hosts(calls)
                await anyio.sleep(0.02)

        tasks.start_soon(kill)
        with pytest.raises(SandboxUnavailable) as caught, anyio.fail_after(20):
            await calls("import time\ntime.sleep(100)", timeout_s=100)
        assert (caught.value.fault, caught.value.retry_safe) == ("infra", True)
        tasks.cancel_scope.cancel()
    await calls.work_well()


async def test_no_call_is_lost_to_an_idle_worker_whose_host_was_killed(calls: Calls) -> None:
    await calls.work_well()
    kill_hosts(calls)
    await calls.work_well()


async def test_cancelled_calls_leave_no_worker_behind_that_runs_them(calls: Calls) -> None:
    for _ in range(3):
        with anyio.move_on_after(0.5) as scope:
            await calls("import os, time\nos.fork()\ntime.sleep(100)", timeout_s=100)
        assert scope.cancelled_caught
    await support.wait_until(lambda: not hosts(calls.options), "their workers are gone")
    await calls.work_well()


async def test_many_calls_cancelled_while_they_queue_leave_the_pool_as_it_was(calls: Calls) -> None:
    with anyio.move_on_after(0.5):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(lambda: calls("import time; time.sleep(100)", timeout_s=100))
    await calls.work_well()
    assert len(hosts(calls.options)) <= 2


RUN_AN_EDGE = """
import sys
import anyio
from pathlib import Path
from container_kit import options_in
from functions_kit import calls_in

async def main():
    async with calls_in(options_in(Path(sys.argv[1]), Path(sys.argv[2])), Path(sys.argv[3])) as calls:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(lambda: calls("import time; time.sleep(100)", timeout_s=100))
            for _ in range(2):
                tasks.start_soon(lambda: calls("print(1)", timeout_s=100))
            await anyio.sleep(60)

anyio.run(main)
"""


async def test_workers_of_a_killed_edge_are_swept_by_the_next(
    node: ContainerOptions, programs: Path, depot: Path, yard_dir: Path
) -> None:
    paths = os.pathsep.join(str(support.REPOSITORY / name) for name in ("src", "tests"))
    edge = subprocess.Popen(
        [sys.executable, "-c", RUN_AN_EDGE, str(yard_dir), str(programs), str(depot)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        await support.wait_until(lambda: len(hosts(node)) == 2, "two workers run")
    finally:
        edge.kill()
        edge.wait()
    assert places(node)["disks"]
    await sweep(node)
    assert not any(places(node).values())
    async with calls_in(node, depot) as calls:
        await calls.work_well()
