"""A worker: a sandbox of its own in which the host program makes a cell for each call, one at a time.

Knows an instance, the guest's frames and the host's; not what a call is for.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import anyio
from msgspec.structs import replace

from cloudyard.edge.backends.base import Instance, Resizable
from cloudyard.edge.functions.frames import Answer, Decoder, pack
from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.poller import Poller
from cloudyard.edge.stdin import Stdin
from cloudyard.edge.translate import acknowledgement
from cloudyard.errors import CloudyardError, SandboxUnavailable, Unsupported
from cloudyard.model import Image, SandboxSpec
from cloudyard.wire.guest import STDERR, STDOUT, Frame, Kind, Options, Tag, encode

HOST = Path(__file__).with_name("host.py").read_bytes()
BOOT = (  # reads the host's text from stdin, where the calls will come from too
    "import os\n"
    "text = b''\n"
    "size = int.from_bytes(os.read(0, 4), 'little')\n"
    "while len(text) < size: text += os.read(0, size - len(text))\n"
    "exec(compile(text, '<host>', 'exec'))\n"
)
COMMAND = 1  # the host's number; the guest runs nothing else
HELLO_MAX_S = 60.0  # for Python's start and all imports of `preload`
READY_MAX_S = 10.0  # from the end of a call to the next cell
ANSWER_GRACE_S = 10.0  # past a run's own time limit
WORDS_MAX_BYTES = 2048  # kept of what the host or its interpreter says on stderr


class Worker:
    """One worker. It is of no use any more once `broken` says why."""

    def __init__(self, instance: Instance, spec: SandboxSpec) -> None:
        self._instance = instance
        self._spec = spec
        self._decoder = Decoder()
        self._answers: deque[Answer] = deque()
        self._changed = anyio.Event()
        self._stdin = Stdin(COMMAND, len(HOST).to_bytes(4, "little") + HOST, eof=False)
        self._read = {STDOUT: 0, STDERR: 0}
        self._unacknowledged: set[int] = set()
        self._words = b""
        self._link: GuestLink | None = None
        self._memory_bytes = 0
        self._own_bytes = 0
        self.ready = False
        """The next cell waits for a call."""
        self.calls = 0
        """Taken so far."""
        self.broken = ""

    @classmethod
    async def start(
        cls, instance: Instance, spec: SandboxSpec, *, image: Image, poller: Poller, preload: Sequence[str]
    ) -> Self:
        """Start the host in a new instance. The instance stays the caller's to stop if it fails.

        Raises:
            Unsupported: the image has no Python, or a module of `preload` cannot be imported.
            SandboxUnavailable: it did not work.
        """
        worker = cls(instance, spec)
        link = worker._link = GuestLink(poller, instance.connect(), worker)
        await link.greet()
        env = [(Tag.ENV, f"{name}={value}".encode()) for name, value in image.config.env.items()]
        argv = [(Tag.ARG, part.encode()) for part in ("python3", "-c", BOOT)]
        link.send(encode(Kind.EXEC, COMMAND, *argv, *env, (Tag.OPTIONS, int(Options.STDIN))))
        worker._say(pack(("preload", module.encode()) for module in preload))
        hello = await worker._next(HELLO_MAX_S)
        if hello.text("kind") != "hello":
            raise worker._refused(hello, image.name)
        worker._own_bytes = instance.usage().memory_bytes
        return worker

    async def run(
        self, fields: Iterable[tuple[str, bytes]], *, timeout_s: float, memory_bytes: int
    ) -> Answer | None:
        """Run one program in the next cell.

        Args:
            fields: the host's frame.
            timeout_s: the run's own time limit, which the cell keeps.
            memory_bytes: what it may use beyond what the worker itself does.

        Returns:
            The cell's answer; None when the cell was killed before it could give one.

        Raises:
            SandboxUnavailable: the worker broke.
        """
        self.calls += 1
        if not self.ready:
            await self._await_ready()
        self._allow(memory_bytes)
        self.ready = False
        self._say(pack(fields))
        answer = await self._next(timeout_s + ANSWER_GRACE_S)
        if answer.text("kind") == "ready":
            self.broken = "a cell of it was killed"
            return None
        if problem := answer.text("failed"):
            self._break(f"a cell could not be made: {problem}")
        self._check()
        return answer

    def oom_kills(self) -> int:
        """Processes in it that the kernel has killed for memory. Raises SandboxUnavailable."""
        return self._instance.oom_kills()

    async def stop(self) -> None:
        """End it with all that runs in it, and give everything back."""
        if self._link is not None:
            self._link.close("the worker is not needed any more")
        await self._instance.stop()

    # --- what the link hands over -----------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        """Do what a frame asks for."""
        match frame.kind:
            case Kind.OUTPUT:
                stream, data = frame.number(Tag.STREAM), frame.data(Tag.DATA)
                self._read[stream] = frame.number(Tag.OFFSET) + len(data)
                self._unacknowledged.add(stream)
                self._take(stream, data)
            case Kind.STDIN_ACK:
                self._stdin.acknowledge(frame.number(Tag.OFFSET), closed=bool(frame.number(Tag.EOF, 0)))
                self._send(self._stdin.frames())
            case Kind.EXITED:
                said = self._words.decode("utf-8", "replace").strip()
                self._break(f"its host has ended{': ' + said if said else ''}")
            case Kind.NOT_STARTED:
                missing = frame.text(Tag.WHAT) == "exec" and frame.number(Tag.ERRNO, 0) == errno.ENOENT
                fields = {"kind": b"refused", "reason": b"no_python" if missing else b"start"}
                self._push(Answer({**fields, "text": frame.text(Tag.TEXT).encode()}))
            case _:
                pass  # what else there is says nothing of the host

    def on_quiet(self) -> None:
        """Acknowledge all that came together at once."""
        for stream in self._unacknowledged:
            self._send(acknowledgement(COMMAND, stream, self._read[stream]))
        self._unacknowledged.clear()

    def on_broken(self, why: str) -> None:
        """The link broke: nothing more comes."""
        self._break(why)

    # --- inside -----------------------------------------------------------------------------------------

    def _take(self, stream: int, data: bytes) -> None:
        if stream == STDERR:
            self._words = (self._words + data)[-WORDS_MAX_BYTES:]
            return
        try:
            for answer in self._decoder.feed(data):
                self._push(answer)
        except CloudyardError as exc:
            self._break(f"its host broke the protocol: {exc.message}")

    def _push(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._wake()

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _next(self, within_s: float) -> Answer:
        with anyio.move_on_after(within_s):
            while not self._answers and not self.broken:
                await self._changed.wait()
        if self._answers:
            return self._answers.popleft()
        self._break(f"its host said nothing for {within_s:g} s")
        raise self._lost()

    async def _await_ready(self) -> None:
        answer = await self._next(READY_MAX_S)
        if answer.text("kind") != "ready":
            self._break(f"its host could not go on: {answer.text('text')}")
            raise self._lost()
        if answer.number("status"):
            self.broken = "the cell before was killed"
            raise self._lost()
        self.ready = True

    def note_ready(self) -> bool:
        """Whether the next cell is known to wait, without waiting for that."""
        if not self.ready and self._answers and _is_ready(self._answers[0]):
            self._answers.popleft()
            self.ready = True
        return self.ready

    def _allow(self, memory_bytes: int) -> None:
        if memory_bytes == self._memory_bytes or not isinstance(self._instance, Resizable):
            return
        self._instance.resize(replace(self._spec, memory=self._own_bytes + memory_bytes))
        self._memory_bytes = memory_bytes

    def _say(self, data: bytes) -> None:
        self._stdin.offer(self._stdin.end, data, eof=False)
        self._send(self._stdin.frames())

    def _send(self, data: bytes) -> None:
        if data and self._link is not None:
            self._link.send(data)

    def _check(self) -> None:
        if self.broken:
            raise self._lost()

    def _lost(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"The call was lost with its worker: {self.broken}.",
            code="worker_lost",
            fault="infra",
            retry_safe=True,
        )

    def _refused(self, answer: Answer, image: str) -> CloudyardError:
        text = answer.text("text")
        match answer.text("reason"):
            case "no_python":
                return Unsupported(
                    f"The image {image} has no python3, which calls need.",
                    code="no_python",
                    hint="Build one with it: cloudyard image build debian --package python3.",
                )
            case "preload":
                return Unsupported(
                    f"A module of `preload` cannot be imported in the image {image}: {text}.",
                    code="no_module",
                    hint="Build the image with its package, such as --package python3-numpy.",
                )
            case _:
                return SandboxUnavailable(
                    f"A worker of the image {image} could not be started: {text}.", code="worker_failed"
                )


def _is_ready(answer: Answer) -> bool:
    """The next cell waits, and the one before came to a good end."""
    return answer.text("kind") == "ready" and answer.number("status") == 0
