"""A program in Python that runs in the interpreter that is there already, as under `python3 main.py`."""

from __future__ import annotations

import atexit
import builtins
import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from cloudyard.edge.functions.inside.base import WORK

RESEED = ("numpy.random", "torch")  # each has a `seed()`; what they hold is else the same in every call


class Program:
    """A program in Python, to be run in this very interpreter as `python3 main.py` would."""

    def __init__(self, argv: list[str]) -> None:
        self.path = f"{WORK}/{argv[0]}"
        with open(self.path, "rb") as file:
            self.text = file.read()
        main = type(sys)("__main__")
        loader = sys.modules["_frozen_importlib_external"].SourceFileLoader
        self.names: dict[str, Any] = main.__dict__
        self.names.update(
            __file__=self.path,
            __builtins__=builtins,
            __cached__=None,
            __annotations__={},
            __loader__=loader("__main__", self.path),
        )
        self.before = set(sys.modules)
        sys.modules["__main__"] = main
        sys.argv = argv
        sys.orig_argv = ["python3", *argv]
        sys.path.insert(0, WORK)
        for name in RESEED:
            if name in sys.modules:
                sys.modules[name].seed()

    def ended_by(self, error: BaseException) -> int:
        """Say of an exception that nobody caught what the interpreter says, with none of our frames in it.
        Gives the exit code."""
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            sys.stderr.write(f"{error.code}\n")
            return 1
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except BaseException as second:  # noqa: BLE001 (a hook of the call may raise anything)
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(second), second, second.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def leave(self, code: int) -> NoReturn:
        """End as the interpreter does, but for taking down what it was born with: that would copy every page
        of the host's. Threads are waited for, and what the program still holds is let go, so that its files
        are flushed."""
        if "threading" in sys.modules:
            _try(sys.modules["threading"]._shutdown)
        _try(atexit._run_exitfuncs)
        self.names = {}
        for name in [name for name in sys.modules if name not in self.before] + ["__main__"]:
            sys.modules.pop(name, None)
        gc.collect()
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is None or stream.closed or _try(stream.flush) or stream is sys.stderr:
                continue
            code = code or 120  # as the interpreter has it
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


def _try(step: Callable[[], object]) -> bool:
    """Take a step of the interpreter's end. What is raised in it is told, and gives False."""
    try:
        step()
    except BaseException as exc:  # noqa: BLE001 (it is the call's own code)
        if sys.stderr is not None:
            sys.excepthook(type(exc), exc, exc.__traceback__)
        return False
    return True
