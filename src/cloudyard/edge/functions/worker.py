"""One worker: a sandbox in which a host runs that makes a cell for each call.

It is an instance of the backend like any other, but no sandbox of the yard: it has no record, so that after
a crash of the edge the sweep removes it. Knows the guest's frames and the host's, and nothing of what a call
is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from cloudyard.edge.backends.base import Instance, Nesting, Resizable
from cloudyard.edge.functions import inside
from cloudyard.edge.functions.frames import Answer, Decoder, HostError, pack
from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.host.masks import masks_here
from cloudyard.edge.host.seccomp import build_filters
from cloudyard.edge.poller import Poller
from cloudyard.edge.stdin import Stdin
from cloudyard.errors import CloudyardError, SandboxUnavailable, Unsupported
from cloudyard.model import MIB, Image, SandboxId, SandboxSpec
from cloudyard.wire.guest import STDERR, Frame, Kind, Options, Tag, encode

log = logging.getLogger(__name__)

HOST_COMMAND = 1  # a worker's guest runs this one command
START_WAIT_S = 60.0  # for Python and everything it is to import
STOP_WAIT_S = 60.0
START_MEMORY_BYTES = 1024 * MIB  # while it imports; then it gets what its call may use
OWN_MEMORY_BYTES = 16 * MIB  # of guest, host and cell, beyond what was imported
WORKER_PIDS = 256
WORKER_DISK = "64MiB"  # nothing but what a faulty cell leaves: calls write to memory
MEMORY_LOOK_S = 0.25  # how often it is looked whether a call's memory ran out
MEMORY_GRACE_S = 1.0  # for an answer after that, which a cell without memory may not come to
ANSWER_GRACE_S = 10.0  # past a program's own limit; a host that is silent for longer is given up
WORKER_CPU = 1.0
FOR_THE_CELL = frozenset({"stdin", "limit", "timeout_us", "scratch", "keep"})  # the rest is for the program
WORDS_MAX_BYTES = 4096  # of what a host complained of last
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Shape(NamedTuple):
    """What cannot be changed once a worker runs. Calls of different projects share none."""

    project: str
    image: str
    layers: tuple[str, ...]
    preload: tuple[str, ...]


class Worker:
    """A worker, from its start to its end. A call at a time."""

    def __init__(self, shape: Shape, instance: Instance, poller: Poller) -> None:
        self.shape = shape
        self.instance = instance
        self.calls = 0
        self.idle_since = 0.0
        self.spoiled = ""
        """Why nothing more may run in it; empty while it is as good as new."""
        self.worn = ""
        """Why it is to be replaced when its call is over, though it works."""
        self._memory = 0
        self._imported = 0
        self._ready = False
        self._asked = False
        self._answer: Answer | None = None
        self._hello: Answer | None = None
        self._refused: Answer | None = None
        self._changed = anyio.Event()
        self._decoder = Decoder()
        self._stdin = Stdin(HOST_COMMAND, b"", eof=False)
        self._words = bytearray()
        self._acks: dict[int, int] = {}
        self._ended = ""
        self._link = GuestLink(poller, instance.connect(), self)

    @classmethod
    async def start(
        cls, backend: Nesting, shape: Shape, image: Image, *, name: SandboxId, poller: Poller
    ) -> Worker:
        """Make one; leaves nothing if it fails.

        Raises:
            Unsupported: the image has no Python of a kind that can be used, or a module is missing.
            CloudyardError: it could not be made.
        """
        instance = await backend.create_nesting(name, _spec(shape.image, START_MEMORY_BYTES), image)
        worker = None
        try:
            worker = cls(shape, instance, poller)
            await worker._greet(image)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await (worker.stop() if worker is not None else instance.stop())
            raise
        return worker

    @property
    def ready(self) -> bool:
        """Its next cell waits, and nothing is left of the call before."""
        return self._ready and not self.spoiled

    def fit(self, memory: int) -> None:
        """Let the next program use so much memory, in bytes.

        Raises:
            SandboxUnavailable: the kernel refused; it is spoiled then.
        """
        if memory == self._memory:
            return
        assert isinstance(self.instance, Resizable), "workers are made by backends that can do this"
        try:
            self.instance.resize(_spec(self.shape.image, memory + self._imported + OWN_MEMORY_BYTES))
        except CloudyardError as exc:
            self.spoil(exc.message)
            raise self._lost(exc.message) from exc
        self._memory = memory

    def oom_kills(self) -> int:
        """Processes in it that the kernel has killed for memory. Raises SandboxUnavailable."""
        return self.instance.oom_kills()

    async def ask(self, request: Iterable[tuple[str, bytes]], *, timeout_s: float) -> Answer:
        """Have the next cell run a program.

        Args:
            request: fields as `inside/cell.py` reads them.
            timeout_s: the program's own limit, which the cell keeps.

        Raises:
            SandboxUnavailable: no answer came, or the worker is gone. It is spoiled then.
        """
        within_s = timeout_s + ANSWER_GRACE_S
        try:
            with anyio.move_on_after(within_s):
                await self.until_ready()
                self._ready, self._asked, self._answer = False, True, None
                self.calls += 1
                request = list(request)
                self._send(pack(field for field in request if field[0] not in FOR_THE_CELL))
                self._send(pack(field for field in request if field[0] in FOR_THE_CELL))
                await self._answered()
            self._asked = False
            if self._answer is None and self._ready:
                raise self._lost("its cell died")
            if self._answer is None:
                raise self._lost(f"it was silent for {within_s:g} s", code="worker_silent")
            return self._answer
        except BaseException as exc:
            self.spoil("a call was given up" if not isinstance(exc, CloudyardError) else exc.message)
            raise

    async def _answered(self) -> None:
        """Return when the cell has answered or died. Raises SandboxUnavailable when memory ran out, and with
        it, as it seems, what the cell would need to answer."""
        before, done = self.oom_kills(), False
        while not done:
            ran_out = self.oom_kills() > before
            with anyio.move_on_after(MEMORY_GRACE_S if ran_out else MEMORY_LOOK_S):
                await self._until(lambda: self._answer is not None or self._ready)
                done = True
            if ran_out and not done:
                raise self._lost("memory ran out in it")

    async def until_ready(self) -> None:
        """Return when the next call can begin. Raises SandboxUnavailable when it never will."""
        await self._until(lambda: self._ready)

    def spoil(self, why: str) -> None:
        """It is to be replaced."""
        self.spoiled = self.spoiled or why
        self._wake()

    async def stop(self) -> None:
        """End it; returns when nothing of it is left, or logs that something is."""
        self.spoil("it was stopped")
        with anyio.CancelScope(shield=True):
            self._link.close("the worker was stopped")
            try:
                with anyio.fail_after(STOP_WAIT_S):
                    await self.instance.stop()
            except (CloudyardError, TimeoutError):
                log.exception("A worker of %s could not be removed; the next start will.", self.shape.image)

    # --- what comes over the link -----------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        """A frame of the guest's."""
        match frame.kind:
            case Kind.OUTPUT:
                self._take(frame.number(Tag.STREAM), frame.number(Tag.OFFSET), frame.data(Tag.DATA))
            case Kind.STDIN_ACK:
                self._stdin.acknowledge(frame.number(Tag.OFFSET), closed=bool(frame.number(Tag.EOF, 0)))
                self._pump()
            case Kind.EXITED:
                self._end(f"its host ended ({self._how(frame)})")
            case Kind.NOT_STARTED:
                what, text = frame.text(Tag.WHAT), frame.text(Tag.TEXT)
                self._end(f"python3 could not be started: {what} {text}", no_python=what == "exec")
            case Kind.ERROR:
                self._end(f"its guest complained: {frame.text(Tag.TEXT)}")
            case _:
                pass

    def on_quiet(self) -> None:
        """All that came together was handed over."""
        for stream, offset in self._acks.items():
            self._link.send(encode(Kind.OUTPUT_ACK, HOST_COMMAND, (Tag.STREAM, stream), (Tag.OFFSET, offset)))
        self._acks.clear()

    def on_broken(self, why: str) -> None:
        """The link broke."""
        self._end(why)

    def _take(self, stream: int, offset: int, data: bytes) -> None:
        self._acks[stream] = offset + len(data)
        if stream == STDERR:
            self._words += data
            del self._words[:-WORDS_MAX_BYTES]
            return
        try:
            for answer in self._decoder.feed(data):
                self._hear(answer)
        except HostError as exc:
            self._end(f"its host broke the protocol: {exc.message}")

    def _hear(self, answer: Answer) -> None:
        match answer.text("kind"):
            case "hello":
                self._hello = answer
            case "refused":
                self._refused = answer
            case "done" if self._asked and self._answer is None:
                self._answer = answer
            case "ready":
                self._ready = True
                if left := answer.text("left"):
                    self.spoil(f"a call left {left}")
            case other:
                raise HostError(f"a frame of kind {other!r} that nobody waits for")
        self._wake()

    # --- inside -----------------------------------------------------------------------------------------

    async def _greet(self, image: Image) -> None:
        await self._link.greet()
        environment = {**image.config.env, **ENVIRONMENT}
        self._link.send(
            encode(
                Kind.EXEC,
                HOST_COMMAND,
                *((Tag.ARG, part.encode()) for part in inside.ARGV),
                *((Tag.ENV, f"{name}={value}".encode()) for name, value in environment.items()),
                (Tag.OPTIONS, Options.STDIN),
            )
        )
        self._send(
            inside.STDIN + pack(_walls() + [("preload", module.encode()) for module in self.shape.preload])
        )
        with anyio.move_on_after(START_WAIT_S):
            try:
                await self._until(lambda: self._ready or self._refused is not None)
            except SandboxUnavailable:
                self._raise_for_start()
                raise
        if self._refused is not None or not self._ready or self._hello is None:
            self._raise_for_start()
            raise self._lost(f"it was not ready within {START_WAIT_S:g} s")
        self._imported = self._hello.number("rss")

    def _raise_for_start(self) -> None:
        """Raise what the image lacks, where it is the image's fault."""
        image = self.shape.image
        words = self._words.decode("utf-8", "replace")
        if self.spoiled == NO_PYTHON or "Error: No module named" in words or "SyntaxError" in words:
            raise Unsupported(
                f"The image {image!r} has no Python for calls: {self._ended or self._last_words()}.",
                code="no_python",
                hint="Calls need Debian's whole python3, 3.9 or later. "
                f"Build the image with it: cloudyard image build debian --name {image} --package python3",
            )
        if self._refused is not None and self._refused.text("reason") == "preload":
            raise Unsupported(
                f"Preloading into a worker of the image {image!r} failed: {self._refused.text('text')}.",
                code="no_module",
                hint=f"Install it into the image: cloudyard image build debian --name {image} "
                "--package python3 --package python3-...; or leave it out of `preload`.",
            )
        if self._refused is not None:
            raise Unsupported(
                f"Cells for calls cannot be made on this machine: {self._refused.text('text')}.",
                code="cells_refused",
                hint="Run cloudyard doctor; calls need pid, mount and ipc namespaces inside a sandbox.",
            )

    def _send(self, data: bytes) -> None:
        self._stdin.offer(self._stdin.end, data, eof=False)
        self._pump()

    def _pump(self) -> None:
        if frames := self._stdin.frames():
            self._link.send(frames)

    def _end(self, why: str, *, no_python: bool = False) -> None:
        self._ended = why
        self.spoil(NO_PYTHON if no_python else why)

    def _how(self, frame: Frame) -> str:
        signal = frame.maybe_number(Tag.SIGNAL)
        return f"signal {signal}" if signal is not None else f"exit code {frame.number(Tag.EXIT_CODE, -1)}"

    def _last_words(self) -> str:
        return self._words.decode("utf-8", "replace").strip()[-400:] or "it said nothing"

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._ended:
                raise self._lost(self._ended)
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _lost(self, why: str, *, code: str = "worker_lost") -> SandboxUnavailable:
        return SandboxUnavailable(
            f"A worker for calls in the image {self.shape.image!r} was lost: {why} ({self._last_words()}).",
            code=code,
            fault="infra",
            hint="Make the call again: nothing of it is left.",
            retry_safe=True,
        )


def _walls() -> list[tuple[str, bytes]]:
    """What stands around each call of a worker, as inside/walls.py reads it: what a sandbox has too."""
    masks = masks_here()
    return [
        ("filter", build_filters()["sandbox"]),
        *(("hidden_file", name.encode()) for name in masks.files),
        *(("hidden_folder", name.encode()) for name in masks.folders),
    ]


NO_PYTHON = "the image has no python3"


def _spec(image: str, memory: int) -> SandboxSpec:
    return SandboxSpec(
        image=image, cpu=WORKER_CPU, memory=memory, pids=WORKER_PIDS, disk=WORKER_DISK, hostname="function"
    )
