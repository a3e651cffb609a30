"""Fixtures of what runs in inspect-ai's environment, against the yard that the environment names.

This directory is not collected with the other tests: tests/live/test_inspect_ai.py runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from cloudyard.integrations.inspect_ai import CloudyardConfig

MakeSandbox = Callable[..., Awaitable[SandboxEnvironment]]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def make_sandbox() -> AsyncIterator[MakeSandbox]:
    """Makes sandboxes the way inspect-ai does for a sample: found by name, with this configuration."""
    provider = registry_find_sandboxenv("cloudyard")
    async with AsyncExitStack() as stack:

        async def make(config: CloudyardConfig | str | None = None) -> SandboxEnvironment:
            await provider.task_init("check", config)
            made = await provider.sample_init("check", config, {})
            stack.push_async_callback(provider.sample_cleanup, "check", config, made, False)
            return made["default"]

        yield make


@pytest.fixture
async def sandbox_env(make_sandbox: MakeSandbox) -> SandboxEnvironment:
    """What inspect-ai's self-check asks for: a sandbox of the default configuration."""
    return await make_sandbox()
