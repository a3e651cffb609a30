"""`cloudyard run`, `shell`, `ls` and `stop`: what one does with sandboxes, on the SDK alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, get_args

import anyio
import msgspec

from cloudyard.cli import EXIT_FAILED, EXIT_SIGNAL
from cloudyard.cli.lease import LEASE_S, Leased, leased, until_told_to_end
from cloudyard.cli.results import EXIT_TIMED_OUT, spelt_out
from cloudyard.cli.terminal import READ_BYTES, STDERR, STDIN, STDOUT, Parting, converse, put
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded
from cloudyard.model import OUTPUT_LIMIT_MAX_BYTES, SandboxInfo, StartError
from cloudyard.sdk.client import SandboxOptions, Yard, connect
from cloudyard.sdk.process import Completed, Process
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.tasks import plain_task_group

DEFAULT_IMAGE = "debian"
EXIT_NOT_STARTED = 127
EXIT_HUNG_UP = EXIT_SIGNAL + signal.SIGHUP


# --- run
# --------------------------------------------------------------------------------------------------------


def add_run_arguments(parser: ArgumentParser) -> None:
    """What `cloudyard run` takes."""
    parser.usage = "cloudyard run [options] COMMAND [ARGUMENT ...]"
    parser.description = (
        "Run a command in a new sandbox, which is stopped afterwards, or in a given one. One argument is a "
        "line for its /bin/sh; several are a program and its arguments. Output is passed on as it comes, "
        f"byte for byte, up to {OUTPUT_LIMIT_MAX_BYTES >> 30} GiB of stdout and as much of stderr. The exit "
        "code is the command's own."
    )
    _add_sandbox_arguments(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="kill the command after so many seconds")
    parser.add_argument(
        "--no-output-timeout", type=float, metavar="S", help="kill it once it has written nothing for so long"
    )
    parser.add_argument("--stdin", action="store_true", help="give it this program's standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object when it has ended")
    parser.add_argument("command", nargs=REMAINDER, metavar="COMMAND", help="the command and its arguments")


def run_run(args: Namespace) -> int:
    """Run a command and give its exit code."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise InvalidRequest("No command was given.", code="bad_command", hint="cloudyard run echo hello")
    command = words[0] if len(words) == 1 else words
    stdin = sys.stdin.buffer.read() if args.stdin and args.json else b""
    return anyio.run(until_told_to_end, lambda: _run(args, command, stdin))


async def _run(args: Namespace, command: str | list[str], stdin: bytes) -> int:
    how: dict[str, Any] = {
        "timeout_s": args.timeout,
        "no_output_timeout_s": args.no_output_timeout,
        "env": _env(args),
        "cwd": args.cwd,
        "user": args.user,
    }
    async with connect() as yard, _sandbox(yard, args) as box:
        try:
            if args.json:
                done = await box.run(command, stdin=stdin, **how)
                print(json.dumps(_completed_json(box.id, done)))
                return exit_code_of(done)
            done, cut = await _run_streaming(box, command, with_stdin=args.stdin, how=how)
        except InvalidRequest as error:
            if error.code not in get_args(StartError):
                raise
            print(f"cloudyard: {error.message} {_hint_of_cwd(error.message, args)}".rstrip(), file=sys.stderr)
            return EXIT_NOT_STARTED
    _explain(done)
    for loss in cut:
        print(f"cloudyard: {loss.message}", file=sys.stderr)
    return exit_code_of(done) or (EXIT_FAILED if cut else 0)


