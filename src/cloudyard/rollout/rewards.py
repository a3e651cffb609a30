"""What a task's tests left as the reward: a number that is finite and in range, or a sentence why it is none.

Pure: it is given bytes. Harbor's rules hold: `reward.json` goes before `reward.txt`; the text is one number,
the JSON an object of numbers, of which `reward` is the one that counts.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from msgspec import Struct

from cloudyard.errors import InvalidRequest
from cloudyard.model import KIB

REWARD_TEXT = "reward.txt"
REWARD_JSON = "reward.json"
REWARD_BYTES_MAX = 64 * KIB
PARTS_MAX = 256
_SHOWN_CHARS = 60


class Reward(Struct, frozen=True):
    """A reward, and the numbers it came with."""

    value: float
    parts: dict[str, float] = {}


def parse(name: str, data: bytes, *, within: tuple[float, float] = (0.0, 1.0)) -> Reward:
    """The reward in a file.

    Args:
        name: which file it is, REWARD_TEXT or REWARD_JSON.
        data: all its bytes.
        within: the least and the greatest value that the task allows.

    Raises:
        InvalidRequest: with code `bad_reward`; it is no number, not finite or out of range.
    """
    if len(data) > REWARD_BYTES_MAX:
        _refuse(name, f"is {len(data)} bytes long; at most {REWARD_BYTES_MAX} are read")
    if not data.strip():
        _refuse(name, "is empty")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        _refuse(name, "is no UTF-8")
    parts: dict[str, float] = {}
    if name == REWARD_JSON:
        parts = _parts(text)
        value = _that_counts(parts)
    else:
        value = _number(name, text.strip(), "it")
    low, high = within
    if not low <= value <= high:
        _refuse(name, f"says {value:g}, which is not between {low:g} and {high:g}")
    return Reward(value=value, parts=parts)


def _parts(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        _refuse(REWARD_JSON, f"is no JSON: {exc}")
    if not isinstance(found, dict):
        _refuse(REWARD_JSON, f"holds {_shown(found)} and no object of numbers")
    if len(found) > PARTS_MAX:
        _refuse(REWARD_JSON, f"holds {len(found)} numbers; at most {PARTS_MAX} are read")
    return {name: _number(REWARD_JSON, value, repr(name[:_SHOWN_CHARS])) for name, value in found.items()}


def _that_counts(parts: dict[str, float]) -> float:
    if "reward" in parts:
        return parts["reward"]
    if len(parts) == 1:
        return next(iter(parts.values()))
    held = ", ".join(sorted(parts))[: 3 * _SHOWN_CHARS] if parts else "nothing"
    _refuse(REWARD_JSON, f"holds {held}, and no `reward` says which number counts")


def _number(name: str, value: Any, what: str) -> float:
    """A finite number. JSON's true and false are 1 and 0; a text is a number only in reward.txt."""
    if isinstance(value, str) and name == REWARD_TEXT and "_" not in value:
        try:
            value = float(value)
        except ValueError:
            _refuse(name, f"says {_shown(value)}, which is no number")
    if not isinstance(value, int | float):
        _refuse(
            name,
            f"says {_shown(value)}, which is no number"
            if what == "it"
            else f"says that {what} is {_shown(value)}, which is no number",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(name, f"says that {what} is {number}: a reward is finite")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequest(
        f"The tests left no reward: {name} {what}.",
        code="bad_reward",
        hint=f"tests/test.sh writes one number to /logs/verifier/{REWARD_TEXT}, "
        f'or {{"reward": number}} to {REWARD_JSON}.',
        fault="policy",
    )
