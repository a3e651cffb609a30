"""A call from its spec to its result: which program runs, in how many cells, and what came of each.

Knows workers by what they answer, and the pool that gives them out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from cloudyard.edge.backends.base import Nesting
from cloudyard.edge.functions.frames import Answer
from cloudyard.edge.functions.judging import Run, case_of, result_of, run_of
from cloudyard.edge.functions.pool import Lease, Pool
from cloudyard.edge.functions.worker import Shape, Worker
from cloudyard.edge.poller import Poller
from cloudyard.errors import InvalidRequest, SandboxUnavailable, Unsupported
from cloudyard.model import (
    CALL_COMPILE_MAX_S,
    CALL_OUTPUT_MAX_BYTES,
    KIB,
    MIB,
    CallResult,
    CallSpec,
    CaseResult,
    Image,
    SandboxId,
)

WORKERS_PER_CORE = 2
MEMORY_SHARE = 0.5  # of the node's memory, for all calls under way together
ANSWER_GRACE_S = 15.0  # from a call's own limit to its answer; then its worker is given up
COMPILE_MEMORY_BYTES = 512 * MIB  # a compiler needs what the program may not
SCRATCH_SHARE = 0.5  # of a call's memory may lie in each of its writable directories: full is not killed
COMPARE_SPARE_BYTES = 4 * KIB  # blanks that a comparison by lines does not count
HOME = "/tmp"
COMPILERS = ("cc", "gcc", "clang", "tcc")
COMPILE = (
    'for cc in {names}; do command -v $cc >/dev/null && exec $cc -O2 -o main main.c -lm "$@"; done; exit 127'
)
Fields = list[tuple[str, bytes]]


class Functions:
    """Calls on this node. Used as an async context manager, within the backend's.

    Args:
        backend: makes the workers' sandboxes.
        images: an image by name; raises NotFound.
        edge: the edge's id, for the workers' names.
        workers: how many there may be; by the cores of this machine if left out.
    """

    def __init__(
        self, backend: Nesting, *, images: Callable[[str], Image], edge: str, workers: int | None = None
    ) -> None:
        self._backend = backend
        self._images = images
        self._edge = edge
        self._poller = Poller()
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._pool = Pool(
            self._start,
            size=workers or WORKERS_PER_CORE * len(os.sched_getaffinity(0)),
            memory_max_bytes=int(total * MEMORY_SHARE),
        )
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._poller.run)
        await self._tasks.start(self._pool.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None, "it was entered"
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._poller.close()

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
        memory = spec.memory
        assert isinstance(memory, int), "the spec is normalised"
        async with self._pool.lease(shape, memory) as lease:
            return await Call(spec, image, memory, lease).make()

    async def _start(self, shape: Shape) -> Worker:
        name = SandboxId(f"fn-{self._edge}-{uuid4().hex[:12]}")
        image = self._images(shape.image)
        return await Worker.start(self._backend, shape, image, name=name, poller=self._poller)


class Call:
    """One call, with a worker of its own for as long as it takes."""

    def __init__(self, spec: CallSpec, image: Image, memory: int, lease: Lease) -> None:
        self._spec = spec
        self._memory = memory
        self._lease = lease
        defaults = {"HOME": HOME, "USER": "call", "LOGNAME": "call"}
        self._env = {**image.config.env, **defaults, **spec.env}
        self._files = [_file(path, content) for path, content in spec.files.items()]

    async def make(self) -> CallResult:
        """Make it. Raises as `Functions.call`."""
        spec = self._spec
        program = self._program()
        if spec.language == "c":
            compiled = await self._compile()
            if isinstance(compiled, CallResult):
                return compiled
            program = [*self._argv("./main"), _file("main", compiled, mode=0o755)]
        if not spec.cases:
            run = await self._run(program, spec.stdin, limit=spec.output_limit_bytes)
            return result_of(run, keep=spec.output_limit_bytes, timeout_s=spec.timeout_s)
        return CallResult(cases=await self._judge(program))

    async def _judge(self, program: Fields) -> list[CaseResult]:
        spec = self._spec
        results: list[CaseResult] = []
        left_out = left_err = CALL_OUTPUT_MAX_BYTES
        for case in spec.cases:
            limit = max(spec.output_limit_bytes, len(case.expected or b"") + COMPARE_SPARE_BYTES)
            run = await self._run(program, case.stdin, limit=limit)
            result = case_of(
                run,
                case,
                compare=spec.compare,
                keep_out=min(spec.output_limit_bytes, left_out),
                keep_err=min(spec.output_limit_bytes, left_err),
            )
            left_out -= len(result.stdout)
            left_err -= len(result.stderr)
            results.append(result)
            if spec.stop_at_first and result.verdict != "passed":
                break
        return results

    def _program(self) -> Fields:
        """What every run of it is told beyond stdin and limits."""
        code = self._spec.code.encode()
        match self._spec.language:
            case "python":
                # Python reads these when it starts, and the worker's has: another one is started.
                anew = any(name.startswith("PYTHON") for name in self._spec.env)
                argv = self._argv("python3", "main.py") if anew else self._argv("main.py")
                return [*argv, ("how", b"exec" if anew else b"here"), _file("main.py", code)]
            case "shell":
                return [*self._argv("/bin/sh", "main.sh"), _file("main.sh", code)]
            case "c":
                return []

    def _argv(self, *first: str) -> Fields:
        return [("arg", part.encode()) for part in (*first, *self._spec.args)]

    async def _compile(self) -> bytes | CallResult:
        """The program, or what the compiler said."""
        script = COMPILE.format(names=" ".join(COMPILERS))
        fields = [("arg", part.encode()) for part in ("/bin/sh", "-c", script)]
        fields += [_file("main.c", self._spec.code.encode()), ("keep", b"/tmp/main")]
        limit = self._spec.output_limit_bytes
        memory = max(self._memory, COMPILE_MEMORY_BYTES)
        answer, run = await self._ask(fields, b"", limit=limit, timeout_s=CALL_COMPILE_MAX_S, memory=memory)
        no_headers = b"stdio.h: No such file" in run.stderr or b"cannot find crt1.o" in run.stderr
        if run.exit_code == 127 or no_headers:
            lacks = "the C library's headers" if no_headers else "a C compiler"
            raise Unsupported(
                f"The image {self._spec.image!r} lacks {lacks}.",
                code="no_compiler",
                hint=f"Build it with them: cloudyard image build {self._spec.image} "
                "--package python3 --package gcc --package libc6-dev",
            )
        program = answer.data("kept")
        if run.exit_code == 0 and program:
            return program
        return result_of(run, keep=limit, timeout_s=CALL_COMPILE_MAX_S, phase="compile")

    async def _run(self, program: Fields, stdin: bytes, *, limit: int) -> Run:
        timeout_s, memory = self._spec.timeout_s, self._memory
        _, run = await self._ask(program, stdin, limit=limit, timeout_s=timeout_s, memory=memory)
        return run

    async def _ask(
        self, fields: Fields, stdin: bytes, *, limit: int, timeout_s: float, memory: int
    ) -> tuple[Answer, Run]:
        """Run it in a cell."""
        request = [
            *fields,
            *self._files,
            *(("env", f"{name}={value}".encode()) for name, value in self._env.items()),
            ("stdin", stdin),
            ("limit", b"%d" % limit),
            ("timeout_us", b"%d" % (timeout_s * 1e6)),
            ("scratch", b"%d" % (memory * SCRATCH_SHARE)),
        ]
        worker = await self._lease.worker()
        worker.fit(memory)
        before = worker.instance.oom_kills()
        try:
            answer = await worker.ask(request, within_s=timeout_s + ANSWER_GRACE_S)
        except SandboxUnavailable:
            kills = _kills(worker, before)
            if not kills:
                raise
            return Answer({}), Run(signal=9, oom_kills=kills)  # it took what runs it with it
        kills = _kills(worker, before)
        if kills:
            worker.worn = "memory ran out in it"
        if problem := answer.text("failed"):
            worker.worn = f"a cell failed: {problem}"
            raise SandboxUnavailable(
                f"The call was not run: its cell failed ({problem}).",
                code="cell_failed",
                fault="infra",
                hint="Make the call again: nothing of it is left.",
                retry_safe=True,
            )
        if problem := answer.text("refused"):
            raise InvalidRequest(
                f"The call was not run: {problem}.",
                code="not_started",
                hint="Its files may be too large for the memory it may use; half of that can be files.",
                fault="policy",
            )
        return answer, run_of(answer, oom_kills=kills)


def _kills(worker: Worker, before: int) -> int:
    try:
        return worker.instance.oom_kills() - before
    except SandboxUnavailable:
        return 0


def _file(path: str, content: bytes, *, mode: int = 0o644) -> tuple[str, bytes]:
    return "file", b"%o\0%s\0%s" % (mode, path.encode(), content)
