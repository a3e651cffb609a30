"""`nop`: does nothing. A task whose tests reward it is no task."""

from __future__ import annotations

from cloudyard.rollout.agents.base import Context
from cloudyard.rollout.box import Box


class Nop:
    """Returns at once."""

    name = "nop"

    async def run(self, box: Box, context: Context) -> None:
        """Nothing."""
