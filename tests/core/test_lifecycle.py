"""The life of a sandbox: every row of the table, and what must hold however events come."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, strategies as st

from cloudyard.core.lifecycle import (
    TRANSITIONS,
    Adopted,
    Command,
    CreateAdmitted,
    CreateFailed,
    Event,
    GuestGone,
    InvalidTransition,
    Life,
    Missing,
    Ready,
    StopWanted,
    TornDown,
    decide,
    diagram,
    story,
    transition,
)
from cloudyard.model import SandboxState

EVENTS: list[Event] = [
    CreateAdmitted(cause="c"),
    Ready(),
    CreateFailed(evidence="the probe failed"),
    StopWanted(reason="asked"),
    StopWanted(reason="idle_ttl"),
    GuestGone(evidence="it ended"),
    TornDown(),
    Adopted(),
    Missing(),
]


def run(*events: Event) -> tuple[Life, list[Command]]:
    life, commands = Life(), []
    for event in events:
        decision = decide(life, event)
        life = decision.life
        commands += decision.commands
    return life, commands


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ([CreateAdmitted(), Ready()], "running", ""),
        ([CreateAdmitted(), CreateFailed()], "failed", "create_failed"),
        ([CreateAdmitted(), Ready(), StopWanted(reason="max_ttl"), TornDown()], "stopped", "max_ttl"),
        ([CreateAdmitted(), Ready(), GuestGone(), TornDown()], "failed", "guest_gone"),
        ([CreateAdmitted(), Ready(), Missing()], "failed", "lost"),
        ([CreateAdmitted(), StopWanted(), CreateFailed(), TornDown()], "stopped", "asked"),
        ([CreateAdmitted(), StopWanted(), Ready(), TornDown()], "stopped", "asked"),
        ([CreateAdmitted(), Ready(), StopWanted(), GuestGone(), TornDown()], "stopped", "asked"),
        ([CreateAdmitted(), Ready(), StopWanted(), Missing()], "stopped", "asked"),
        ([CreateAdmitted(), Ready(), Adopted(), Adopted()], "running", ""),
    ],
)
def test_a_life_goes_as_the_table_says(events: list[Event], state: str, reason: str):
    life, _ = run(*events)
    assert (life.state, life.reason) == (state, reason)


def test_an_event_without_a_place_is_refused_and_named():
    with pytest.raises(InvalidTransition, match="running met the event TornDown"):
        decide(Life("running"), TornDown())


def test_the_first_reason_stays():
    life, _ = run(CreateAdmitted(), Ready(), StopWanted(reason="idle_ttl"), StopWanted(reason="asked"))
    assert life.reason == "idle_ttl"


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_whatever_happens_an_end_is_final_and_what_was_promised_is_given_back_once(events: list[Event]):
    life, commands = Life(), []
    for event in events:
        try:
            decision = decide(life, event)
        except InvalidTransition:
            continue
        if life.over:
            assert decision.life.state == life.state
        assert not life.reason or decision.life.reason == life.reason
        if decision.life.over:
            assert decision.life.reason
        life = decision.life
        commands += decision.commands
        if life.state == "stopped":
            assert commands.count(Command.GIVE_BACK) == 1
    if Command.GIVE_BACK in commands:
        assert life.over
    assert commands.count(Command.LAUNCH) <= 1


@given(st.sampled_from(EVENTS), st.sampled_from([*get_args(SandboxState), "absent"]))
def test_a_sandbox_can_be_stopped_and_lose_its_guest_in_every_state(event: Event, state: str):
    if state != "absent":
        assert (state, StopWanted) in TRANSITIONS
        assert (state, GuestGone) in TRANSITIONS


def test_every_state_is_reached_and_left_or_final():
    reached = {after for after, _ in TRANSITIONS.values()}
    assert reached == set(get_args(SandboxState))
    for (state, event), (after, commands) in TRANSITIONS.items():
        if state == "stopped":
            assert (after, commands) == ("stopped", ()), event


def test_a_story_names_every_cause():
    life, kept = Life(), []
    for event in (
        CreateAdmitted(cause="req-1", at=1.0),
        Ready(cause="launch", at=2.0),
        GuestGone(cause="link", at=3.0, evidence="it ended"),
    ):
        life = decide(life, event).life
        kept.append(transition(event, life))
    assert story(kept) == [
        "1.000 CreateAdmitted -> creating, caused by req-1",
        "2.000 Ready -> running, caused by launch",
        "3.000 GuestGone -> failed (guest_gone), caused by link: it ended",
    ]


def test_the_diagram_is_drawn_from_the_table():
    drawn = diagram()
    assert "[*] --> creating: CreateAdmitted" in drawn
    assert "running --> failed: GuestGone" in drawn
