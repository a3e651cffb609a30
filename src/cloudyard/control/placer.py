"""The shell around `core.placement`: it brings the clock and the dice."""

from __future__ import annotations

import random
from collections.abc import Collection

import anyio

from cloudyard.core.placement import Demand, Fleet, Reservation


class Placer:
    """Chooses edges for new sandboxes on the view that the watcher keeps."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._random = random.Random().random

    def place(self, demand: Demand, exclude: Collection[str] = ()) -> Reservation:
        """Choose an edge and reserve the room. Raises as `Fleet.place` does."""
        return self._fleet.place(demand, now=anyio.current_time(), random=self._random, exclude=exclude)

    def settle(self, reservation: Reservation, *, held: bool) -> None:
        """Tell what the edge said."""
        self._fleet.settle(reservation, held=held)