async def _run_streaming(
    box: Sandbox, command: str | list[str], *, with_stdin: bool, how: dict[str, Any]
) -> tuple[Completed, list[LimitExceeded]]:
    """How it ended, and what of its output was not kept long enough to be passed on."""
    with anyio.CancelScope(shield=True):  # what nobody knows the number of, nobody could kill
        process = await box.start(command, stdin=with_stdin, output_limit_bytes=OUTPUT_LIMIT_MAX_BYTES, **how)
    cut: list[LimitExceeded] = []
    try:
        async with plain_task_group() as tasks:
            if with_stdin:
                tasks.start_soon(_feed, process)
            async with plain_task_group() as streams:
                streams.start_soon(_copy, process.stdout(), STDOUT, cut)
                streams.start_soon(_copy, process.stderr(), STDERR, cut)
            done = await process.wait(output=False)
            tasks.cancel_scope.cancel()
    except BaseException:
        with anyio.move_on_after(5, shield=True):
            await process.kill()
        raise
    return done, cut


async def _copy(pieces: AsyncGenerator[bytes, None], sink: int, cut: list[LimitExceeded]) -> None:
    try:
        async for piece in pieces:
            await put(sink, piece)
    except LimitExceeded as error:
        if error.code != "output_truncated":
            raise
        cut.append(error)


def _hint_of_cwd(message: str, args: Namespace) -> str:
    """What to do when the image's directory is closed to the user that was asked for."""
    if not args.user or args.cwd or ": cwd " not in message or not message.endswith("Permission denied."):
        return ""
    return f"User {args.user} may not enter the directory where commands start; give --cwd, such as --cwd /."


async def _feed(process: Process) -> None:
    """This program's stdin to the command's, until it ends or the command has closed it."""
    try:
        while piece := await _read_stdin():
            await process.write(piece)
        await process.close_stdin()
    except Conflict:
        return


async def _read_stdin() -> bytes:
    with suppress(OSError):  # a regular file cannot be waited for, and need not be
        await anyio.wait_readable(STDIN)
    return os.read(STDIN, READ_BYTES)


def exit_code_of(done: Completed) -> int:
    """The exit code that tells a shell how a command ended."""
    if done.timed_out:
        return EXIT_TIMED_OUT
    if done.exit_code is not None:
        return done.exit_code
    if done.signal is not None:
        return EXIT_SIGNAL + done.signal
    return EXIT_NOT_STARTED if done.error else EXIT_FAILED


def _explain(done: Completed) -> None:
    """What the exit code alone does not tell, on stderr."""
    reasons = []
    if done.error:
        reasons.append(f"the command did not start: {done.error}")
    if done.timed_out:
        silent = done.fault is not None and done.fault.reason == "no_output"
        why = "for its silence" if silent else "after its timeout"
        reasons.append(f"the command was killed {why}, {done.duration_s:.1f} s")
    if done.oom:
        reasons.append("the sandbox's memory limit killed a process in the sandbox")
    if "pids" in done.limits_hit:
        reasons.append("the sandbox's limit of processes refused some while it ran")
    if done.fault is not None and done.fault.label == "infra":
        reasons.append(f"the yard is at fault: {done.fault.reason} {done.fault.evidence}".rstrip())
    for reason in reasons:
        print(f"cloudyard: {reason}", file=sys.stderr)


def _completed_json(sandbox: str, done: Completed) -> dict[str, Any]:
    return {"sandbox": sandbox, "ok": done.ok, **spelt_out(done)}


# --- shell
# ------------------------------------------------------------------------------------------------------


def add_shell_arguments(parser: ArgumentParser) -> None:
    """What `cloudyard shell` takes."""
    parser.description = (
        "Open a terminal in a new sandbox, which is stopped afterwards, or in a given one. ctrl-] detaches "
        "and leaves the shell and its sandbox running."
    )
    parser.add_argument("sandbox", nargs="?", default="", metavar="SANDBOX", help="id of a running sandbox")
    _add_sandbox_arguments(parser, existing=False)
    parser.add_argument("--attach", type=int, metavar="N", help="come back to the shell with this number")


