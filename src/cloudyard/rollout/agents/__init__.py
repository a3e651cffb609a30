"""Agents by name: those that come with Cloudyard, and any that can be imported."""

from __future__ import annotations

import difflib
from importlib import import_module

from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.rollout.agents.base import Agent, Context

__all__ = ["BUILT_IN", "Agent", "Context", "find"]

BUILT_IN = {
    "oracle": "cloudyard.rollout.agents.oracle:Oracle",
    "nop": "cloudyard.rollout.agents.nop:Nop",
    "search": "cloudyard.rollout.agents.search:Search",
}


def find(name: str) -> Agent:
    """The agent of a name: `oracle`, `nop`, `search`, or `package.module:Name` of a class or an object.

    A class is called without arguments.

    Raises:
        NotFound: there is no such agent.
        InvalidRequest: what is there is no agent.
    """
    place = BUILT_IN.get(name, name)
    module_name, colon, attribute = place.partition(":")
    if not (module_name and colon and attribute):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        meant = f"Did you mean {near[0]}?" if near else f"Built in are {', '.join(BUILT_IN)}."
        raise NotFound(
            f"There is no agent {name!r}.",
            code="agent_not_found",
            hint=f"{meant} One of yours is written package.module:Name.",
        )
    try:
        found = getattr(import_module(module_name), attribute)
        agent = found() if isinstance(found, type) else found
    except Exception as exc:  # importing and calling runs code that is not ours
        raise NotFound(
            f"The agent {name!r} cannot be loaded: {type(exc).__name__}: {exc}.",
            code="agent_not_found",
            hint="Is its module in this directory or on PYTHONPATH?",
        ) from exc
    label = getattr(agent, "name", None)
    if not isinstance(agent, Agent) or not isinstance(label, str) or not label.isprintable() or not label:
        raise InvalidRequest(
            f"{name} is no agent.",
            code="bad_agent",
            hint="An agent has a `name`, which is one line of text, and `async def run(self, box, context)`.",
        )
    return agent
