"""What `cloudyard doctor` does: facts of the machine, what they mean, and one real sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import anyio
from anyio import to_thread
from msgspec import Struct

from cloudyard.assemble.config import make_config
from cloudyard.assemble.edge_main import BINARIES, container_backend, lxcfs_program
from cloudyard.assemble.yard import Say
from cloudyard.core.doctor import Bound, Finding, HostFacts, bounds, judge, verdict
from cloudyard.edge.host.probe import probe_host
from cloudyard.errors import CloudyardError, Unsupported
from cloudyard.fabric import find_nats_server
from cloudyard.images.build import build_from_tree
from cloudyard.images.depot import Depot
from cloudyard.model import Image, ImageConfig, SandboxId, SandboxSpec, normalised

SANDBOX_S = 30.0  # bound of the trial with a real sandbox
TRIAL_IMAGE = "trial"
TRIAL_PROGRAM = "/bin/true"


class Report(Struct, frozen=True, kw_only=True):
    """What the doctor found."""

    good: bool
    """Nothing is missing that a sandbox cannot do without, and as many as were asked for fit."""
    verdict: str
    findings: list[Finding]
    bounds: list[Bound] = []


async def examine(state: Path, *, count: int, say: Say) -> Report:
    """Read and try everything, and launch a sandbox if it has a chance.

    Args:
        state: the yard's state directory, or where it would be.
        count: sandboxes to compute the bounds for; 0: none.
        say: hears what is being done.
    """
    say("reading and trying the kernel")
    facts = await to_thread.run_sync(read_facts, state)
    findings = judge(facts)
    if all(finding.level != "fail" for finding in findings) and facts.erofs in ("direct", "loop"):
        say("starting a sandbox")
        findings.append(await try_sandbox(Path(facts.disk_where)))
    rows = bounds(facts, count) if count else []
    return Report(
        good=all(finding.level != "fail" for finding in findings) and all(bound.ok for bound in rows),
        verdict=verdict(findings, rows, count, uid_ranges=facts.uid_ranges),
        findings=findings,
        bounds=rows,
    )


def lacks(state: Path) -> list[Finding]:
    """What this machine lacks that no sandbox can do without."""
    return [finding for finding in judge(read_facts(state)) if finding.level == "fail"]


def read_facts(state: Path) -> HostFacts:
    """The facts of this machine."""
    try:
        nats_server = str(find_nats_server())
    except Unsupported:
        nats_server = ""
    return probe_host(state, nats_server=nats_server, binaries=BINARIES, lxcfs=lxcfs_program())


async def try_sandbox(where: Path) -> Finding:
    """Make and stop one real sandbox on an image of one program, below `where`, and say how long it took."""
    began = anyio.current_time()
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".cloudyard-doctor-", dir=where) as scratch,
            anyio.fail_after(SANDBOX_S),
        ):
            place = Path(scratch)
            config = make_config(
                state=place / "state", run=place / "run", depot=place / "depot", host="127.0.0.1", port=1
            )
            for directory in (config.paths.state, config.paths.run):
                directory.mkdir(mode=0o700)
            image = await to_thread.run_sync(_image_of_one_program, Depot(config.depot), place / "tree")
            async with container_backend(config, pool_size=1) as backend:
                await backend.sweep(set())
                began = anyio.current_time()
                spec = normalised(SandboxSpec(image=TRIAL_IMAGE))
                instance = await backend.create(SandboxId("sb-doctor-000000000000"), spec, image)
                took_s = anyio.current_time() - began
                await instance.stop()
    except (CloudyardError, OSError) as exc:
        return Finding(name="a sandbox", level="fail", text=f"could not be made: {exc}")
    except TimeoutError:
        return Finding(name="a sandbox", level="fail", text=f"was not made and gone within {SANDBOX_S:g} s")
    return Finding(
        name="a sandbox", level="ok", text=f"a real one was made in {took_s * 1000:.0f} ms, and is gone"
    )


def _image_of_one_program(depot: Depot, tree: Path) -> Image:
    """An image of the host's own TRIAL_PROGRAM and its libraries: it needs no network and no other image."""
    done = subprocess.run(
        ["ldd", TRIAL_PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    files = [TRIAL_PROGRAM, *(word for word in done.stdout.split() if word.startswith("/"))]
    for file in files:
        target = tree / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), target)
    for name in ("proc", "dev", "tmp", "root", "etc"):
        (tree / name).mkdir(exist_ok=True)
    return build_from_tree(depot, TRIAL_IMAGE, tree, config=ImageConfig(cwd="/", probe=[TRIAL_PROGRAM]))
