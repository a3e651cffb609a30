"""Which processors sandboxes are put on."""

from __future__ import annotations

from collections import Counter

from cloudyard.edge.host.cgroups.files import number_ranges
from cloudyard.edge.host.cpus import CpuPlan


def test_cores_are_rounded_up_and_at_most_all() -> None:
    plan = CpuPlan(range(4))
    assert [len(plan.take(0, cpu)) for cpu in (0.1, 1.0, 1.2, 4.0, 9.5)] == [1, 1, 2, 4, 4]


def test_sandboxes_are_spread_evenly() -> None:
    plan = CpuPlan([1, 3, 5])
    taken = Counter(cpu for holder in range(9) for cpu in plan.take(holder, 1.0))
    assert taken == {1: 3, 3: 3, 5: 3}


def test_the_next_one_goes_where_the_least_is_promised() -> None:
    plan = CpuPlan(range(3))
    plan.take(0, 0.5)
    plan.take(1, 2.0)
    assert plan.take(2, 1.0) == [0]


def test_what_one_gave_back_is_free_again() -> None:
    plan = CpuPlan(range(2))
    assert [plan.take(holder, 0.3) for holder in range(3)] == [[0], [1], [0]]
    plan.give_back(0)
    plan.give_back(2)
    plan.give_back(2)
    assert plan.take(4, 1.0) == [0]


def test_who_takes_again_has_no_others() -> None:
    plan = CpuPlan(range(2))
    assert plan.take(0, 1.0) == plan.take(0, 1.0) == [0]
    assert plan.take(1, 1.0) == [1]


def test_what_was_there_before_counts() -> None:
    plan = CpuPlan(range(2))
    plan.note(7, [0, 99], 1.0)
    assert plan.take(8, 1.0) == [1]


def test_without_processors_nobody_is_put_anywhere() -> None:
    plan = CpuPlan([])
    plan.note(1, [], 1.0)
    assert plan.all == plan.take(2, 1.0) == []


def test_processors_are_written_as_the_kernel_does() -> None:
    assert number_ranges([3, 1, 2, 9, 7, 8, 0, 12]) == "0-3,7-9,12"
    assert number_ranges([]) == ""
