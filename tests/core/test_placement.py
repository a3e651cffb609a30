"""Placement: what fits, what is said when nothing does, and that load spreads by size whatever the views are
worth.
"""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings, strategies as st

from cloudyard.core.placement import Demand, Fleet, Reservation
from cloudyard.errors import CloudyardError, LimitExceeded, NotFound, Unsupported, YardUnavailable
from cloudyard.model import EDGE_SILENT_S, GIB, MIB, EdgeId, EdgeLoad, Heartbeat

SMALL = Demand(image="debian", backend="container", cpu=1.0, memory_bytes=512 * MIB)


def beat(
    edge: str,
    *,
    cpu: float = 16.0,
    promised: int = 0,
    room: int = 1000,
    boot: str = "b1",
    images: tuple[str, ...] = ("debian",),
    backends: tuple[str, ...] = ("container",),
    draining: bool = False,
    available: int = 0,
) -> Heartbeat:
    load = EdgeLoad(
        cpu_total=cpu,
        memory_total_bytes=int(cpu * 4 * GIB),
        cpu_promised=promised * SMALL.cpu,
        memory_promised_bytes=promised * SMALL.memory_bytes,
        sandboxes=promised,
        sandboxes_max=room,
        memory_available_bytes=available,
    )
    return Heartbeat(
        edge=edge,
        boot=boot,
        backends=list(backends),
        load=load,
        images=list(images),
        draining=draining,
    )


def fleet(*beats: Heartbeat, now: float = 0.0) -> Fleet:
    made = Fleet()
    for each in beats:
        made.hear(each, now)
    return made


def place(made: Fleet, demand: Demand = SMALL, now: float = 0.0, **options: object) -> Reservation:
    return made.place(demand, now=now, random=random.Random(0).random, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beats", "now", "error", "code"),
    [
        ([], 0.0, YardUnavailable, "no_edge"),
        ([beat("e1")], EDGE_SILENT_S + 1, YardUnavailable, "no_edge"),
        ([beat("e1", backends=("vm",))], 0.0, Unsupported, "backend_not_offered"),
        ([beat("e1", images=("alpine",))], 0.0, NotFound, "image_not_found"),
        ([beat("e1", cpu=0.5)], 0.0, LimitExceeded, "too_large"),
        ([beat("e1", room=3, promised=3)], 0.0, LimitExceeded, "no_capacity"),
        ([beat("e1", cpu=4.0, promised=4)], 0.0, LimitExceeded, "no_capacity"),
        ([beat("e1", draining=True)], 0.0, LimitExceeded, "no_capacity"),
        ([beat("e1", available=MIB)], 0.0, LimitExceeded, "no_capacity"),
    ],
)
def test_when_nothing_fits_the_error_says_why(
    beats: list[Heartbeat], now: float, error: type[CloudyardError], code: str
) -> None:
    with pytest.raises(error) as caught:
        place(fleet(*beats), now=now)
    assert caught.value.code == code
    assert caught.value.hint


def test_an_unknown_image_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(NotFound) as caught:
        place(fleet(beat("e1", images=("b", "a")), beat("e2", images=("c",))))
    assert "a, b, c" in caught.value.hint


def test_the_least_loaded_edge_is_taken_and_an_excluded_one_never() -> None:
    made = fleet(beat("e1", promised=8), beat("e2", promised=2), beat("e3", promised=5))
    assert place(made).edge == "e2"
    assert place(made, exclude={"e2"}).edge == "e3"
    with pytest.raises(LimitExceeded):
        place(made, exclude={"e1", "e2", "e3"})


def test_exactly_as_many_are_placed_as_there_is_room_though_no_heartbeat_comes() -> None:
    """Elsewhere stale metrics without reservations let ten times the capacity through at once."""
    made = fleet(beat("e1", room=7), beat("e2", room=5))
    placed = [place(made).edge for _ in range(12)]
    assert (placed.count(EdgeId("e1")), placed.count(EdgeId("e2"))) == (7, 5)
    with pytest.raises(LimitExceeded):
        place(made)


