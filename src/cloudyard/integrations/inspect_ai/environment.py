"""The sandbox of a sample, as inspect-ai's interface wants it.

inspect-ai gives a provider no place for a task that lives from one call to the next, nor one event loop. So a
handle holds an id, and each call connects anew, which takes two milliseconds.
"""

from __future__ import annotations

import posixpath
import shlex
from logging import getLogger
from typing import Any, Literal, overload

import anyio
from inspect_ai._util.error import PrerequisiteError  # as other providers do: there is no public name for it
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from rich.markup import escape

import cloudyard
from cloudyard.integrations.inspect_ai import scripts
from cloudyard.integrations.inspect_ai.config import CONFIG_FILES, CloudyardConfig, read_config
from cloudyard.integrations.inspect_ai.outcomes import NOT_RUN, exec_result, file_error, our_failures
from cloudyard.model import OUTPUT_LIMIT_MAX_BYTES

MADE_BY = {"made-by": "inspect-ai"}  # label of every sandbox that this plugin makes
LABEL_CHARS = 100  # of a task's name and a sample's id
FILE_TIMEOUT_S = 600.0
SETTLE_TIMEOUT_S = 60.0
STOP_WITHIN_S = 30.0
POLLING_INTERVAL_S = 0.2

log = getLogger(__name__)


