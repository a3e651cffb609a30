"""What tests of stateless calls share: functions on a container backend of their own, and calls in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.functions import Functions
from cloudyard.images.depot import Depot
from cloudyard.model import CallResult, CallSpec, Case, CaseResult, normalised_call
from support import comm, yard_pids

EDGE = "e1"
CORES = 1.0  # so that there are two workers
AGAIN = "print('as new')"


class Calls:
    """Makes calls as an edge does."""

    def __init__(self, functions: Functions, options: ContainerOptions) -> None:
        self.functions = functions
        self.options = options

    async def __call__(self, code: str, *, project: str = "p", cause: str = "c", **more: Any) -> CallResult:
        spec = normalised_call(CallSpec(code=dedent(code), **{"image": "debian", **more}))
        return await self.functions.call(spec, project=project, cause=cause)

    async def one_after_the_other(self, *codes: str, **more: Any) -> list[CaseResult]:
        """Each code as a run of its own, all of them in the same worker."""
        choose = "import sys\nexec(compile(sys.stdin.read(), 'main.py', 'exec'))"
        cases = [Case(stdin=dedent(code).encode()) for code in codes]
        return (await self(choose, cases=cases, **more)).cases

    async def work_well(self) -> None:
        """The next calls, one for each worker and one more, are as good as ever."""
        for _ in range(3):
            done = await self(AGAIN)
            assert (done.text, done.stderr, done.exit_code, done.fault) == ("as new\n", b"", 0, None)


def hosts(options: ContainerOptions) -> list[int]:
    """Host pids of the programs in this yard's workers that make cells: Python, begun by a guest's keeper."""
    found = []
    for pid in yard_pids(options.tag):
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if comm(parent) == "keeper" and comm(pid).startswith("python"):  # the guest's hand on a command
                found.append(pid)
    return found


@asynccontextmanager
async def calls_in(options: ContainerOptions, depot: Path) -> AsyncIterator[Calls]:
    """Functions on a backend with these options."""
    images = Depot(depot)
    async with (
        ContainerBackend(options, images.layer_path) as backend,
        Functions(EDGE, backend, images.image, cores=CORES) as functions,
    ):
        yield Calls(functions, options)
