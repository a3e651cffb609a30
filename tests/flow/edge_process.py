"""An edge in a process of its own, to be killed: serves calls on a unix socket, one connection each.

`python edge_process.py STATE_DIR` prints a line when it serves. `EdgeProcess` runs it and asks it.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import SocketStream

from cloudyard.errors import YardUnavailable
from cloudyard.model import AnyResult
from cloudyard.wire.messages import AnyCall, encode, error_of, reply_decoder, result_decoder

SIZE = struct.Struct("<I")


async def receive(stream: SocketStream) -> bytes:
    """One message: its size and its bytes."""
    data = b""
    while len(data) < SIZE.size or len(data) < SIZE.size + SIZE.unpack_from(data)[0]:
        data += await stream.receive(1 << 20)
    return data[SIZE.size :]


class EdgeProcess:
    """Starts, kills and asks an edge of its own process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and return when it serves."""
        tests = Path(__file__).parent.parent
        self.process = await anyio.to_thread.run_sync(
            lambda: subprocess.Popen(
                [sys.executable, "-m", "flow.edge_process", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")])},
            )
        )
        assert self.process.stdout is not None
        line = await anyio.to_thread.run_sync(self.process.stdout.readline)
        assert line == b"serving\n", line

    async def kill(self) -> None:
        """SIGKILL, as an operator or the kernel would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await anyio.to_thread.run_sync(self.process.wait)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    async def ask(self, call: AnyCall) -> AnyResult:
        """The edge's result, whatever kills of it come between: asks again until it answers."""
        with anyio.fail_after(60):
            while True:
                try:
                    async with await anyio.connect_unix(self.directory / "call.sock") as stream:
                        data = encode(call)
                        await stream.send(SIZE.pack(len(data)) + data)
                        reply = reply_decoder.decode(await receive(stream))
                except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                    await anyio.sleep(0.02)
                    continue
                if reply.error is None:
                    return result_decoder.decode(reply.result)
                error = error_of(reply.error)
                if not isinstance(error, YardUnavailable):
                    raise error
                await anyio.sleep(0.02)


@asynccontextmanager
async def edge_process(directory: Path) -> AsyncIterator[EdgeProcess]:
    """One that serves; killed at the end, its sandboxes not."""
    edge = EdgeProcess(directory)
    await edge.start()
    try:
        yield edge
    finally:
        if edge.process is not None:
            with anyio.CancelScope(shield=True):
                await edge.kill()


async def _serve(directory: Path) -> None:
    from flow.edge_kit import running_edge

    async with running_edge(directory) as kit:
        path = directory / "call.sock"
        path.unlink(missing_ok=True)
        async with await anyio.create_unix_listener(path) as listener:
            print("serving", flush=True)

            async def answer(stream: SocketStream) -> None:
                async with stream:
                    reply = await kit.edge.call(await receive(stream))
                    await stream.send(SIZE.pack(len(reply)) + reply)

            await listener.serve(answer)


if __name__ == "__main__":
    anyio.run(_serve, Path(sys.argv[1]))
