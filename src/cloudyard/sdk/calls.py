"""Stateless calls: what a user passes becomes a CallSpec, which is sent until it has a result.

A call leaves nothing behind, so one that failed through our fault is made again, a bounded number of times.
What the code itself did is its result and is never repeated.
"""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import anyio
import msgspec

from cloudyard.errors import (
    CloudyardError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    YardUnavailable,
)
from cloudyard.model import (
    CALL_BYTES_MAX,
    CALL_FILES_MAX,
    CALL_MANY_MAX,
    CallResult,
    CallSpec,
    Case,
    Comparison,
    Fault,
    Language,
    call_limit_s,
    normalised_call,
)
from cloudyard.sdk.given import bytes_of
from cloudyard.sdk.tasks import plain_task_group
from cloudyard.sdk.transport import (
    ANSWER_GRACE_S,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    RESTART_PATIENCE_S,
    Transport,
    text_only,
    wait_out_restarts,
)

INFRA_TRIES = 3  # of one call, where it failed through our fault
BUSY_PATIENCE_S = 60.0  # how long a yard whose queues are full is asked again
MANY_PATIENCE_S = 60.0  # how long a yard that is away is waited for in the middle of a batch
AT_ONCE_MAX = 1024  # calls of one `call_many` under way
SUFFIXES: dict[str, Language] = {".py": "python", ".sh": "shell", ".c": "c"}

CaseLike = Case | Mapping[str, Any] | tuple[str | bytes, str | bytes | None]
FilesLike = Mapping[str, str | bytes] | str | os.PathLike[str]


class CallOptions(TypedDict, total=False):
    """What may be said of a call besides its code; see `CallSpec` for meanings and defaults."""

    file: str | os.PathLike[str] | None
    language: Language | None
    stdin: str | bytes
    files: FilesLike
    args: Sequence[str]
    env: Mapping[str, str]
    preload: Sequence[str]
    image: str
    timeout_s: float
    memory: int | str
    output_limit_bytes: int
    cases: Iterable[CaseLike]
    compare: Comparison
    stop_at_first: bool


_OPTIONS = tuple(CallOptions.__annotations__)


def spec_of(code: str | None, options: Mapping[str, Any]) -> CallSpec:
    """A checked CallSpec of what a user passed.

    Args:
        code: the program's text; None where `options` has a `file`.
        options: as in CallOptions.

    Raises:
        InvalidRequest: an option is misspelt, of the wrong type or out of range.
        NotFound: a local file is not there.
        LimitExceeded: it is too large to send.
    """
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"Options are {', '.join(_OPTIONS)}."
            raise InvalidRequest(f"A call has no option {name!r}.", code="unknown_field", hint=meant)
    fields = dict(options)
    file, language = fields.pop("file", None), fields.pop("language", None)
    if (code is None) == (file is None):
        raise InvalidRequest(
            "A call needs either code or file, and not both.", code="no_code", hint='yard.call("print(1)")'
        )
    if file is not None:
        code = _text_of(Path(file))
        language = language or _language_of(Path(file))
    with text_only():
        fields["stdin"] = bytes_of("stdin", fields.get("stdin", b""))
        fields["files"] = _files_of(fields.get("files", {}))
        fields["cases"] = [_case_of(case) for case in fields.get("cases", ())]
    for name, kind in (("args", list), ("preload", list), ("env", dict)):
        if isinstance(fields.get(name), str):
            raise InvalidRequest(
                f"{name} is the text {fields[name]!r}.", code="bad_call_spec", hint=f"Pass a {kind.__name__}."
            )
        fields[name] = kind(fields.get(name) or ())
    try:
        spec = msgspec.convert({**fields, "code": code, "language": language or "python"}, CallSpec)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"The call cannot be made: {exc}.", code="bad_call_spec") from exc
    return normalised_call(spec)


def specs_of(calls: Iterable[CallSpec | Mapping[str, Any] | str], shared: CallOptions) -> list[CallSpec]:
    """Checked specs of a batch. Raises as `spec_of`, and says which call it is."""
    specs: list[CallSpec] = []
    for call in calls:
        if len(specs) == CALL_MANY_MAX:
            raise InvalidRequest(
                f"There are more than {CALL_MANY_MAX} calls.",
                code="out_of_range",
                hint="Send them in several batches.",
            )
        try:
            match call:
                case CallSpec():
                    specs.append(normalised_call(call))
                case str():
                    specs.append(spec_of(call, shared))
                case _:
                    options = {**shared, **call}
                    specs.append(spec_of(options.pop("code", None), options))
        except CloudyardError as error:
            raise _of_call(error, len(specs)) from error
    return specs


