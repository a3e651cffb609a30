"""Four sandboxes do their worst at once, each in its own way; a fifth answers, and the yard too."""

from __future__ import annotations

import time

import anyio
import pytest

import cloudyard
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]

ANSWER_S = 2.0  # in which the fifth has to answer, whatever the others do
LOOKS = 24  # questions to the fifth and to the yard while the bombs go off
BOMB_S = 12.0
BOMBS = {
    "pids": "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
    "oom": "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'; kill -9 $$",
    "output": "yes | head -c 4G; exit 1",
    "disk": "while :; do cat /dev/zero > /root/much$$; done 2>/dev/null & sleep 8; exit 1",
}


async def test_four_bombs_at_once_leave_a_fifth_sandbox_in_peace(yard: TestYard) -> None:
    """E2B#412, #339: a hog made every other call time out; daytona#5140: a fork storm killed what answers."""
    assert yard.up().returncode == 0
    async with yard.connect() as client:
        boxes = {
            name: await client.create("debian", memory="128MiB", pids=64, disk="64MiB") for name in BOMBS
        }
        fifth = await client.create("debian", memory="64MiB")
        done: dict[str, cloudyard.Completed] = {}
        slowest = 0.0

        async def set_off(name: str) -> None:
            done[name] = await boxes[name].run(BOMBS[name], timeout_s=BOMB_S, output_limit_bytes=1 << 20)

        async with anyio.create_task_group() as tasks:
            for name in BOMBS:
                tasks.start_soon(set_off, name)
            for _ in range(LOOKS):
                begin = time.monotonic()
                answer = await fifth.run(["echo", "here"], timeout_s=10)
                assert len(await client.list()) == len(BOMBS) + 1
                slowest = max(slowest, time.monotonic() - begin)
                assert answer.stdout == b"here\n"
                await anyio.sleep(BOMB_S / LOOKS / 2)
        print(f"slowest answer {slowest:.3f} s; " + str({name: one.fault for name, one in done.items()}))
        assert slowest < ANSWER_S
        assert done["pids"].timed_out
        assert done["oom"].oom
        assert done["output"].truncated
        for name, one in done.items():
            assert name in one.limits_hit, (name, one.limits_hit, one.fault)
            assert one.fault is not None
            assert one.fault.label == "policy"
        for name, box in boxes.items():  # and each of the four is itself again
            await box.kill_all()
            assert (await box.run("echo on", timeout_s=10)).stdout == b"on\n", name
            await box.stop()
        await fifth.stop()
