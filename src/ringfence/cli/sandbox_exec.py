"""``ringfence sandbox exec``: one more command in a sandbox that somebody keeps."""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.cli import requesting
from ringfence.cli.output import note, print_json
from ringfence.cli.run import Run

if TYPE_CHECKING:
    from ringfence.model.sandbox import SandboxRequest


def execute(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code, as ``ringfence run`` would."""
    if options.command[:1] == ["--"]:
        del options.command[0]
    # What only a new sandbox can be asked for.
    options.env_file, options.changes, options.template = [], False, None
    options.allow_dangerous_mount = options.mount = options.policy = options.preset = None
    argv = requesting.check_command(options)
    requesting.check_modes(options)
    env = requesting.environment(options)
    code: int = asyncio.run(Exec(options, argv, env).main())
    return code


class Exec(Run):
    """One command in a sandbox that is not ours: when it ends, or we do, the sandbox lives on."""

    process_id = None  # any number may run beside each other

    def __init__(self, options: argparse.Namespace, argv: tuple[str, ...], env: dict[str, str]) -> None:
        from ringfence.model.sandbox import SandboxRequest

        super().__init__(options, argv, SandboxRequest(), [], [], [])
        self.own_env = env

    async def _in_sandbox(self, node: Any) -> int:
        from ringfence.model.errors import WrongState
        from ringfence.node import kept

        self.sandbox = sandbox = await kept.visit(node, self.options.id)
        door = None
        try:
            if sandbox.paused:
                raise WrongState(
                    f"sandbox {sandbox.id} is paused", hint=f"ringfence sandbox resume {sandbox.id}"
                )
            self.request = _with_env(sandbox.request, self.own_env)
            if self.request.policy.door.network.mode == "egress":
                door = await self._door(node)  # open while we are here, unless another run has it
            return self._outcome(await self._command())
        finally:
            if door is not None:
                await door.close(keep=True)
            await sandbox.detach()

    async def _run(self, spec: Any) -> Any:
        return await super()._run(replace(spec, env=spec.env | self.own_env))

    async def end(self, grace: float) -> None:
        """We are told to end: the command goes, the sandbox stays."""
        process = self.process
        if process is None:
            return
        if grace > 0:
            await process.signal(signal.SIGTERM, "group")
            await asyncio.sleep(grace)
        await process.signal(signal.SIGKILL, "group")

    def _outcome(self, result: Any) -> int:
        from ringfence.cli import report
        from ringfence.model.levels import Cause

        end, options = result.end, self.options
        code = report.exit_code(end)
        message = report.explain(end, self.request.policy)
        if options.json:
            print_json(
                {
                    "id": self.sandbox.id,
                    "runtime": self.sandbox.handle.runtime,
                    "cause": end.cause.value,
                    "message": message,
                    "exit_code": code,
                    "command_exit_code": report.command_exit_code(end),
                    **report.captured(self._captured(1), "stdout"),
                    **report.captured(self._captured(2), "stderr"),
                }
            )
        elif message and not options.quiet and end.cause is not Cause.KILLED:
            note(message)
        return code


def _with_env(request: SandboxRequest, env: dict[str, str]) -> SandboxRequest:
    return replace(request, env=request.env | env)
