"""What counts as a reward, and the sentence for what does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.rewards import REWARD_BYTES_MAX, REWARD_JSON, REWARD_TEXT, parse


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), ("0\n", 0.0), (" 0.5 \n", 0.5), ("1e-3", 0.001), ("-0", 0.0)]
)
def test_the_text_is_one_number(text: str, value: float) -> None:
    reward = parse(REWARD_TEXT, text.encode())
    assert (reward.value, reward.parts) == (value, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"reward": 1}', 1.0),
        ('{"reward": 0.25, "style": 3}', 0.25),
        ('{"passed": 0.5}', 0.5),
        ('{"reward": true}', 1.0),
    ],
)
def test_the_object_names_the_number_that_counts(text: str, value: float) -> None:
    assert parse(REWARD_JSON, text.encode()).value == value


def test_all_numbers_of_the_object_are_kept() -> None:
    assert parse(REWARD_JSON, b'{"reward": 0.5, "lint": 7, "ok": false}').parts == {
        "reward": 0.5,
        "lint": 7.0,
        "ok": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (REWARD_TEXT, b"", "reward.txt is empty"),
        (REWARD_TEXT, b" \n", "is empty"),
        (REWARD_TEXT, b"nan", "a reward is finite"),
        (REWARD_TEXT, b"inf", "a reward is finite"),
        (REWARD_TEXT, b"1e999", "a reward is finite"),
        (REWARD_TEXT, b"passed", "'passed', which is no number"),
        (REWARD_TEXT, b"1_0", "which is no number"),
        (REWARD_TEXT, b"1 2", "which is no number"),
        (REWARD_TEXT, b"\xff\xfe", "is no UTF-8"),
        (REWARD_TEXT, b"1.5", "not between 0 and 1"),
        (REWARD_TEXT, b"-0.1", "not between 0 and 1"),
        (REWARD_TEXT, b"1" * (REWARD_BYTES_MAX + 1), "bytes long"),
        (REWARD_JSON, b"", "reward.json is empty"),
        (REWARD_JSON, b"{", "is no JSON"),
        (REWARD_JSON, b"[" * 60_000, "is no JSON"),
        (REWARD_JSON, b"1", "holds 1 and no object"),
        (REWARD_JSON, b"[1]", "no object of numbers"),
        (REWARD_JSON, b"{}", "holds nothing"),
        (REWARD_JSON, b'{"a": 1, "b": 0}', "holds a, b, and no `reward`"),
        (REWARD_JSON, b'{"reward": "1"}', "'reward' is '1', which is no number"),
        (REWARD_JSON, b'{"reward": null}', "which is no number"),
        (REWARD_JSON, b'{"reward": NaN}', "a reward is finite"),
        (REWARD_JSON, b'{"reward": 1e400}', "a reward is finite"),
        (REWARD_JSON, b'{"reward": 1, "other": Infinity}', "a reward is finite"),
        (REWARD_JSON, b'{"reward": 1%s}' % (b"0" * 400), "a reward is finite"),
        (REWARD_JSON, b'{"reward": 2}', "not between 0 and 1"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(name: str, data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(name, data)
    assert (caught.value.code, caught.value.fault) == ("bad_reward", "policy")
    assert said in caught.value.message
    assert len(caught.value.message) < 400


def test_a_task_may_allow_another_range() -> None:
    assert parse(REWARD_TEXT, b"-3", within=(-10.0, 10.0)).value == -3
    with pytest.raises(InvalidRequest):
        parse(REWARD_TEXT, b"11", within=(-10.0, 10.0))


@given(st.binary(max_size=200), st.sampled_from([REWARD_TEXT, REWARD_JSON]))
def test_no_bytes_give_a_reward_out_of_range_or_another_error(data: bytes, name: str) -> None:
    try:
        value = parse(name, data).value
    except InvalidRequest:
        return
    assert math.isfinite(value)
    assert 0 <= value <= 1