async def send(
    transport: Callable[[], Transport], spec: CallSpec, *, patience_s: float = RESTART_PATIENCE_S
) -> CallResult:
    """Make a call until it has a result that is not our failure, at most INFRA_TRIES times.

    Args:
        transport: the open one; raises Conflict once the client is closed.
        spec: what to run, normalised.
        patience_s: how long a yard that is away is waited for.

    Returns:
        How it ended; after the last try also with the fault label `infra`.

    Raises:
        CloudyardError: what the yard answered, or that it could not be reached.
    """
    within_s = call_limit_s(spec.timeout_s, len(spec.cases)) + ANSWER_GRACE_S

    async def attempt() -> CallResult:
        return await transport().call(spec, within_s=within_s)

    tries, pause_s = 0, BACKOFF_FIRST_S
    busy_until = anyio.current_time() + BUSY_PATIENCE_S
    while True:
        try:
            result = await wait_out_restarts(attempt, patience_s=patience_s)
            if result.fault is None or result.fault.label != "infra" or tries + 1 >= INFRA_TRIES:
                return result
            tries += 1
        except LimitExceeded as error:
            if not error.retry_safe or anyio.current_time() + pause_s > busy_until:
                raise
        except CloudyardError as error:
            waited_out = isinstance(error, YardUnavailable) and error.retry_safe
            if error.fault != "infra" or waited_out or tries + 1 >= INFRA_TRIES:
                raise
            tries += 1
        await anyio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(pause_s * 2, BACKOFF_MAX_S)


async def send_many(
    transport: Callable[[], Transport], specs: Sequence[CallSpec], *, at_once: int
) -> list[CallResult]:
    """Make all calls, `at_once` at a time; results in the order of the specs.

    A call that fails through our fault, or that no edge has room for, however often it is tried, has a result
    with the fault label `infra`.

    Raises:
        CloudyardError: of the first call that the yard refused for what it asks; the others are cancelled.
    """
    if not 1 <= at_once <= AT_ONCE_MAX:
        raise InvalidRequest(
            f"at_once is {at_once}.", code="out_of_range", hint=f"Between 1 and {AT_ONCE_MAX}."
        )
    results: list[CallResult | None] = [None] * len(specs)
    numbers = iter(range(len(specs)))

    async def worker() -> None:
        for number in numbers:
            try:
                results[number] = await send(transport, specs[number], patience_s=MANY_PATIENCE_S)
            except CloudyardError as error:
                if error.fault != "infra" and not (isinstance(error, LimitExceeded) and error.retry_safe):
                    raise _of_call(error, number) from error
                results[number] = CallResult(
                    fault=Fault(label="infra", reason=error.code, evidence=str(error))
                )

    async with plain_task_group() as tasks:
        for _ in range(min(at_once, len(specs))):
            tasks.start_soon(worker)
    return [result for result in results if result is not None]


def _of_call(error: CloudyardError, number: int) -> CloudyardError:
    return type(error)(
        f"Call {number} of the batch: {error.message}",
        code=error.code,
        hint=error.hint,
        retry_safe=error.retry_safe,
        fault=error.fault,
    )


def _language_of(file: Path) -> Language:
    language = SUFFIXES.get(file.suffix)
    if language is None:
        raise InvalidRequest(
            f"The language of {file} cannot be told from its name.",
            code="unknown_language",
            hint=f"Name it {', '.join(SUFFIXES)}, or pass language=.",
        )
    return language


def _text_of(file: Path) -> str:
    try:
        return _content_of(file).decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(
            f"{file} is no program text: it is not UTF-8.", code="not_text", hint="Save it as UTF-8."
        ) from exc


def _content_of(file: Path) -> bytes:
    """A local file, if it is small enough to be part of a call."""
    try:
        with file.open("rb") as source:
            content = source.read(CALL_BYTES_MAX + 1)
    except FileNotFoundError as exc:
        raise NotFound(f"There is no file {file}.", code="no_such_file") from exc
    except OSError as exc:
        raise InvalidRequest(f"{file} cannot be read: {exc.strerror}.", code="unreadable") from exc
    if len(content) > CALL_BYTES_MAX:
        raise LimitExceeded(
            f"{file} is larger than the {CALL_BYTES_MAX} bytes that fit into a call.",
            code="call_too_large",
            hint="Use a sandbox, which takes files of any size.",
        )
    return content


def _files_of(files: object) -> dict[str, bytes]:
    if isinstance(files, Mapping):
        return {str(path): bytes_of(f"files[{path!r}]", content) for path, content in files.items()}
    if not isinstance(files, str | os.PathLike):
        raise InvalidRequest(
            f"files is a {type(files).__name__}.",
            code="bad_call_spec",
            hint="Pass a mapping of paths to bytes or text, or a local directory.",
        )
    root = Path(files)
    if not root.is_dir():
        raise NotFound(f"There is no directory {root}.", code="no_such_file")
    found: dict[str, bytes] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            found[path.relative_to(root).as_posix()] = _content_of(path)
            if len(found) > CALL_FILES_MAX or sum(map(len, found.values())) > CALL_BYTES_MAX:
                raise LimitExceeded(
                    f"The directory {root} is too large for a call.",
                    code="call_too_large",
                    hint=f"At most {CALL_FILES_MAX} files of {CALL_BYTES_MAX} bytes together.",
                )
    return found


def _case_of(case: object) -> Case:
    match case:
        case Case():
            return case
        case (stdin, expected):
            pass
        case {**fields} if set(fields) <= set(Case.__struct_fields__):
            stdin, expected = fields.get("stdin", b""), fields.get("expected")
        case _:
            raise InvalidRequest(
                f"A case is {case!r:.200}.",
                code="bad_cases",
                hint="Pass a Case, a pair (stdin, expected), or a dict with these two.",
            )
    return Case(
        stdin=bytes_of("A case's stdin", stdin),
        expected=None if expected is None else bytes_of("A case's expected output", expected),
    )