def run_shell(args: Namespace) -> int:
    """Open a terminal and give the shell's exit code."""
    if not (os.isatty(STDIN) and os.isatty(STDOUT)):
        raise InvalidRequest(
            "A shell needs a terminal, and this program's input or output is none.",
            code="no_terminal",
            hint="`cloudyard run` takes input and output of any kind.",
        )
    if args.attach is not None and not args.sandbox:
        raise InvalidRequest(
            "--attach needs a sandbox.", code="bad_arguments", hint="cloudyard shell SANDBOX --attach N"
        )
    return anyio.run(until_told_to_end, lambda: _shell(args))


async def _shell(args: Namespace) -> int:
    async with connect() as yard:
        if args.sandbox:
            return await _shell_in(await yard.get(args.sandbox), args, keep=None)
        async with _leased(yard, args) as lease:
            return await _shell_in(lease.box, args, keep=lease.keep)


async def _shell_in(box: Sandbox, args: Namespace, *, keep: Callable[[], Awaitable[None]] | None) -> int:
    size = os.get_terminal_size(STDIN)
    if args.attach is not None:
        process = await box.attach(args.attach)
    else:
        term = {"TERM": os.environ.get("TERM", "xterm-256color")}
        try:
            process = await box.shell(
                rows=size.lines, cols=size.columns, env=term | _env(args), cwd=args.cwd, user=args.user
            )
        except InvalidRequest as error:
            hint = _hint_of_cwd(error.message, args)
            raise InvalidRequest(
                error.message, code=error.code, hint=hint or error.hint, fault=error.fault
            ) from error
    match await converse(process):
        case Parting.ENDED:
            return exit_code_of(await process.wait(output=False))
        case Parting.HUNG_UP:
            return EXIT_HUNG_UP
        case Parting.DETACHED:
            if keep is not None:
                await keep()
            again = f"cloudyard shell {box.id} --attach {process.id}"
            print(f"Detached; the shell goes on. Back: {again}\nStop: cloudyard stop {box.id}")
            return 0


# --- ls, stop
# ---------------------------------------------------------------------------------------------------


def add_ls_arguments(parser: ArgumentParser) -> None:
    """What `cloudyard ls` takes."""
    parser.add_argument("--all", action="store_true", help="stopped ones that are still remembered too")
    parser.add_argument("--partial", action="store_true", help="where a node is away, those of all others")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run_ls(args: Namespace) -> int:
    """List sandboxes."""
    return anyio.run(_ls, args)


async def _ls(args: Namespace) -> int:
    async with connect() as yard:
        infos = await yard.list(stopped=args.all, partial=args.partial)
    if args.json:
        print(msgspec.json.encode(infos).decode())
        return 0
    rows = [("SANDBOX", "IMAGE", "STATE", "CPU", "MEMORY", "COMMANDS", "AGE")]
    rows += [_row(info, now=time.time()) for info in infos]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(info: SandboxInfo, *, now: float) -> tuple[str, str, str, str, str, str, str]:
    state = info.state if not info.reason else f"{info.state} ({info.reason})"
    age_s = max(0, int(now - info.created_at))
    if age_s < 120:
        age = f"{age_s} s"
    elif age_s < 7200:
        age = f"{age_s // 60} min"
    else:
        age = f"{age_s // 3600} h"
    memory = f"{info.memory_bytes / 2**20:.0f} MiB"
    return info.id, info.image, state, f"{info.cpu:g}", memory, str(info.commands), age


def add_stop_arguments(parser: ArgumentParser) -> None:
    """What `cloudyard stop` takes."""
    parser.add_argument("sandboxes", nargs="*", metavar="SANDBOX", help="ids of sandboxes")
    parser.add_argument("--all", action="store_true", help="every sandbox of the project")


def run_stop(args: Namespace) -> int:
    """Stop sandboxes. One that cannot be stopped does not keep the others from it."""
    if bool(args.sandboxes) == args.all:
        raise InvalidRequest(
            "Say which sandboxes to stop, or --all.", code="bad_arguments", hint="`cloudyard ls` lists them."
        )
    return anyio.run(_stop, args)