@sandboxenv(name="cloudyard")
class CloudyardSandbox(SandboxEnvironment):
    """One sandbox of a yard, used as the sample's user unless a call names another."""

    @classmethod
    def config_files(cls) -> list[str]:
        return list(CONFIG_FILES)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> CloudyardConfig:
        return CloudyardConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Find out before the first sample whether there is such a yard and image.

        Raises:
            PrerequisiteError: there is not, or the configuration is wrong; inspect-ai shows its words alone.
        """
        try:
            image = read_config(config).image
            async with cloudyard.connect() as yard:
                names = [row.name for row in await yard.images()]
        except (ValueError, cloudyard.CloudyardError) as error:
            raise PrerequisiteError(escape(str(error))) from error
        if image not in names:
            there = ", ".join(names) or "none"
            build = f"sudo cloudyard image build debian --package python3 --name {image}"
            raise PrerequisiteError(
                escape(f"The yard has no image {image!r}; it has {there}. Build one: {build}")
            )

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        said = read_config(config)
        labels = {**MADE_BY, "task": task_name[:LABEL_CHARS]}
        if sample := str(metadata.get("__sample_id__", ""))[:LABEL_CHARS]:
            labels["sample"] = sample
        async with cloudyard.connect() as yard:
            box = await yard.create(said.image, labels=labels, **said.options())
            try:
                user, cwd = await _settle(box, said)
            except BaseException:
                with anyio.move_on_after(STOP_WITHIN_S, shield=True):
                    await box.stop()
                raise
        return {"default": cls(box.id, user=user, cwd=cwd)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            box_id = environment.as_type(CloudyardSandbox).id
            try:
                await _stop(box_id)
            except cloudyard.CloudyardError as error:  # the sample's own result must not be lost for this
                log.warning("The sandbox %s of %s was not stopped: %s", box_id, task_name, error)

    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool
    ) -> None:
        if not cleanup:
            print("Sandboxes were left running. To stop them: inspect sandbox cleanup cloudyard")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Stop one sandbox, or all that evaluations made and left."""
        if id is not None:
            await _stop(id)
            return
        async with cloudyard.connect() as yard:
            left = [info.id for info in await yard.list() if MADE_BY.items() <= info.labels.items()]
            for box_id in left:
                await yard.stop(box_id)
        print(f"Stopped {len(left)} sandboxes.")

    def __init__(self, box_id: str, *, user: str, cwd: str) -> None:
        super().__init__()
        self.id = box_id
        """Its id in the yard."""
        self._user = user
        self._cwd = cwd

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """See `SandboxEnvironment.exec`. A timeout is kept inside the sandbox, so there is nothing to retry;
        no process runs here for a command, so there is nothing to throttle."""
        limit, limit_text = (
            SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR,
        )
        try:
            done = await self._run(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input or b"",
                cwd=posixpath.join(self._cwd, cwd or ""),
                env=env,
                user=user or self._user,
                timeout_s=timeout,
                output_limit_bytes=min(limit, OUTPUT_LIMIT_MAX_BYTES),
            )
        except cloudyard.LimitExceeded as error:
            if error.code != "command_too_large":
                raise
            return ExecResult(success=False, returncode=NOT_RUN, stdout="", stderr=str(error))
        return exec_result(done, limit_text=limit_text)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        done = await self._on_file(scripts.command(scripts.WRITE, file), file, stdin=data)
        if not done.ok:
            raise file_error(done, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit, limit_text = (
            SandboxEnvironmentLimits.MAX_READ_FILE_SIZE,
            SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR,
        )
        limit = min(limit, OUTPUT_LIMIT_MAX_BYTES)
        command = scripts.command(scripts.READ, file, str(limit + 1))
        done = await self._on_file(command, file, output_limit_bytes=limit)
        if not done.ok:
            raise file_error(done, file)
        if done.truncated:
            raise OutputLimitExceededError(limit_text, None)
        return done.stdout.decode() if text else done.stdout

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        command = ["cloudyard", "shell", self.id, "--cwd", self._cwd]
        if who := user or self._user:
            command += ["--user", who]
        return SandboxConnection(type="cloudyard", command=shlex.join(command), container=self.id)

    def default_polling_interval(self) -> float:
        return POLLING_INTERVAL_S

    async def _on_file(self, command: list[str], file: str, **options: Any) -> cloudyard.Completed:
        """Run what reads or writes a file.

        Raises:
            TimeoutError: it took more than FILE_TIMEOUT_S.
        """
        done = await self._run(
            command,
            cwd=self._cwd,
            env=scripts.ENVIRONMENT,
            user=self._user,
            timeout_s=FILE_TIMEOUT_S,
            **options,
        )
        if done.timed_out:
            raise TimeoutError(f"{file} could not be read or written within {FILE_TIMEOUT_S:g} s.")
        return done

    async def _run(self, command: list[str], **options: Any) -> cloudyard.Completed:
        with our_failures():
            async with cloudyard.connect() as yard:
                box = await yard.get(self.id)
                return await box.run(command, **options)


async def _settle(box: cloudyard.Sandbox, said: CloudyardConfig) -> tuple[str, str]:
    """The sample's user and directory, which are made where need be. An empty user is the image's own.

    Raises:
        ValueError: there is no such user, or no directory for it.
    """
    account = "" if said.user else scripts.ACCOUNT
    found = await _ask(box, scripts.FIND_ACCOUNT, account, str(scripts.ACCOUNT_ID))
    user = said.user or found[0]
    if not said.cwd:
        (cwd,) = await _ask(box, scripts.FIND_DIRECTORY, found[1], user=user, cwd="/")
        return user, cwd
    cwd = posixpath.join(found[1], said.cwd)
    (owner,) = await _ask(box, scripts.FIND_IDS, user=user, cwd="/")
    await _ask(box, scripts.MAKE_DIRECTORY, cwd, owner, user="0")
    return user, cwd


async def _ask(
    box: cloudyard.Sandbox, script: str, *arguments: str, user: str = "", cwd: str = ""
) -> list[str]:
    """The lines that a script prints."""
    done = await box.run(
        scripts.command(script, *arguments),
        env=scripts.ENVIRONMENT,
        user=user,
        cwd=cwd,
        timeout_s=SETTLE_TIMEOUT_S,
    )
    if not done.ok:
        reason = done.error or done.stderr.decode(errors="replace").strip() or f"exit code {done.exit_code}"
        raise ValueError(
            f"The user and directory of the sample could not be had in {box.id}: {reason}. "
            "Name others with `user` and `cwd` of the sandbox's configuration."
        )
    return done.text.splitlines()


async def _stop(box_id: str) -> None:
    async with cloudyard.connect() as yard:
        await yard.stop(box_id)
