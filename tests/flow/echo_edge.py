"""An edge without sandboxes: it answers every call over the real NATS, from memory, so that the gateway can
be tested alone.

Commands: `echo WORDS` prints them, `hang` never ends, `flood N` has printed N bytes. Files live in a
dictionary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from cloudyard.errors import Conflict, Forbidden, LimitExceeded, NotFound, YardUnavailable
from cloudyard.fabric import Fabric
from cloudyard.model import (
    AnyOp,
    AnyResult,
    CommandInfo,
    CommandList,
    CommandSpec,
    DirListing,
    Done,
    EdgeLoad,
    Exec,
    ExecResult,
    FileChunk,
    FileInfo,
    GetSandbox,
    Heartbeat,
    KeepAlive,
    ListCommands,
    ListDir,
    MakeDir,
    OutputChunk,
    ReadFile,
    ReadOutput,
    Remove,
    Resize,
    SandboxInfo,
    SendStdin,
    Signal,
    Start,
    Stat,
    StopSandbox,
    UploadChunk,
    UploadCommit,
    Wait,
    WriteFile,
)
from cloudyard.testing.nats import NatsServer
from cloudyard.wire.messages import (
    CallCancel,
    CallCreate,
    CallList,
    CallOp,
    EdgeReply,
    SandboxPage,
    beat_subject,
    call_decoder,
    call_subject,
    decode_op,
    encode,
    raw,
)

GIB = 1024**3


class EchoEdge:
    """What a test looks at and turns: counts of calls, room, heartbeats."""

    def __init__(self, name: str, fabric: Fabric, *, room: int = 1000) -> None:
        self.name = name
        self.fabric = fabric
        self.room = room
        self.refuse = False
        self.images = ["debian", "python"]
        self.draining = False
        self.garbage = b""
        self.boot = "boot-1"
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.files: dict[str, bytes] = {}
        self.uploads: dict[str, bytearray] = {}
        self.creates = 0
        self.largest_piece = 0
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self.hanging = anyio.Event()
        self.cancel_heard = anyio.Event()
        self.keys: dict[str, AnyResult] = {}
        self.listening_since = anyio.current_time()

    async def beat(self) -> None:
        """Send one heartbeat."""
        running = sum(1 for info in self.sandboxes.values() if info.state == "running")
        await self.fabric.publish(
            beat_subject(self.name),
            encode(
                Heartbeat(
                    edge=self.name,
                    boot=self.boot,
                    listening_s=anyio.current_time() - self.listening_since,
                    backends=["container"],
                    images=self.images,
                    load=EdgeLoad(
                        cpu_total=64.0,
                        memory_total_bytes=256 * GIB,
                        cpu_promised=float(running),
                        sandboxes=running,
                        sandboxes_max=self.room,
                    ),
                )
            ),
        )

    async def beat_for_ever(self) -> None:
        while True:
            with suppress(YardUnavailable):  # NATS is away: a real edge goes on too
                await self.beat()
            await anyio.sleep(0.2)

    async def handle(self, data: bytes) -> bytes:
        """Answer one call."""
        if self.garbage:
            return self.garbage
        call = call_decoder.decode(data)
        match call:
            case CallCreate():
                return self._reply(self._create(call))
            case CallList():
                infos = [info for info in self.sandboxes.values() if info.project == call.project]
                return self._reply(SandboxPage([i for i in infos if call.stopped or i.state == "running"]))
            case CallCancel():
                self.cancelled.append(call.cause)
                self.cancel_heard.set()
                return encode(EdgeReply(boot=self.boot))
            case CallOp():
                return self._reply(await self._keyed(call))

    def _reply(self, result: AnyResult | SandboxPage) -> bytes:
        return encode(EdgeReply(boot=self.boot, result=raw(result)))

    def _create(self, call: CallCreate) -> SandboxInfo:
        self.creates += 1
        if call.sandbox in self.sandboxes:
            return self.sandboxes[call.sandbox]
        if self.draining:
            raise YardUnavailable(f"Edge {self.name} is leaving.", code="draining")
        if self.refuse or len(self.sandboxes) >= self.room:
            raise LimitExceeded(f"Edge {self.name} is full.", code="edge_full")
        assert isinstance(call.spec.memory, int)
        info = SandboxInfo(
            id=call.sandbox,
            project=call.project,
            edge=self.name,
            image=call.spec.image,
            backend=call.spec.backend,
            state="running",
            created_at=time.monotonic(),
            cpu=call.spec.cpu,
            memory_bytes=call.spec.memory,
        )
        self.sandboxes[call.sandbox] = info
        return info

    async def _keyed(self, call: CallOp) -> AnyResult:
        if call.key in self.keys:
            return self.keys[call.key]
        info = self.sandboxes.get(call.sandbox)
        if info is None:
            raise NotFound(
                f"There is no sandbox {call.sandbox}.", code="sandbox_not_found", hint="List those there are."
            )
        if info.project != call.project:
            raise Forbidden("It is another project's.", code="not_yours")
        op = decode_op(call.op)
        self.calls.append(type(op).__name__)
        result = await self._do(info, op)
        if call.key:
            self.keys[call.key] = result
        return result

    async def _do(self, info: SandboxInfo, op: AnyOp) -> AnyResult:
        match op:
            case Exec(command=command):
                return await self._run(command)
            case Start():
                return CommandInfo(command_id=7, running=True, pid=2)
            case Wait(command_id=number):
                return ExecResult(command_id=number, exit_code=0)
            case ReadOutput(offset=offset):
                return self._output(op.command_id, offset)
            case SendStdin(data=data, offset=offset):
                return Done(taken=offset + len(data))
            case Signal() | Resize():
                return Done()
            case ListCommands():
                return CommandList(commands=[CommandInfo(command_id=7, running=True)])
            case GetSandbox() | KeepAlive():
                return info
            case StopSandbox():
                stopped = SandboxInfo(
                    id=info.id,
                    project=info.project,
                    edge=info.edge,
                    image=info.image,
                    backend=info.backend,
                    state="stopped",
                    created_at=info.created_at,
                    cpu=info.cpu,
                    memory_bytes=info.memory_bytes,
                )
                self.sandboxes[info.id] = stopped
                return stopped
            case _:
                return self._file(op)

    async def _run(self, command: CommandSpec) -> ExecResult:
        words = command.argv or command.shell.split()
        if words[0] == "hang":
            self.hanging.set()
            await anyio.sleep_forever()
        return ExecResult(command_id=1, exit_code=0, stdout=" ".join(words[1:]).encode() + b"\n")

    def _output(self, size: int, offset: int) -> OutputChunk:
        """Command N has printed N bytes and ended."""
        piece = bytes(min(256 * 1024, size - offset))
        eof = offset + len(piece) == size
        return OutputChunk(data=piece, offset=offset, eof=eof, total=size if eof else 0)

    def _file(self, op: AnyOp) -> AnyResult:
        match op:
            case WriteFile(path=path, data=data):
                self.files[path] = data
            case UploadChunk(upload_id=upload, offset=offset, data=data):
                held = self.uploads.setdefault(upload, bytearray())
                self.largest_piece = max(self.largest_piece, len(data))
                if offset > len(held):
                    raise Conflict("A gap.", code="upload_gap")
                held[offset : offset + len(data)] = data
                return Done(taken=len(held))
            case UploadCommit(path=path, upload_id=upload):
                whole = bytes(self.uploads.pop(upload))
                if len(whole) != op.size or hashlib.sha256(whole).hexdigest() != op.sha256:
                    raise Conflict("Size or hash differ.", code="upload_differs")
                self.files[path] = whole
            case ReadFile(path=path, offset=offset, max_bytes=limit):
                data = self._held(path)
                return FileChunk(
                    data=data[offset : offset + limit], offset=offset, size=len(data), mtime_ns=1
                )
            case Stat(path=path) | MakeDir(path=path):
                if isinstance(op, Stat):
                    self._held(path)
            case ListDir(path=path):
                inside = sorted(name for name in self.files if name.startswith(path))
                return DirListing(path=path, entries=[self._info(name) for name in inside])
            case Remove(path=path):
                self._held(path)
                del self.files[path]
                return Done()
            case _:
                raise AssertionError(op)
        return self._info(path)

    def _held(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFound(f"There is no file {path}.", code="no_such_file")
        return self.files[path]

    def _info(self, path: str) -> FileInfo:
        size = len(self.files.get(path, b""))
        return FileInfo(path=path, kind="file", size=size, mode=0o644, uid=0, gid=0, mtime_ns=1)


@asynccontextmanager
async def echo_edge(
    server: NatsServer, name: str = "e1", *, room: int = 1000, beating: bool = True
) -> AsyncIterator[EchoEdge]:
    """An echo edge that serves and beats until the end."""
    async with (
        Fabric.connect(server.url, server.credentials(f"edge-{name}"), name=name) as fabric,
        anyio.create_task_group() as tasks,
    ):
        edge = EchoEdge(name, fabric, room=room)
        await tasks.start(fabric.serve, call_subject(name), edge.handle)
        if beating:
            tasks.start_soon(edge.beat_for_ever)
        yield edge
        tasks.cancel_scope.cancel()
