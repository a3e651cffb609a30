"""A package in a sandbox: whole or with a fault, its tests run as a task's would be.

Each trial has a sandbox of its own. Knows the SDK.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.making import verdict
from cloudyard.rollout.making.files import (
    CPUS,
    MEMORY_MB,
    VERIFIER_WAIT_S,
    WORKDIR,
    Plant,
    write_solution,
)
from cloudyard.rollout.making.suite import Package
from cloudyard.rollout.making.verdict import Outcome
from cloudyard.sdk.client import Yard
from cloudyard.sdk.sandbox import Sandbox

COMMAND_WAIT_S = 30.0
SEARCH_WAIT_S = 300.0
SEARCH_BYTES_MAX = 64 * 2**20  # of lines of the image that hold a line of the package
SANDBOX_TTL_S = 3600.0
TRIAL_WAIT_MIN_S, TRIAL_WAIT_TIMES = 20.0, 30.0  # for tests of a faulty package, by those of the whole one
OUTPUT_SHOWN_CHARS = 1500
_LABEL = "cloudyard.making"
_TIMED_OUT = (124, 137)  # exit codes of timeout(1)
# Lines of files of the image, the pseudo file systems left out, that hold one of the texts of stdin.
_SEARCH = """
cd / && LC_ALL=C grep -rhaFs --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev -f - .
test $? -lt 2
"""


class Judged(Struct, frozen=True, kw_only=True):
    """What tests/test.sh made of a tree."""

    reward: str
    outcome: Outcome | None
    """None where the output has no summary of tests."""
    timed_out: bool
    output: str
    """Its end."""
    duration_s: float


class Tried(Struct, frozen=True, kw_only=True):
    """What became of a fault: good for a task, or a few words why not."""

    refused: str = ""


@asynccontextmanager
async def sandbox(yard: Yard, image: str, package: Package) -> AsyncIterator[Sandbox]:
    """A sandbox of an image with the package's tree in the working directory.

    Raises:
        NotFound: the yard has no such image.
    """
    async with yard.sandbox(
        image=image,
        cpu=CPUS,
        memory=f"{MEMORY_MB}MiB",
        max_ttl_s=SANDBOX_TTL_S,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        labels={_LABEL: package.name},
    ) as box:
        await box.upload(package.tree, WORKDIR)
        yield box


async def judge(box: Sandbox, tests: Path, *, wait_s: float = VERIFIER_WAIT_S) -> Judged:
    """Run the tests of a task in the sandbox, for so long at most.

    Raises:
        InvalidRequest: the image lacks what they need.
    """
    for place in ("/logs/verifier", "/tests"):
        await box.remove(place, recursive=True, missing_ok=True)
    await box.mkdir("/logs/verifier", mode=0o777)
    await box.upload(tests, "/tests")
    done = await box.run(["bash", "/tests/test.sh"], timeout_s=wait_s)
    if done.timed_out:
        return Judged(reward="", outcome=None, timed_out=True, output="", duration_s=done.duration_s)
    if not done.ok:
        said = done.stderr.decode(errors="replace")[-OUTPUT_SHOWN_CHARS:]
        raise InvalidRequest(
            f"The tests of {WORKDIR} cannot be run in this image: {said.strip() or 'the script failed'}",
            code="bad_image",
            hint="It needs python3, and bash, find, timeout and setpriv, which Debian has.",
        )
    output = (await box.read("/logs/verifier/output.txt")).decode(errors="replace")
    status = (await box.read("/logs/verifier/status")).decode().strip()
    return Judged(
        reward=(await box.read("/logs/verifier/reward.txt")).decode().strip(),
        outcome=verdict.read("", output),
        timed_out=int(status) in _TIMED_OUT,
        output=output[-OUTPUT_SHOWN_CHARS:].strip(),
        duration_s=done.duration_s,
    )


async def attempt(
    yard: Yard, image: str, package: Package, *, plant: Plant, tests: Path, solution: Path, whole: Judged
) -> Tried:
    """Whether a fault makes a task: the package imports, some tests fail, half still pass, the original
    restores it.

    Args:
        tests: the task's tests/.
        solution: a directory that does not exist; the task's solution/ is made there.
        whole: what the tests made of the package without a fault.
    """
    assert whole.outcome is not None
    async with sandbox(yard, image, package) as box:
        await box.write(f"{WORKDIR}/{plant.file}", plant.edited.encode())
        imports = await box.run(
            ["python3", "-c", f"import {', '.join(package.imports)}"],
            cwd=WORKDIR,
            env=package.environment,
            timeout_s=COMMAND_WAIT_S,
        )
        if not imports.ok:
            return Tried(refused="the package did not import any more")
        wait_s = max(TRIAL_WAIT_MIN_S, TRIAL_WAIT_TIMES * whole.duration_s)
        judged = await judge(box, tests, wait_s=wait_s)
        if judged.timed_out:
            return Tried(refused="its tests did not end")
        if judged.outcome is None or judged.outcome.passed < whole.outcome.passed / 2:
            return Tried(refused="more than half of its tests failed")
        if not judged.outcome.failed or judged.reward != "0":
            return Tried(refused="no test noticed")
        write_solution(solution, package, plant.file)
        await box.upload(solution, "/solution")
        solved = await box.run(["bash", "/solution/solve.sh"], timeout_s=COMMAND_WAIT_S)
        if not solved.ok or (await judge(box, tests)).reward != "1":
            return Tried(refused="the original did not bring all tests back")
        return Tried()


async def lines_in_image(yard: Yard, image: str, texts: list[str]) -> list[str]:
    """Those of the texts that stand in some file of the image, whose lines would give them away.

    Raises:
        InvalidRequest: the image cannot be searched.
    """
    if not texts:
        return []
    async with yard.sandbox(image=image, cpu=CPUS, memory=f"{MEMORY_MB}MiB", max_ttl_s=SANDBOX_TTL_S) as box:
        done = await box.run(
            _SEARCH,
            stdin="\n".join(texts).encode(),
            timeout_s=SEARCH_WAIT_S,
            output_limit_bytes=SEARCH_BYTES_MAX,
        )
    if not done.ok or done.truncated:
        raise InvalidRequest(f"The image {image!r} cannot be searched with grep.", code="bad_image")
    return [text for text in texts if text.encode() in done.stdout]
