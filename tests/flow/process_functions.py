"""Stateless calls as plain processes of this machine: what an edge's door needs to be tested, and no more.

No isolation and no pool: the code of these tests is their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from cloudyard.errors import CloudyardError
from cloudyard.model import CallResult, CallSpec, Case, CaseResult, Fault, Verdict

INTERPRETERS = {"python": [sys.executable, "-I"], "shell": ["/bin/sh"]}


class ProcessFunctions:
    """Makes each call in a directory of its own. `fail_with` are errors for the next calls, in order."""

    def __init__(self) -> None:
        self.made: list[CallSpec] = []
        self.running = 0
        self.most = 0
        self.killed = 0
        self.fail_with: list[CloudyardError] = []
        self.spoil = 0
        self.changed = anyio.Event()

    async def call(self, spec: CallSpec, *, project: str, cause: str) -> CallResult:
        assert isinstance(spec.memory, int)
        assert project
        assert cause
        self.made.append(spec)
        if self.fail_with:
            raise self.fail_with.pop(0)
        if self.spoil:
            self.spoil -= 1
            return CallResult(fault=Fault(label="infra", reason="worker_lost"))
        self.running += 1
        self.most = max(self.most, self.running)
        self._tell()
        try:
            if not spec.cases:
                return await self._run(spec, spec.stdin)
            return CallResult(cases=[await self._judge(spec, case) for case in spec.cases])
        except anyio.get_cancelled_exc_class():
            self.killed += 1
            raise
        finally:
            self.running -= 1
            self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, *, running: int) -> None:
        """Return when so many calls run."""
        with anyio.fail_after(20):
            while self.running != running:
                await self.changed.wait()

    async def _judge(self, spec: CallSpec, case: Case) -> CaseResult:
        done = await self._run(spec, case.stdin)
        verdict: Verdict = "passed" if done.stdout == case.expected else "wrong"
        return CaseResult(verdict=verdict, exit_code=done.exit_code, stdout=done.stdout)

    async def _run(self, spec: CallSpec, stdin: bytes) -> CallResult:
        with tempfile.TemporaryDirectory(prefix="cy-call-") as directory:
            for path, content in spec.files.items():
                target = Path(directory, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            main = Path(directory, "main")
            main.write_text(spec.code)
            with anyio.move_on_after(spec.timeout_s):
                done = await anyio.run_process(
                    [*INTERPRETERS[spec.language], str(main), *spec.args],
                    input=stdin,
                    cwd=directory,
                    env={"PATH": "/usr/bin:/bin", **spec.env},
                    check=False,
                    stderr=subprocess.PIPE,
                )
                kept = spec.output_limit_bytes
                return CallResult(
                    exit_code=done.returncode,
                    stdout=done.stdout[:kept],
                    stderr=done.stderr[:kept],
                    stdout_total=len(done.stdout),
                    stderr_total=len(done.stderr),
                    truncated=max(len(done.stdout), len(done.stderr)) > kept,
                    fault=Fault(label="policy", reason="exit") if done.returncode else None,
                )
            return CallResult(signal=9, timed_out=True, fault=Fault(label="policy", reason="timeout"))
