"""What a launcher is told to make: a root, a filter, and bubblewrap's command line for the rest."""

from __future__ import annotations

from cloudyard.edge.backends.container.launcher import (
    FD_FILTERS,
    FD_GUEST,
    FD_INFO,
    FD_LISTEN,
    FD_USERNS,
    Order,
)
from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.backends.container.stock import Shape
from cloudyard.edge.host import lxcfs
from cloudyard.edge.host.masks import Masks
from cloudyard.edge.host.seccomp import NEWER
from cloudyard.edge.host.template import FILTERS, NOTHING, NOWHERE
from cloudyard.model import MIB

# The fewest with which package managers, su and sshd worked.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL", "SYS_CHROOT")
MORE_CAPABILITIES = {
    "sandbox": (),
    "user_namespaces": ("SETFCAP",),  # for root, to be root in a namespace that it makes
    "worker": (
        "SYS_ADMIN",  # namespaces and mounts
        "SYS_RESOURCE",  # to forbid user namespaces to what runs in them
        "SETPCAP",  # to give up the bounding set
    ),
}
USER_NAMESPACES_MAX = 1024  # in a sandbox that may have any
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
STREAMS = ("stdin", "stdout", "stderr")
DEV_BYTES = 1 * MIB
GUEST_UID = 65_533  # of the sandbox's uids; its root can neither signal nor trace nor slow what has another


def order(options: ContainerOptions, shape: Shape, masks: Masks) -> Order:
    """What the launcher of a sandbox of this shape is told."""
    defences = options.defences
    filters = []
    if defences.seccomp_newer:
        filters.append(f"{FILTERS}/{NEWER}")
    if defences.seccomp:
        filters.append(f"{FILTERS}/{shape.profile}")
    user_namespaces = str(USER_NAMESPACES_MAX if shape.profile == "user_namespaces" else 0)
    return Order(
        hostname=shape.hostname,
        user_namespaces=user_namespaces if defences.userns_limit else "",
        layers=shape.layers,
        filters=filters,
        argv=_command_line(options, shape, masks, filters=len(filters)),
    )


def _command_line(options: ContainerOptions, shape: Shape, masks: Masks, *, filters: int) -> list[str]:
    defences = options.defences
    userns = ("--userns", str(FD_USERNS), "--uid", "0", "--gid", "0")
    names = (*CAPABILITIES, *MORE_CAPABILITIES[shape.profile])
    hidden = [*((name, NOTHING) for name in masks.files), *((name, NOWHERE) for name in masks.folders)]
    own = lxcfs.FILES if shape.lxcfs else ()
    return [
        str(options.bubblewrap),
        *(userns if defences.user_namespace else ()),
        *("--info-fd", str(FD_INFO)),
        *(("--unshare-pid", "--as-pid-1") if defences.pid_namespace else ()),
        *("--bind" if defences.nodev else "--dev-bind", "/root", "/"),
        *(("--proc", "/proc") if defences.pid_namespace else ("--bind", "/proc", "/proc")),
        *(part for name, by in hidden for part in ("--ro-bind", by, f"/proc/{name}")),
        *(part for name in own for part in ("--ro-bind", f"{lxcfs.PLACE}/proc/{name}", f"/proc/{name}")),
        *(_devices() if defences.own_devices else ("--dev-bind", "/dev", "/dev")),
        # With a size of its own: a tmpfs would else be half of the machine's memory.
        *("--perms", "1777", "--size", str(options.shm_bytes), "--tmpfs", "/dev/shm"),
        *("--chdir", "/"),
        *(part for at in range(filters) for part in ("--add-seccomp-fd", str(FD_FILTERS + at))),
        *("--cap-drop", "ALL"),
        *(part for name in (names if defences.capabilities else ["ALL"]) for part in _added(name)),
        *(f"/proc/self/fd/{FD_GUEST}", "--listen", str(FD_LISTEN)),
        *("--uid", str(GUEST_UID if defences.guest_uid else 0)),
    ]


def _devices() -> list[str]:
    """A /dev as bubblewrap's own, but for two bounds that it cannot set: of what is written in it, and of
    terminals, which the launcher has mounted."""
    links = {"fd": "/proc/self/fd", **{name: f"/proc/self/fd/{fd}" for fd, name in enumerate(STREAMS)}}
    links["ptmx"] = "pts/ptmx"
    return [
        *("--size", str(DEV_BYTES), "--tmpfs", "/dev"),
        *(part for name in DEVICES for part in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--dev-bind", "/pts", "/dev/pts"),
        *(part for name, to in links.items() for part in ("--symlink", to, f"/dev/{name}")),
    ]


def _added(name: str) -> tuple[str, str]:
    return "--cap-add", name if name == "ALL" else f"CAP_{name}"
