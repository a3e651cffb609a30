"""`cloudyard call`: code run once in the warm pool, or judged on test cases, on the SDK alone."""

from __future__ import annotations

import base64
import binascii
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from cloudyard.cli import EXIT_FAILED, EXIT_SIGNAL
from cloudyard.cli.lease import until_told_to_end
from cloudyard.cli.results import EXIT_TIMED_OUT, spelt_out
from cloudyard.cli.terminal import STDERR, STDOUT, put
from cloudyard.errors import InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import CALL_BYTES_MAX, CALL_IMAGE_DEFAULT, MIB, CallResult, Case, CaseResult
from cloudyard.sdk.calls import SUFFIXES, CallOptions
from cloudyard.sdk.client import connect

READ_BYTES_MAX = 4 * CALL_BYTES_MAX  # of a local file: JSON may write a byte of a case as several
SHOWN_BYTES = 60  # of what a case expected and got
_EPILOG = (
    "Exit codes: the code's own; 128 plus a signal's number; 124 after --timeout; with --cases 0 if all "
    "passed and 1 if not; 1 also if the yard could not do it (it says so), 2 if the request itself is "
    "wrong. Code that does not compile gives the compiler's exit code, and its words on stderr."
)


class _CaseLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of cases. Text as it is, other bytes in base64."""

    stdin: str = ""
    expected: str | None = None
    stdin_base64: str = ""
    expected_base64: str | None = None

    def case(self) -> Case:
        expected = self.expected.encode() if self.expected is not None else None
        if self.expected_base64 is not None:
            expected = base64.b64decode(self.expected_base64, validate=True)
        stdin = base64.b64decode(self.stdin_base64, validate=True)
        return Case(stdin=stdin or self.stdin.encode(), expected=expected)


_line_decoder = msgspec.json.Decoder(_CaseLine)


def add_arguments(parser: ArgumentParser) -> None:
    """What `cloudyard call` takes."""
    parser.usage = "cloudyard call [options] FILE|-|-c CODE [ARGUMENT ...]"
    parser.description = (
        "Run code once in a new process of the warm pool, which sees nothing of any other call. Its output "
        "is printed when it has ended."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "words", nargs="*", metavar="FILE", help="the program (-: standard input), its arguments"
    )
    parser.add_argument("-c", dest="code", metavar="CODE", help="the program's text, instead of a file")
    parser.add_argument(
        "--language",
        choices=sorted(SUFFIXES.values()),
        help=f"else by the file's suffix ({', '.join(SUFFIXES)}), else python",
    )
    parser.add_argument("--stdin", metavar="FILE", help="what it reads (-: standard input; else nothing)")
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATH[=LOCAL]",
        help="lay a local file into its working directory; may be repeated",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="imported ahead of the call"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="of the run, or of each case (10)")
    parser.add_argument("--memory", metavar="SIZE", help="such as 256MiB")
    parser.add_argument("--output-limit", type=int, metavar="BYTES", help="kept of each stream (65536)")
    parser.add_argument("--image", default=CALL_IMAGE_DEFAULT, help=f"what it runs in ({CALL_IMAGE_DEFAULT})")
    parser.add_argument(
        "--cases",
        metavar="FILE",
        help='judge it on a file of lines like {"stdin": "3\\n", "expected": "9\\n"}',
    )
    parser.add_argument("--compare", choices=["lines", "exact"], help="how output is compared (lines)")
    parser.add_argument(
        "--stop-at-first", action="store_true", help="run no case after one that does not pass"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Make the call and give its exit code."""
    code, options = what_is_asked(args)
    return anyio.run(until_told_to_end, lambda: _call(args, code, options))


def what_is_asked(args: Namespace) -> tuple[str | None, CallOptions]:
    """Code and options for `Yard.call`.

    Raises:
        InvalidRequest: arguments contradict each other, or a file cannot be read.
        NotFound: a file is not there.
    """
    words: list[str] = args.words
    options: CallOptions = {"image": args.image, "env": _pairs("env", args.env), "preload": args.preload}
    code: str | None = args.code
    if code is None:
        if not words:
            raise InvalidRequest(
                "No program was given.", code="no_code", hint="cloudyard call main.py, or -c 'print(42)'."
            )
        file, words = words[0], words[1:]
        if file != "-":
            options["file"] = file
        elif args.stdin == "-":
            raise InvalidRequest(
                "Standard input cannot be both the program and what it reads.", code="bad_arguments"
            )
        else:
            code = _read("-").decode(errors="surrogateescape")
    options["args"] = words
    options["files"] = {path: _read(local) for path, local in _files(args.file).items()}
    if args.language is not None:
        options["language"] = args.language
    if args.stdin is not None:
        options["stdin"] = _read(args.stdin)
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    if args.memory is not None:
        options["memory"] = args.memory
    if args.output_limit is not None:
        options["output_limit_bytes"] = args.output_limit
    if args.cases is not None:
        options["cases"] = _cases(args.cases)
    if args.compare is not None:
        options["compare"] = args.compare
    options["stop_at_first"] = args.stop_at_first
    return code, options


