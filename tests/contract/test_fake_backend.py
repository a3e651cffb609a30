"""The fake keeps the contract of backends, but for what isolation gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cloudyard.edge.backends.base import Backend
from cloudyard.model import Image
from cloudyard.testing.backend_contract import BackendContract, MakeBackend, new_id, run
from cloudyard.testing.fake_backend import FakeBackend, fake_image
from flow.edge_kit import guest_program


class TestFakeBackend(BackendContract):
    @pytest.fixture
    def make_backend(self, yard_dir: Path) -> MakeBackend:
        @asynccontextmanager
        async def make() -> AsyncIterator[Backend]:
            async with FakeBackend(yard_dir / "fake", guest_program()) as backend:
                yield backend

        return make

    @pytest.fixture
    def image(self) -> Image:
        return fake_image()

    async def test_instances_live_at_once_in_slots_of_their_own(self, backend: Backend, image: Image) -> None:
        """As in the contract, but for the files of one that another may not see: the fake isolates
        nothing.
        """
        instances = [await backend.create(new_id(), self.spec, image) for _ in range(3)]
        assert len({instance.facts.slot for instance in instances}) == 3
        await instances[0].stop()
        assert (await run(instances[1], "/bin/true")).exit_code == 0
        for instance in instances:
            await instance.stop()

    async def check_empty(self, backend: Backend) -> None:
        assert isinstance(backend, FakeBackend)
        assert list(backend.directory_of(0).parent.iterdir()) == []
