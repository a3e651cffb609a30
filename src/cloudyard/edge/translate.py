"""Between the model's words and the guest's frames, for commands. Pure."""

from __future__ import annotations

from cloudyard.edge.records import Head
from cloudyard.model import CommandInfo, CommandSpec
from cloudyard.wire.guest import Kind, Options, Tag, encode

ARGV_SHOWN_CHARS = 256  # of a command's argv in a CommandInfo


def exec_frame(command_id: int, spec: CommandSpec, head: Head) -> bytes:
    """The frame that starts a command in a sandbox: the image's settings, under the sandbox's, under the
    command's.
    """
    env = {**head.image.env, **head.spec.env, **spec.env}
    cwd = spec.cwd or head.spec.cwd or head.image.cwd
    user = spec.user or head.spec.user or head.image.user
    options = Options.STDIN if spec.keep_stdin or spec.stdin else Options(0)
    fields: list[tuple[Tag, bytes | int]] = []
    if spec.shell:
        fields.append((Tag.SHELL, spec.shell.encode()))
    else:
        fields += [(Tag.ARG, part.encode()) for part in spec.argv]
    fields += [(Tag.ENV, f"{name}={value}".encode()) for name, value in env.items()]
    if cwd:
        fields.append((Tag.CWD, cwd.encode()))
    if user:
        fields.append((Tag.USER, user.encode()))
    if spec.pty is not None:
        options |= Options.PTY
        fields += [(Tag.ROWS, spec.pty.rows), (Tag.COLS, spec.pty.cols)]
    fields.append((Tag.OPEN_FILES, head.spec.open_files))
    if options:
        fields.append((Tag.OPTIONS, int(options)))
    return encode(Kind.EXEC, command_id, *fields)


def signal_frame(command_id: int, number: int) -> bytes:
    """The frame that signals a command's whole tree."""
    return encode(Kind.SIGNAL, command_id, (Tag.SIGNAL, number))


def acknowledgement(command_id: int, stream: int, offset: int) -> bytes:
    """The frame that says that all bytes of a stream below an offset are safe here."""
    return encode(Kind.OUTPUT_ACK, command_id, (Tag.STREAM, stream), (Tag.OFFSET, offset))


def command_info(command_id: int, spec: CommandSpec) -> CommandInfo:
    """What is known of a command before it runs. A long argv is shortened: this is for people to look at."""
    argv = spec.argv or ["/bin/sh", "-c", spec.shell]
    shown: list[str] = []
    left = ARGV_SHOWN_CHARS
    for part in argv:
        if left <= 0:
            shown.append("...")
            break
        shown.append(part if len(part) <= left else part[:left] + "...")
        left -= len(part)
    return CommandInfo(command_id=command_id, running=True, argv=shown, pty=spec.pty is not None)