def test_room_comes_back_when_an_edge_refuses_and_is_counted_once_when_it_admits() -> None:
    made = fleet(beat("e1", room=2))
    first, second = place(made), place(made)
    made.settle(first, held=False)
    third = place(made)
    made.settle(second, held=True)
    made.settle(third, held=True)
    made.hear(beat("e1", room=2, promised=2), 1.0)
    node = made.nodes[EdgeId("e1")]
    assert (node.count, node.cpu, node.memory_bytes) == (0, 0.0, 0)


def test_an_edge_that_started_again_begins_without_old_promises() -> None:
    made = fleet(beat("e1", room=1))
    old = place(made)
    made.hear(beat("e1", room=1, boot="b2"), 1.0)
    made.settle(old, held=True)
    assert place(made, now=1.0).edge == "e1"


@given(st.lists(st.tuples(st.sampled_from("prahbf"), st.integers(0, 4)), max_size=200))
def test_the_overlay_is_always_what_is_unsettled(actions: list[tuple[str, int]]) -> None:
    edges = [f"e{number}" for number in range(5)]
    made = fleet(*(beat(edge, room=6) for edge in edges))
    open_: list[Reservation] = []
    held: dict[str, int] = dict.fromkeys(edges, 0)
    for action, number in actions:
        match action:
            case "p":
                try:
                    open_.append(place(made))
                except LimitExceeded:
                    assert sum(node.count for node in made.nodes.values()) == 30
            case "r" | "a" if open_:
                reservation = open_.pop(number % len(open_))
                made.settle(reservation, held=action == "a")
                held[reservation.edge] += action == "a"
            case "h":
                made.hear(beat(edges[number], room=6), 0.0)
                held[edges[number]] = 0
            case _:
                pass
        for edge in edges:
            node = made.nodes[EdgeId(edge)]
            unsettled = sum(1 for each in open_ if each.edge == edge)
            assert node.count == unsettled + held[edge] <= 6
            assert node.cpu == node.count * SMALL.cpu


SIZES = {8.0: 12, 16.0: 12, 64.0: 6}  # cores: how many such edges


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_load_is_proportional_to_size_with_stale_views_many_placers_and_refusals(seed: int) -> None:
    """Views are 1 s old, 4 placers do not know of each other, 5% of placements are refused."""
    dice = random.Random(seed)
    cores = [size for size, count in SIZES.items() for _ in range(count)]
    held = [0] * len(cores)
    placers = [Fleet() for _ in range(4)]
    per_second, seconds = 600, 12
    for second in range(seconds):
        for index, size in enumerate(cores):
            for each in placers:
                each.hear(beat(f"e{index}", cpu=20 * size, promised=held[index], room=0), float(second))
        for number in range(per_second):
            placer, refused = placers[number % 4], set[str]()
            while True:
                got = placer.place(
                    SMALL, now=second + number / per_second, random=dice.random, exclude=refused
                )
                admitted = dice.random() >= 0.05
                placer.settle(got, held=admitted)
                if admitted:
                    break
                refused.add(got.edge)
            held[int(got.edge[1:])] += 1
    share = sum(held) / sum(cores)
    for index, size in enumerate(cores):
        assert abs(held[index] / (size * share) - 1) < 0.10, (size, held[index], size * share)


def test_a_decision_takes_tens_of_microseconds() -> None:
    """The goal is 30,000 a second on one core; the bound here leaves room for a machine that does other
    things.
    """
    made = fleet(*(beat(f"e{number}", cpu=(8.0, 16.0, 64.0)[number % 3], room=0) for number in range(160)))
    dice = random.Random(1)
    count, best = 2000, float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(count):
            made.settle(made.place(SMALL, now=0.0, random=dice.random), held=False)
        best = min(best, time.perf_counter() - begun)
    assert count / best > 30_000
    print(f"{count / best:.0f} decisions per second")
