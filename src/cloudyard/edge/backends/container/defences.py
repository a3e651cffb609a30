"""What stands between a sandbox and the machine, by name, so that a test can take exactly one away.

A refusal proves nothing about the wall it is put down to unless the same attempt succeeds without that wall.
Nothing but code that constructs a backend can say which are up: no configuration, no option, no request.

What is in the C of guest and launcher is left out when they are compiled, as these are named by their paths:
`make -C guest BUILD=... CFLAGS="-O2 -D..."` with GUEST_DUMPABLE (the guest can be looked into),
GUEST_KEEPS_DESCRIPTORS (commands inherit what the guest has open) or GUEST_SHARES_UID (root inside can become
the guest's uid). That bubblewrap sets no_new_privs and
mounts everything nosuid cannot be left out.
"""

from __future__ import annotations

from msgspec import Struct

CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x0200_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000


class Defences(Struct, frozen=True, kw_only=True):
    """Which defences of a sandbox are up: all of them."""

    seccomp: bool = True
    """The filter of system calls, by the policy in edge/host/seccomp."""
    seccomp_newer: bool = True
    """The filter that refuses the calls of kernels newer than the policy."""
    capabilities: bool = True
    """The few capabilities that root inside has. Without: all, in its user namespace."""
    user_namespace: bool = True
    """A user namespace of its own. Without: capabilities are those of the machine, and uids too."""
    uid_range: bool = True
    """Uids that nobody else on the machine has. Without: uid 0 inside is uid 0 of the machine."""
    userns_limit: bool = True
    """No user namespaces inside, by the kernel's own limit beside the filter."""
    guest_uid: bool = True
    """The guest's uid, which root inside cannot touch. Without: the guest is root inside."""
    proc_masks: bool = True
    """Nothing in the files of /proc that tell of the machine."""
    own_devices: bool = True
    """A /dev of its own. Without: the machine's."""
    nodev: bool = True
    """Device nodes in the image are of no use."""
    pid_namespace: bool = True
    network_namespace: bool = True
    ipc_namespace: bool = True
    uts_namespace: bool = True
    cgroup_namespace: bool = True
    memory_limit: bool = True
    pids_limit: bool = True
    disk_limit: bool = True

    @property
    def own_ids(self) -> bool:
        """Whether ids inside are others than the same numbers outside."""
        return self.user_namespace and self.uid_range

    @property
    def namespaces(self) -> int:
        """Those that the launcher makes, as flags of clone(2)."""
        flags = {
            CLONE_NEWUSER: self.user_namespace,
            CLONE_NEWNET: self.network_namespace,
            CLONE_NEWIPC: self.ipc_namespace,
            CLONE_NEWUTS: self.uts_namespace,
            CLONE_NEWCGROUP: self.cgroup_namespace,
        }
        return sum(flag for flag, up in flags.items() if up)
