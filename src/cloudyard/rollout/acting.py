"""Letting an agent act: foreign code in our process, which may raise, hang, or not stop when it is told to.

It runs in a task of its own. When its time is over it is cancelled; if it catches that again and again, it is
let go of. An agent that blocks the event loop, and with it all other attempts, is interrupted (see
`interrupting`). What cannot be undone from here is a shielded scope that never ends: that is an agent's own
promise to end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, coroutine
from typing import Any

import anyio
import anyio.lowlevel

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.agents.base import Agent, Context
from cloudyard.rollout.box import Box
from cloudyard.sdk.tasks import plain_task_group

CANCELS_MAX = 100  # an agent may catch before it is let go of: tidying up takes a few
BLOCKED_MAX_S = 10.0  # without a turn of the event loop
BLOCK_CHECK_S = 1.0
ERROR_CHARS_MAX = 500  # of what an agent's exception says
_SAID_ALREADY = ("task_without_solution", "solution_failed")  # sentences that need no introduction


let_go: list[Coroutine[Any, Any, None]] = []
"""What would not end. It is never resumed, and kept so that its disposal does not wake it."""


class _LetGo(BaseException):
    """A coroutine will not end."""


class AgentBlocked(BaseException):
    """Raised inside an agent that keeps the event loop from turning."""

    def __str__(self) -> str:
        return (
            f"it kept all other attempts waiting for {BLOCKED_MAX_S:g} s: use `await`, or "
            f"anyio.to_thread.run_sync for what blocks"
        )


async def act(agent: Agent, box: Box, context: Context, *, within_s: float) -> str:
    """Let an agent act until it returns, breaks or runs out of time. The box is closed afterwards.

    Returns:
        A sentence that says what it broke with; empty if it returned.
    """
    error = ""
    kept = len(let_go)
    ended = anyio.Event()
    given_up = False

    async def watch() -> None:
        nonlocal given_up
        try:
            await anyio.sleep_forever()
        finally:
            given_up = True

    async def host() -> None:
        try:
            await limited()
        finally:
            ended.set()

    async def limited() -> None:
        nonlocal error
        limit = anyio.CancelScope(deadline=anyio.current_time() + within_s)
        try:
            with limit:
                await _driven(_call(agent, box, context), lambda: given_up or limit.cancel_called)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # noqa: BLE001 - an agent raises what it likes
            if limit.cancel_called and len(let_go) > kept:
                error = _out_of_time(within_s)
                return
            await anyio.lowlevel.checkpoint_if_cancelled()  # if it was not the agent who cancelled this
            error = told(raised)
        if limit.cancelled_caught:
            error = _out_of_time(within_s)

    try:
        async with plain_task_group() as tasks:
            tasks.start_soon(watch)
            tasks.start_soon(host)
            await ended.wait()
            tasks.cancel_scope.cancel()
    except RuntimeError:
        if not error or len(let_go) == kept:
            raise
        # It was let go of inside scopes that nobody will leave: its task is in disorder, and is gone.
    finally:
        box.close()
    return error


def _out_of_time(within_s: float) -> str:
    return f"The agent ran out of its {within_s:g} s."


def told(error: BaseException) -> str:
    """What an agent's exception says, as one bounded line."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, InvalidRequest) and error.code in _SAID_ALREADY:
        return str(error)
    try:
        words = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the text of a foreign exception may be broken too
        words = ""
    text = f"The agent raised {type(error).__name__}{': ' if words else ''}{words}"
    return text if len(text) <= ERROR_CHARS_MAX else f"{text[:ERROR_CHARS_MAX]}..."


async def _call(agent: Agent, box: Box, context: Context) -> None:
    await agent.run(box, context)


@coroutine
def _driven(work: Coroutine[Any, Any, None], over: Callable[[], bool]) -> Generator[Any, Any, None]:
    """Drive a coroutine, as `await` would, but give it up when it has caught CANCELS_MAX cancellations since
    its time was `over`: those of its own scopes are its own affair."""
    caught = 0
    send, value = work.send, None
    while True:
        try:
            awaited = send(value)
        except StopIteration:
            return
        try:
            value, send = (yield awaited), work.send
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - passed on, into the coroutine
            caught += over()
            if caught > CANCELS_MAX:
                let_go.append(work)
                raise _LetGo from None
            value, send = error, work.throw


_AGENTS_BELOW: CodeType = getattr(_driven, "__wrapped__", _driven).__code__


@contextmanager
def interrupting() -> Iterator[None]:
    """Let SIGALRM interrupt an agent that blocks, as long as `turning` does not put it off.

    Does nothing outside the main thread, or where the program uses that signal itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


async def turning() -> None:
    """Put the signal off for as long as the event loop turns. Runs until cancelled."""
    while signal.getsignal(signal.SIGALRM) is _interrupt:
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_MAX_S, BLOCK_CHECK_S)
        await anyio.sleep(BLOCK_CHECK_S)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise where it happens inside an agent; anything else that takes long is no agent's doing."""
    while frame is not None:
        if frame.f_code is _AGENTS_BELOW:
            raise AgentBlocked
        frame = frame.f_back
