"""The host: what a worker runs, and what makes its cells.

It forks *cells* and never sees a call. A cell is a process, PID 1 of new pid, mount and ipc namespaces. It
waits for its turn, reads one call from the worker's stdin, runs it and writes the answer to the worker's
stdout. The host then reaps it, with which every process of the call is gone, gives the turn to the next cell,
made by then, and makes another.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudyard.edge.functions.inside.base import (
        CAPS_MAX,
        CLONE_NEWNS,
        CLONE_NEWPID,
        MS_PRIVATE,
        MS_REC,
        PR_CAPBSET_DROP,
        Failed,
        check,
        libc,
        mount,
        parse,
        read_body,
        set_read_only,
        write_frame,
    )
    from cloudyard.edge.functions.inside.cell import be_cell
    from cloudyard.edge.functions.inside.program import Program
    from cloudyard.edge.functions.inside.walls import Walls

FIRST_UID, LAST_UID = 10_000, 60_000
TRY_PAUSE_S = 0.05  # between two tries to make a cell
TRIES = 100
ARG_START = 45  # in /proc/self/stat, past the name: where the arguments lie in memory; then, where they end


class Cell:
    """One cell, as the host holds it."""

    def __init__(self, pid: int, go: int) -> None:
        self.pid = pid
        self.go = go

    def start(self) -> bool:
        """Give it the turn. False: it has died."""
        try:
            os.write(self.go, b"1")
        except BrokenPipeError:
            os.waitpid(self.pid, 0)
            return False
        finally:
            os.close(self.go)
        return True


def prepare(preload: list[bytes]) -> None:
    """Import what calls will find imported, and shut off what they must not reach."""
    sys.dont_write_bytecode = True
    if sys.path[:1] == [""]:
        del sys.path[0]
    for module in preload:
        try:
            __import__(module.decode())
        except BaseException as exc:  # noqa: BLE001 (a module may raise anything)
            write_frame(kind="refused", reason="preload", text=f"import {module.decode()}: {exc!r}")
            os._exit(1)
    sys.dont_write_bytecode = False
    try:
        check(libc.unshare(CLONE_NEWNS), "make a mount namespace")
        mount("none", "/", "", MS_REC | MS_PRIVATE, "")
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # in a user namespace of its own a call could mount, and would be its own root
        set_read_only("/", deep=True, on=True)
        set_read_only("/proc", deep=False, on=False)  # a cell writes its oom_score_adj there
        for capability in range(CAPS_MAX):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    except (Failed, OSError) as exc:
        write_frame(kind="refused", reason="kernel", text=str(exc))
        os._exit(1)
    hide_arguments()
    gc.collect()
    gc.freeze()  # else each cell copies the pages of all that was imported at its first collection


def hide_arguments() -> None:
    """Let /proc say of every cell what it would say of `python3 main.py`."""
    with open("/proc/self/stat") as file:
        words = file.read().rpartition(")")[2].split()
    start, end = int(words[ARG_START]), int(words[ARG_START + 1])
    ctypes.memmove(start, b"python3\0main.py".ljust(end - start, b"\0"), end - start)


def serve() -> Program:
    """Make cells until the worker ends. Returns in a cell only, with the program that it is to run."""
    fields = parse(read_body(0))
    prepare(fields.get(b"preload", []))
    walls = Walls(fields)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    uids = iter(range(FIRST_UID, LAST_UID))
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * resource.getpagesize()
    write_frame(kind="hello", version=sys.version.split()[0], rss=rss)
    made: Cell | Program | None = None
    status = 0
    while True:
        current = made or make_first_cell(own, uids, walls)
        if isinstance(current, Program):
            return current
        write_frame(kind="ready", status=status, left=left_behind())
        if current.start():
            try:
                made = make_cell(own, next(uids), walls)
            except (Failed, OSError):
                made = None  # a call may use up all there is: again when it is over
            if isinstance(made, Program):
                return made
        else:
            made = None
        _, status = os.waitpid(current.pid, 0)


def left_behind() -> str:
    """What is left of calls although all their processes are gone; empty where nothing is."""
    with open("/proc/net/sockstat") as file:
        for line in file:
            words = line.split()
            if words[0] == "TCP:":
                counts = dict(zip(words[1::2], words[2::2]))  # noqa: B905 (Python 3.9)
                if counts.get("inuse", "0") != "0" or counts.get("tw", "0") != "0":
                    return "connections"  # a later call would see them, and not get their ports
    return ""


def make_first_cell(own: int, uids: Iterator[int], walls: Walls) -> Cell | Program:
    """A cell, when no call runs. What a call used up may take a moment to come back."""
    problem = ""
    for _ in range(TRIES):
        try:
            return make_cell(own, next(uids), walls)
        except (Failed, OSError) as exc:
            problem = str(exc)
            time.sleep(TRY_PAUSE_S)
    write_frame(kind="refused", reason="kernel", text=f"make a cell: {problem}")
    os._exit(1)


def make_cell(own: int, uid: int, walls: Walls) -> Cell | Program:
    """Fork a cell. In the cell this returns the program that it is to run, if that is one in Python.

    Args:
        own: the host's own pid namespace.
        uid: whom the cell runs its call as.
        walls: what stands around the call.
    """
    waiting, go = os.pipe()
    pid = -1
    try:
        check(libc.unshare(CLONE_NEWPID), "make a pid namespace")
        try:
            pid = os.fork()
        finally:
            if pid != 0:  # else the next unshare is refused
                check(libc.setns(own, CLONE_NEWPID), "return to the pid namespace")
    finally:
        if pid != 0:
            os.close(waiting)
        if pid <= 0:
            os.close(go)
    return Cell(pid, go) if pid else be_cell(waiting, uid, walls)