async def _stop(args: Namespace) -> int:
    failed = 0
    async with connect() as yard:
        names = [info.id for info in await yard.list()] if args.all else args.sandboxes
        for name in names:
            try:
                await yard.stop(name)
            except CloudyardError as error:
                print(f"cloudyard: {name}: {error}", file=sys.stderr)
                failed += 1
            else:
                print(name)
    return EXIT_FAILED if failed else 0


# --- shared
# -----------------------------------------------------------------------------------------------------


def _add_sandbox_arguments(parser: ArgumentParser, *, existing: bool = True) -> None:
    if existing:
        parser.add_argument("--in", dest="sandbox", default="", metavar="SANDBOX", help="a running sandbox")
    parser.add_argument("--image", default=DEFAULT_IMAGE, help=f"of a new sandbox (default: {DEFAULT_IMAGE})")
    parser.add_argument("--cpu", type=float, metavar="CORES", help="of a new sandbox")
    parser.add_argument("--cpu-weight", type=int, metavar="N", help="of a new sandbox: its share (100)")
    parser.add_argument(
        "--best-effort", action="store_true", help="a new sandbox gets the processor time that others leave"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of a new sandbox, such as 512MiB")
    parser.add_argument("--swap", metavar="SIZE", help="of a new sandbox, beyond its memory (none)")
    parser.add_argument(
        "--lxcfs",
        action="store_true",
        help="a new sandbox's /proc tells its own memory, processors and uptime",
    )
    parser.add_argument("--disk", metavar="SIZE", help="of a new sandbox: what it may write, such as 2GiB")
    parser.add_argument("--pids", type=int, metavar="N", help="of a new sandbox: processes and threads")
    parser.add_argument("--open-files", type=int, metavar="N", help="of a new sandbox: of each process")
    parser.add_argument(
        "--user-namespaces",
        action="store_true",
        help="programs in a new sandbox may make them (browsers)",
    )
    parser.add_argument("--max-ttl", type=float, metavar="S", help="of a new sandbox: its longest life")
    parser.add_argument(
        "--lease",
        type=float,
        default=LEASE_S,
        metavar="S",
        help=f"a new sandbox stops so long after this program was killed (default: {LEASE_S:g})",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--cwd", default="", metavar="PATH", help="where the command starts")
    parser.add_argument("--user", default="", help="who it runs as: a name, a uid or uid:gid")


def _env(args: Namespace) -> dict[str, str]:
    env = {}
    for entry in args.env:
        name, equals, value = entry.partition("=")
        if not equals:
            raise InvalidRequest(f"--env is {entry!r}.", code="bad_env", hint="Write --env NAME=VALUE.")
        env[name] = value
    return env


def _leased(yard: Yard, args: Namespace) -> AbstractAsyncContextManager[Leased]:
    """A new sandbox for as long as it is used."""
    options: SandboxOptions = {}
    if args.cpu is not None:
        options["cpu"] = args.cpu
    if args.cpu_weight is not None:
        options["cpu_weight"] = args.cpu_weight
    if args.best_effort:
        options["cpu_class"] = "best_effort"
    if args.memory is not None:
        options["memory"] = args.memory
    if args.swap is not None:
        options["swap"] = args.swap
    if args.lxcfs:
        options["lxcfs"] = True
    if args.disk is not None:
        options["disk"] = args.disk
    if args.pids is not None:
        options["pids"] = args.pids
    if args.open_files is not None:
        options["open_files"] = args.open_files
    if args.user_namespaces:
        options["user_namespaces"] = True
    if args.max_ttl is not None:
        options["max_ttl_s"] = args.max_ttl
    return leased(yard, args.image, lease_s=args.lease, **options)


@asynccontextmanager
async def _sandbox(yard: Yard, args: Namespace) -> AsyncIterator[Sandbox]:
    """The sandbox that was named, or a new one."""
    if args.sandbox:
        yield await yard.get(args.sandbox)
    else:
        async with _leased(yard, args) as lease:
            yield lease.box
