"""How a task's scripts are started: by the shell that is there, or by what their first line names."""

from __future__ import annotations

from pathlib import Path

from cloudyard.rollout.box import Box

EXECUTABLE = 0o755
_SHELLS = ("sh", "bash", "dash")
_SHELL_AND_SCRIPT = 'command -v bash >/dev/null 2>&1 && exec bash "$0"; exec sh "$0"'


def by_shell(script: Path) -> bool:
    """Whether a script is a shell's: it names none, or a shell, in its first line."""
    with script.open("rb") as source:
        first = source.readline(256)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if not words:
        return True
    program = words[1] if Path(words[0]).name == "env" and len(words) > 1 else words[0]
    return Path(program).name in _SHELLS


async def start_of(box: Box, script: Path, path: str) -> list[str]:
    """The arguments that start a script which was uploaded to `path`: bash, or sh where there is no bash; a
    script in another language is made executable and started by its own first line."""
    if by_shell(script):
        return ["/bin/sh", "-c", _SHELL_AND_SCRIPT, path]
    if not script.stat().st_mode & 0o111:
        await box.write(path, script.read_bytes(), mode=EXECUTABLE)
    return [path]
