"""Calls on this node: which programs a call runs, one after the other, each in a cell of a worker."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from uuid import uuid4

from anyio import create_task_group

from cloudyard.edge.backends.base import Backend, Nesting
from cloudyard.edge.functions import programs
from cloudyard.edge.functions.pool import Lease, Pool
from cloudyard.edge.functions.programs import Outcome, Run
from cloudyard.edge.functions.worker import Shape, Worker
from cloudyard.edge.poller import Poller
from cloudyard.errors import CloudyardError, InvalidRequest, SandboxUnavailable, Unsupported
from cloudyard.model import CallResult, CallSpec, Image, SandboxId

WORKERS_PER_CORE = 2
TRIES = 3  # of a run whose worker was lost, through no doing of its own
MEMORY_SHARE = 0.5  # of the node's memory, for all calls under way together


class Functions:
    """Makes calls. Used as an async context manager, inside that of its backend.

    Workers are not counted among what the edge has promised to sandboxes: they are few, whatever is asked
    for, and what their calls may use together is bounded by a share of the node's memory.

    Args:
        edge: the edge's id.
        backend: makes the workers' sandboxes; one that can nest.
        images: an image by name; raises NotFound.
        cores: of this node.
    """

    def __init__(self, edge: str, backend: Backend, images: Callable[[str], Image], *, cores: float) -> None:
        self._edge = edge
        self._backend = backend
        self._images = images
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._pool = Pool(
            self._start,
            size=max(2, round(cores * WORKERS_PER_CORE)),
            memory_max_bytes=int(memory * MEMORY_SHARE),
        )
        self._poller = Poller()

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
        """Run the code and say how it ended. Cancelling it kills every process of the call.

        Args:
            spec: checked, and its memory in bytes.
            project: whose call it is; calls of different projects share no worker.
            cause: the id of the request behind it.

        Raises:
            NotFound: there is no such image.
            Unsupported: the image lacks Python (`no_python`), a module (`no_module`) or a compiler
                (`no_compiler`); the hint says what to install.
            LimitExceeded: too many calls wait (`retry_safe`), or it wants more memory than there is.
            InvalidRequest: its files do not fit into the memory it may use.
            SandboxUnavailable: its worker was lost, through no doing of its own.
        """
        image = self._images(spec.image)
        shape = Shape(project, image.name, tuple(image.layers), tuple(spec.preload))
        assert isinstance(spec.memory, int), "the spec is normalised"
        async with self._pool.lease(shape, spec.memory) as lease:
            return await _make(lease, spec, image)

    async def _start(self, shape: Shape) -> Worker:
        assert isinstance(self._backend, Nesting), "the backend can make workers"
        name = SandboxId(f"fn-{self._edge}-{uuid4().hex[:12]}")
        image = self._images(shape.image)
        return await Worker.start(self._backend, shape, image, name=name, poller=self._poller)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(self._poller.run)
                async with self._pool:
                    yield
                tasks.cancel_scope.cancel()
        finally:
            self._poller.close()


async def _make(lease: Lease, spec: CallSpec, image: Image) -> CallResult:
    env = programs.environment(spec, image.config.env)
    program = b""
    if spec.language == "c":
        outcome = await _run_somewhere(lease, programs.compiling(spec), image, env)
        if outcome.exit_code != 0 or not outcome.kept:
            _check_compiler(outcome, image.name)
            return programs.not_compiled(outcome)
        program = outcome.kept
    if not spec.cases:
        run = programs.running(spec, spec.stdin, program)
        return programs.result_of(await _run_somewhere(lease, run, image, env), timeout_s=spec.timeout_s)
    cases = []
    for case in spec.cases:
        run = programs.running(spec, case.stdin, program, compared_to=case.expected)
        outcome = await _run_somewhere(lease, run, image, env)
        cases.append(programs.judged(case, outcome, spec.compare, keep=spec.output_limit_bytes))
        if spec.stop_at_first and cases[-1].verdict != "passed":
            break
    return programs.result_of_cases(spec, cases)


async def _run_somewhere(lease: Lease, run: Run, image: Image, env: dict[str, str]) -> Outcome:
    """The run's outcome, in another worker where one was lost: nothing of a run outlives it."""
    for left in reversed(range(TRIES)):
        try:
            return await _run_once(lease, run, image, env)
        except SandboxUnavailable as exc:
            if exc.code != "worker_lost" or not left:
                raise
    raise AssertionError("the last try gives or raises")


async def _run_once(lease: Lease, run: Run, image: Image, env: dict[str, str]) -> Outcome:
    """The run's outcome, whatever it has done to its worker."""
    worker = await lease.worker()
    worker.fit(run.memory_bytes)
    before = worker.oom_kills()
    try:
        answer = await worker.ask(run.fields(env), timeout_s=run.timeout_s)
    except SandboxUnavailable:
        if _kills_since(before, worker):
            return programs.killed_for_memory()  # it has taken what ran it with it
        raise
    oom = _kills_since(before, worker) > 0
    if oom:
        worker.worn = "memory ran out in it"
    if problem := answer.text("failed"):
        worker.spoil(f"a cell failed: {problem}")
        raise SandboxUnavailable(
            f"The call was not run: its cell failed ({problem}).",
            code="worker_lost",
            fault="infra",
            hint="Make the call again: nothing of it is left.",
            retry_safe=True,
        )
    if refused := answer.text("refused"):
        raise _refused(refused, image.name, run)
    return programs.outcome_of(answer, oom=oom)


def _kills_since(before: int, worker: Worker) -> int:
    try:
        return worker.oom_kills() - before
    except SandboxUnavailable:
        return 0


def _refused(why: str, image: str, run: Run) -> CloudyardError:
    """Our error for a program that could not be started."""
    if run.argv[0] == programs.COMPILER:
        return _no_compiler(f"The image {image!r} has no C compiler: {why}.", image)
    return InvalidRequest(
        f"The call could not be started: {why}.",
        code="not_started",
        hint="Its files may take half of the memory that it may use; ask for more memory, or send less.",
        fault="policy",
    )


def _check_compiler(outcome: Outcome, image: str) -> None:
    """Raise for a compiler that lacks its headers, which is none of the code's doing."""
    if any(missing in outcome.stderr for missing in programs.NO_HEADERS):
        raise _no_compiler(f"The image {image!r} has a C compiler without the C library's headers.", image)


def _no_compiler(message: str, image: str) -> Unsupported:
    return Unsupported(
        message,
        code="no_compiler",
        hint=f"Build it with one: cloudyard image build debian --name {image} "
        "--package python3 --package gcc --package libc6-dev.",
    )