def exit_code_of(result: CallResult, *, judged: bool) -> int:
    """The exit code that tells a shell how a call ended."""
    if result.fault is not None and result.fault.label == "infra":
        return EXIT_FAILED
    if judged and result.phase == "run":
        return 0 if result.passed else EXIT_FAILED
    if result.timed_out:
        return EXIT_TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    return EXIT_SIGNAL + result.signal if result.signal is not None else EXIT_FAILED


async def _call(args: Namespace, code: str | None, options: CallOptions) -> int:
    async with connect() as yard:
        result = await yard.call(code, **options)
    judged = "cases" in options
    if args.json:
        print(json.dumps(_as_json(result)))
    else:
        for number, case in enumerate(result.cases, 1):
            print(_case_line(number, case, list(options["cases"])[number - 1]), flush=True)
        await put(STDOUT, result.stdout)
        await put(STDERR, result.stderr)
        for reason in _reasons(result):
            print(f"cloudyard: {reason}", file=sys.stderr)
    return exit_code_of(result, judged=judged)


def _as_json(result: CallResult) -> dict[str, Any]:
    fields = spelt_out(result)
    fields["cases"] = [spelt_out(case) for case in result.cases]
    return {"ok": result.ok, "passed": result.passed, **fields}


def _case_line(number: int, case: CaseResult, asked: object) -> str:
    line = f"case {number}: {case.verdict}, {case.duration_s:.3f} s, {case.peak_memory_bytes / 2**20:.0f} MiB"
    match case.verdict:
        case "wrong":
            assert isinstance(asked, Case)
            return f"{line}; expected {_shown(asked.expected or b'')}, got {_shown(case.stdout)}"
        case "failed":
            how = f"signal {case.signal}" if case.signal is not None else f"exit code {case.exit_code}"
            last = case.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            return f"{line}; {how}{f', {last[:200]}' if last else ''}"
        case _:
            return line


def _shown(data: bytes) -> str:
    text = repr(data[:SHOWN_BYTES].decode(errors="replace"))
    return text if len(data) <= SHOWN_BYTES else f"{text}... ({len(data)} bytes)"


def _reasons(result: CallResult) -> list[str]:
    """What the exit code alone does not tell."""
    reasons = []
    if result.phase == "compile" and not result.ok:
        reasons.append("the code does not compile")
    if result.timed_out:
        reasons.append(f"it was killed after its timeout, {result.duration_s:.1f} s")
    if result.oom:
        reasons.append("it ran into its memory limit")
    if result.truncated:
        reasons.append(
            f"of its output {len(result.stdout)} of {result.stdout_total} bytes of stdout and "
            f"{len(result.stderr)} of {result.stderr_total} bytes of stderr were kept"
        )
    if result.fault is not None and result.fault.label == "infra":
        reasons.append(f"the yard is at fault: {result.fault.reason} {result.fault.evidence}".rstrip())
    return reasons


def _cases(file: str) -> list[Case]:
    cases = []
    for number, line in enumerate(_read(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            cases.append(_line_decoder.decode(line).case())
        except (msgspec.MsgspecError, binascii.Error) as exc:
            raise InvalidRequest(
                f"Line {number} of {file} is no case: {exc}.",
                code="bad_cases",
                hint='A line looks like {"stdin": "3\\n", "expected": "9\\n"}.',
            ) from exc
    if not cases:
        raise InvalidRequest(f"{file} has no cases.", code="bad_cases")
    return cases


def _files(entries: list[str]) -> dict[str, str]:
    """Path inside and local path; one alone is both, by its last name."""
    found = {}
    for entry in entries:
        path, equals, local = entry.partition("=")
        found[path if equals else os.path.basename(path)] = local if equals else path
    return found


def _pairs(what: str, entries: list[str]) -> dict[str, str]:
    pairs = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals:
            raise InvalidRequest(
                f"--{what} is {entry!r}.", code=f"bad_{what}", hint=f"Write --{what} NAME=VALUE."
            )
        pairs[name] = value
    return pairs


def _read(file: str) -> bytes:
    """A local file, or standard input for `-`."""
    try:
        if file == "-":
            content = sys.stdin.buffer.read(READ_BYTES_MAX)
        else:
            with Path(file).open("rb") as source:
                content = source.read(READ_BYTES_MAX)
    except FileNotFoundError as exc:
        raise NotFound(f"There is no file {file}.", code="no_such_file") from exc
    except OSError as exc:
        raise InvalidRequest(f"{file} cannot be read: {exc.strerror}.", code="unreadable") from exc
    if len(content) == READ_BYTES_MAX:
        raise LimitExceeded(
            f"{file} is too large for a call.",
            code="call_too_large",
            hint=f"At most {CALL_BYTES_MAX // MIB} MiB go with one.",
        )
    return content
