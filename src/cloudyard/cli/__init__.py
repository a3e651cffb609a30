"""The command line, `cloudyard`: which command lives in which module, and how an error is shown.

A module of a command has two functions: `add_arguments(parser)` declares what it takes, `run(args)` does it
and gives the exit code. Where one module holds several commands, the functions are named after them:
`add_up_arguments` and `run_up`. Modules load when their command is given, so that `cloudyard --help` needs
none of them.

Exit codes: 0 done, 1 the yard could not do it, 2 the request itself is wrong, 128 plus a signal's number
where one ended it (130 ctrl-C, 141 nobody reads its output); `run` and `call` give the command's own.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from cloudyard import __version__
from cloudyard.errors import CloudyardError, InvalidRequest

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128  # plus the signal's number, as shells have it


class Command(NamedTuple):
    """Where a command lives: `prefix` tells it from others in the same module."""

    module: str
    help: str
    prefix: str = ""


COMMANDS = {
    "up": Command("cloudyard.cli.yard", "start a yard on this machine", "up"),
    "down": Command("cloudyard.cli.yard", "stop the yard of this machine", "down"),
    "doctor": Command("cloudyard.cli.yard", "say what this machine offers and lacks", "doctor"),
    "image": Command("cloudyard.cli.images", "build images and list them"),
    "run": Command("cloudyard.cli.sandboxes", "run a command in a sandbox", "run"),
    "call": Command("cloudyard.cli.calls", "run code once, or judge it on test cases"),
    "shell": Command("cloudyard.cli.sandboxes", "open a terminal in a sandbox", "shell"),
    "ls": Command("cloudyard.cli.sandboxes", "list sandboxes", "ls"),
    "stop": Command("cloudyard.cli.sandboxes", "stop sandboxes", "stop"),
    "rollout": Command("cloudyard.cli.rollouts", "let agents try tasks, and show what came of it"),
    "tasks": Command("cloudyard.cli.tasks", "make tasks of a package, and check tasks"),
    "bench": Command("cloudyard.cli.bench", "measure this yard against its floors"),
}


class Parser(ArgumentParser):
    """Options are written out, and a misspelt one is answered with the one that was meant."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and give the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name not in COMMANDS:
        return _top_level(words)
    command = COMMANDS[name]
    module = import_module(command.module)
    add_arguments, run = ("add_arguments", "run")
    if command.prefix:
        add_arguments, run = f"add_{command.prefix}_arguments", f"run_{command.prefix}"
    parser = Parser(prog=f"cloudyard {name}", description=f"{command.help[0].upper()}{command.help[1:]}.")
    getattr(module, add_arguments)(parser)
    args = parser.parse_args(words[1:])
    try:
        code = int(getattr(module, run)(args))
        sys.stdout.flush()
        return code
    except CloudyardError as error:
        print(f"cloudyard: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidRequest) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes nowhere
        return EXIT_SIGNAL + signal.SIGPIPE


def _top_level(words: list[str]) -> int:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        prog="cloudyard",
        usage="cloudyard COMMAND ...",
        description="A yard of sandboxes in which agents are trained and evaluated.",
        epilog=f"commands:\n{rows}\n\n`cloudyard COMMAND --help` says more.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cloudyard {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of those below")
    args = parser.parse_args(words[:1])
    if args.command is not None:
        near = difflib.get_close_matches(args.command, COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else "`cloudyard --help` lists them"
        parser.error(f"there is no command {args.command!r}; {meant}")
    parser.print_help()
    return EXIT_USAGE
