"""What a container backend is told when it is made. Read once, in the composition root."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from cloudyard.edge.backends.container.defences import Defences
from cloudyard.edge.host.layers import LayerMount
from cloudyard.edge.host.slots import CLAIMS_DIR
from cloudyard.model import MIB

POOL_SIZE = 16
PREPARED_AT_ONCE = 4
STOCK_SIZE = 8
RAISED_AT_ONCE = 2
LAYERS_CHECKED_S = 15.0
SHM_BYTES = 64 * MIB


class ContainerOptions(Struct, frozen=True, kw_only=True):
    """Paths and sizes of a container backend."""

    state: Path
    """The yard's state directory; the backend keeps `edge/boxes` and `edge/trash` in it. Its file system
    holds what sandboxes
    write and must be one that overlayfs can write to: ext4, xfs, btrfs or tmpfs, and no overlay itself."""
    run: Path
    """The yard's run directory; guests' sockets are in `guests` in it."""
    launcher: Path
    """guest/launch.c, compiled."""
    guest: Path
    """The guest's program, static."""
    bubblewrap: Path = Path("/usr/bin/bwrap")
    pool_size: int = POOL_SIZE
    """Launchers that wait ready for a sandbox."""
    prepared_at_once: int = PREPARED_AT_ONCE
    """Launchers that are prepared at the same time."""
    stock_size: int = STOCK_SIZE
    """Sandboxes that run already, of the shapes asked for lately."""
    raised_at_once: int = RAISED_AT_ONCE
    """Sandboxes that are raised at the same time ahead of need."""
    lxcfs: Path | None = None
    """The program of that name; None where there is none, and sandboxes that ask for it are refused."""
    layer_mount: LayerMount = "auto"
    """How layers are mounted: straight from the file, through a loop device, or as the kernel can."""
    layers_checked_s: float = LAYERS_CHECKED_S
    """How often it is seen to that layers of removed images are let go of."""
    cgroup_subtree: Path | None = None
    """A cgroup v2 directory that was delegated to us; None: the root of what is mounted."""
    shm_bytes: int = SHM_BYTES
    """Size of each sandbox's /dev/shm."""
    disk_pool_bytes: int | None = None
    """What the pool of sandboxes' disks may take of this machine's disk; None: all but a reserve, or no pool
    where the machine can make none; 0: no pool."""
    claims: Path = CLAIMS_DIR
    """Where the yards of this machine agree on who has which uids."""
    defences: Defences = Defences()
    """All; tests of each take one away."""

    @property
    def boxes(self) -> Path:
        """A directory per slot with what its sandbox wrote."""
        return self.state / "edge" / "boxes"

    @property
    def disk_pool(self) -> Path:
        """The file that holds their disks, where they are in a pool."""
        return self.state / "edge" / "disks.btrfs"

    @property
    def trash(self) -> Path:
        """What is being removed."""
        return self.state / "edge" / "trash"

    @property
    def guests(self) -> Path:
        """A socket per slot."""
        return self.run / "guests"

    @property
    def tag(self) -> str:
        """The yard's name among the machine's cgroups: where its state is, as a word."""
        return "-".join(self.state.absolute().parts[1:])[-200:] or "root"
