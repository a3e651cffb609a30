"""Tokens, grants and actions."""

from __future__ import annotations

import pytest

from cloudyard.core.iam import (
    ACTIONS,
    Grant,
    action_of,
    allow,
    bearer_token,
    check_grant,
    check_project,
    hash_token,
)
from cloudyard.errors import Forbidden, InvalidRequest, Unauthorized
from cloudyard.model import ProjectId

TOKEN = "cy_" + "a" * 43


def grant(**changes: object) -> Grant:
    fields = {"project": ProjectId("p"), "principal": "ann", "token_hash": hash_token(TOKEN)} | changes
    return Grant(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", TOKEN])
def test_a_request_without_a_bearer_token_is_told_to_send_one(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        bearer_token(header)
    assert caught.value.code == "no_token"


@pytest.mark.parametrize("token", ["x" * 257, "caf\xe9"])
def test_a_token_that_cannot_be_ours_is_unknown_and_not_repeated(token: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        bearer_token(f"Bearer {token}")
    assert caught.value.code == "unknown_token"
    assert token not in str(caught.value)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_read_in_any_case(scheme: str) -> None:
    assert bearer_token(f"{scheme} {TOKEN}") == TOKEN


def test_a_grant_is_for_its_own_token_until_it_expires() -> None:
    assert check_grant(grant(), hash_token(TOKEN), now=1e12) == grant()
    assert check_grant(grant(expires_at=10.0), hash_token(TOKEN), now=9.9)
    with pytest.raises(Unauthorized):
        check_grant(grant(), hash_token(TOKEN + "b"), now=0.0)
    with pytest.raises(Unauthorized) as caught:
        check_grant(grant(expires_at=10.0), hash_token(TOKEN), now=10.0)
    assert caught.value.code == "token_expired"


def test_a_grant_allows_what_it_names_and_the_refusal_names_what_it_does() -> None:
    reader = grant(actions=["sandbox.read"])
    allow(reader, "sandbox.read")
    with pytest.raises(Forbidden) as caught:
        allow(reader, "sandbox.stop")
    assert "sandbox.read" in caught.value.hint
    for action in ACTIONS:
        allow(grant(), action)  # type: ignore[arg-type]


def test_each_operation_is_an_action() -> None:
    assert action_of("stop_sandbox") == "sandbox.stop"
    assert action_of("get_sandbox") == "sandbox.read"
    assert action_of("exec") == "sandbox.use"
    assert action_of("") == "sandbox.use"


@pytest.mark.parametrize("project", ["", "A", "a.b", "a b", "é", "x" * 41, "a*", ">"])
def test_a_project_name_must_be_safe_in_keys(project: str) -> None:
    with pytest.raises(InvalidRequest):
        check_project(project)


def test_a_plain_project_name_is_taken() -> None:
    assert check_project("my-project-2") == "my-project-2"
