"""From a yard's words to inspect-ai's: results, and the errors that its interface asks for. Does no I/O."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxUnavailableError

from cloudyard import Completed, NotFound, SandboxUnavailable, YardUnavailable

SIGNAL_BASE = 128  # a shell's exit code for a command that a signal ended: this and the signal's number
NOT_RUN = 126  # the same for a command that could not be run
_ERRNOS = {os.strerror(number): number for number in errno.errorcode}


@contextmanager
def our_failures() -> Iterator[None]:
    """What is the yard's failure, or a sandbox that is gone, in inspect-ai's word for it.

    Raises:
        SandboxUnavailableError: it was.
    """
    try:
        yield
    except (SandboxUnavailable, YardUnavailable, NotFound) as exc:
        raise SandboxUnavailableError(str(exc)) from exc


def exec_result(done: Completed, *, limit_text: str) -> ExecResult[str]:
    """The result of a command.

    Args:
        done: how it ended.
        limit_text: the bound of each stream, for people.

    Raises:
        SandboxUnavailableError: it did not run, or its end is not known, by a fault of the yard's.
        TimeoutError: it was killed for its timeout; `truncated_output` has what it wrote until then.
        PermissionError: the user may not run it.
        OutputLimitExceededError: it wrote more than was kept.
    """
    if done.fault is not None and done.fault.label == "infra":
        raise SandboxUnavailableError(f"{done.error or done.fault.reason} ({done.fault.evidence})")
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.timed_out:
        error = TimeoutError(f"The command was killed after {done.duration_s:.1f} s, its timeout.")
        error.truncated_output = stdout + stderr  # type: ignore[attr-defined]  # inspect-ai looks for it
        raise error
    if done.truncated:
        raise OutputLimitExceededError(limit_text, stdout + stderr)
    if done.error_code in ("not_executable", "is_a_directory", "directory_forbidden"):
        raise PermissionError(errno.EACCES, f"The command could not be run: {done.error}")
    if done.error:
        return ExecResult(success=False, returncode=done.exit_code or NOT_RUN, stdout="", stderr=done.error)
    code = SIGNAL_BASE + done.signal if done.signal is not None else done.exit_code
    assert code is not None, "a command that ran has an exit code or a signal"
    return ExecResult(success=code == 0, returncode=code, stdout=stdout, stderr=stderr)


def file_error(done: Completed, file: str) -> OSError:
    """The error of a file operation that ended badly, by the last words of the program that did it.

    Its class is the one that Python has for the kernel's reason: PermissionError, IsADirectoryError, ...
    """
    said = (done.error or done.stderr.decode(errors="replace")).strip()
    reason = said.rsplit(": ", 1)[-1]
    if number := _ERRNOS.get(reason):
        return OSError(number, reason, file)
    return OSError(errno.EIO, said or f"it ended with exit code {done.exit_code}", file)
