"""A sandbox that is out of memory, for real: the kernel kills, and the right command is told of it."""

from __future__ import annotations

import pytest

from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]


async def test_only_the_command_in_whose_time_memory_ran_out_is_told(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    async with yard.connect() as client, client.sandbox(image="debian", memory="64MiB") as box:
        for command in (
            "head -c 1000000000 /dev/zero | tail | wc -c",
            "(python3 -c 'x = bytearray(10**9)'; true)",
        ):
            made_do = await box.run(command, timeout_s=60)
            assert (made_do.exit_code, made_do.oom, made_do.fault) == (0, True, None)
            after = await box.run("sleep 0.2; kill -9 $$")
            assert not after.oom
            assert after.fault is not None
            assert after.fault.reason == "signal"
        hog = await box.run(["python3", "-c", "x = bytearray(10**9)"], timeout_s=60)
        assert (hog.signal, hog.oom) == (9, True)
        assert hog.fault is not None
        assert hog.fault.reason == "oom"
