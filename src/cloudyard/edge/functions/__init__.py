"""Stateless calls on this node: code runs in a cell of a warm worker (docs/design/functions.md).

`host` runs inside workers and is never imported here; `worker` speaks with it, `pool` keeps workers warm,
`programs` knows what a call is and what came of it.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

from anyio import CancelScope, create_task_group

from cloudyard.edge.backends.base import Backend, Nesting
from cloudyard.edge.functions import programs
from cloudyard.edge.functions.pool import Pool, Shape
from cloudyard.edge.functions.programs import Outcome, Run
from cloudyard.edge.functions.worker import Worker
from cloudyard.edge.poller import Poller
from cloudyard.errors import CloudyardError, SandboxUnavailable, Unsupported
from cloudyard.model import MIB, CallResult, CallSpec, Image, SandboxId, SandboxSpec

WORKERS_PER_CORE = 2
WORKER_CPU = 1.0  # cores
WORKER_PIDS = 256
STARTING_MEMORY_BYTES = 1024 * MIB  # until the host has imported what it is to; then each call's own bound
TRIES = 3  # of a call whose worker broke through no doing of its own
_ID_CHARS = string.ascii_lowercase + string.digits


class Functions:
    """Makes calls. Used as an async context manager, inside that of its backend.

    Args:
        edge: the edge's id.
        backend: makes the workers' sandboxes.
        images: an image by name; raises NotFound.
        cores: of this node.
    """

    def __init__(self, edge: str, backend: Backend, images: Callable[[str], Image], *, cores: float) -> None:
        self._edge = edge
        self._backend = backend
        self._images = images
        self._size = max(2, round(cores * WORKERS_PER_CORE))

    async def __aenter__(self) -> Self:
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is under way in the body is its own affair: the task group below only comes to its end.
        await self._running.__aexit__(None, None, None)

    async def call(self, spec: CallSpec, *, project: str, cause: str) -> CallResult:
        """Run the code and say how it ended. See `edge.calls.Functions`, whose promise this keeps."""
        image = self._images(spec.image)
        shape = Shape(image.name, tuple(image.layers), tuple(spec.preload))
        program = b""
        if spec.language == "c":
            outcome = await self._try(image, shape, spec, programs.compiling(spec))
            if outcome.exit_code != 0 or not outcome.kept:
                return programs.not_compiled(outcome)
            program = outcome.kept
        if not spec.cases:
            outcome = await self._try(image, shape, spec, programs.running(spec, spec.stdin, program))
            return programs.result_of(outcome)
        cases = []
        for case in spec.cases:
            outcome = await self._try(image, shape, spec, programs.running(spec, case.stdin, program))
            cases.append(programs.judged(case, outcome, spec.compare))
            if spec.stop_at_first and cases[-1].verdict != "passed":
                break
        return programs.result_of_cases(spec, cases)

    async def _try(self, image: Image, shape: Shape, spec: CallSpec, run: Run) -> Outcome:
        """The run's outcome, in another worker where one broke: nothing of a call outlives it."""
        for left in reversed(range(TRIES)):
            try:
                async with self._pool.worker(shape) as worker:
                    return await self._run_in(worker, image, spec, run)
            except SandboxUnavailable as exc:
                if exc.code != "worker_lost" or not left:
                    raise
        raise AssertionError("the last try gives or raises")

    async def _run_in(self, worker: Worker, image: Image, spec: CallSpec, run: Run) -> Outcome:
        before = worker.oom_kills()
        fields = run.fields(programs.environment(spec, image.config.env))
        answer = await worker.run(fields, timeout_s=run.timeout_s, memory_bytes=run.memory_bytes)
        oom = worker.oom_kills() > before
        if oom:
            worker.broken = worker.broken or "something in it was killed for memory"
        if answer is None:
            if oom:
                return programs.killed_for_memory()
            raise SandboxUnavailable(
                "The call was lost: its cell was killed, and not for memory.",
                code="worker_lost",
                fault="infra",
                retry_safe=True,
            )
        if refused := answer.text("refused"):
            raise _refused(refused, image.name, run)
        return programs.outcome_of(answer, oom=oom)

    async def _make(self, shape: Shape) -> Worker:
        image = self._images(shape.image)
        spec = SandboxSpec(image=image.name, cpu=WORKER_CPU, memory=STARTING_MEMORY_BYTES, pids=WORKER_PIDS)
        unique = "".join(secrets.choice(_ID_CHARS) for _ in range(12))
        assert isinstance(self._backend, Nesting), "the backend can make workers"
        instance = await self._backend.create_nesting(SandboxId(f"sb-{self._edge}-{unique}"), spec, image)
        try:
            return await Worker.start(instance, spec, image=image, poller=self._poller, preload=shape.preload)
        except BaseException:
            with CancelScope(shield=True), suppress(CloudyardError):
                await instance.stop()
            raise

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        poller = self._poller = Poller()
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(poller.run)
                async with create_task_group() as behind:
                    self._pool = Pool(self._make, size=self._size, behind=behind)
                    try:
                        yield
                    finally:
                        with CancelScope(shield=True):
                            await self._pool.drain()
                tasks.cancel_scope.cancel()
        finally:
            poller.close()


def _refused(why: str, image: str, run: Run) -> CloudyardError:
    """Our error for a program that could not be started."""
    if run.argv[0] == programs.COMPILER:
        return Unsupported(
            f"The image {image} has no C compiler: {why}.",
            code="no_compiler",
            hint="Build one with it: cloudyard image build debian --package python3 --package gcc "
            "--package libc6-dev.",
        )
    return SandboxUnavailable(f"The program could not be started: {why}.", code="not_started", fault="infra")
