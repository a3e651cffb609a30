"""The kind of result that an operation gives, checked where it leaves the yard."""

from __future__ import annotations

from typing import TypeVar

from cloudyard.errors import CloudyardError
from cloudyard.model import AnyResult, CommandInfo, ExecResult

R = TypeVar("R")


def only(kind: type[R], result: AnyResult) -> R:
    """The result, which must be of this kind.

    Raises:
        CloudyardError: an edge gave something else; that is a fault of ours.
    """
    if not isinstance(result, kind):
        raise CloudyardError(
            f"An edge gave {type(result).__name__} where {kind.__name__} belongs.", code="unexpected_result"
        )
    return result


def ended(result: AnyResult) -> ExecResult | CommandInfo:
    """A command's result, or what is known while it runs."""
    return result if isinstance(result, ExecResult) else only(CommandInfo, result)
