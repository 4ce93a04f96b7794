"""``ringfence run``: one command in a sandbox of its own, its streams and signals passed through."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from ringfence.cli.options import configure, parse_quickly
from ringfence.cli.output import note, print_error, print_error_object, print_json, printable
from ringfence.cli.signals import Signals

if TYPE_CHECKING:
    import argparse
    import asyncio
    from collections.abc import AsyncIterator

    from ringfence.cli.door import RunDoor
    from ringfence.cli.requesting import Transfer
    from ringfence.cli.streams import Sink, Source
    from ringfence.cli.terminal import RawTerminal
    from ringfence.cli.transfer import Destination
    from ringfence.model.sandbox import FileChange, SandboxRequest

__all__ = ["configure", "main", "parse_quickly"]

MAIN = "main"  # id of the command among the sandbox's processes
_SOON = 3.0  # seconds within which nearly every sandbox starts; who looks on for longer is told
LAST_WORDS = 1.0  # seconds a slow reader gets for the output of a sandbox that was killed


def main(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code."""
    from ringfence.cli import requesting

    requesting.check_modes(options)
    argv = requesting.check_command(options)
    request = requesting.request(options)
    if request.policy.door.network.mode == "egress":
        from ringfence.cli import door

        door.check()
    files = requesting.files_in(options)
    outs = requesting.files_out(options)
    warnings = requesting.warnings(options, request.policy)
    if not options.quiet and not options.json:
        for warning in warnings:
            note("warning: " + printable(warning))
    aio = _import_asyncio(digests=options.changes)
    destinations: list[Destination] = []
    try:
        if outs:
            from ringfence.cli.transfer import Destination

            # Opened before the command runs: a workload that shares a folder with us can't move the ground.
            destinations += [Destination(out) for out in outs]
        code: int = aio.run(Run(options, argv, request, files, destinations, warnings).main())
        return code
    finally:
        for destination in destinations:
            destination.close()


def _import_asyncio(*, digests: bool) -> Any:
    """asyncio, imported without OpenSSL: a quarter of its import time, and nothing here speaks TLS.

    ``digests``: many bytes will be hashed, which OpenSSL does several times faster than Python's own.
    """
    absent = [name for name in (("ssl",) if digests else ("ssl", "_hashlib")) if name not in sys.modules]
    if "asyncio" in sys.modules:
        absent = []
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # asyncio and hashlib do without it
    try:
        import asyncio
        import hashlib  # noqa: F401 - now, while the choice is in force
    finally:
        for name in absent:
            del sys.modules[name]
    return asyncio


class Run:
    """One run, from the request to the last line printed."""

    process_id: str | None = MAIN

    def __init__(
        self,
        options: argparse.Namespace,
        argv: tuple[str, ...],
        request: SandboxRequest,
        files: list[Transfer],
        outs: list[Destination],
        warnings: list[str],
    ) -> None:
        self.options = options
        self.argv = argv
        self.request = request
        self.files = files
        self.outs = outs
        self.warnings = warnings
        self.sandbox: Any = None
        self.process: Any = None
        self.raw: RawTerminal | None = None
        self.source: Source | None = None
        self.sinks: dict[int, Sink] = {}
        self.capture: dict[int, bytearray] | None = None
        self.signals = Signals(self)
        self.task: asyncio.Task[int] | None = None
        self.measuring: asyncio.Task[Any] | None = None
        self.errands: set[asyncio.Task[Any]] = set()

    async def main(self) -> int:
        """Everything, with the clean-up on every way out."""
        import asyncio

        from ringfence.node.service import Node

        self.task = asyncio.current_task()
        self.signals.catch(asyncio.get_running_loop())
        try:
            node = await Node.open(adopt=False)
            try:
                if node.leftovers and not self.options.quiet:
                    note(f"a dead run left something that can't be removed: {printable(node.leftovers)}")
                return await self._in_sandbox(node)
            finally:
                await node.close()
        except asyncio.CancelledError:
            if not self.signals.ending:
                raise
            from ringfence.cli.report import Interrupted

            raise Interrupted(self.signals.ending) from None
        finally:
            for sink in self.sinks.values():
                sink.close()
            if self.source is not None:
                self.source.close()

    async def end(self, grace: float) -> None:
        """We are told to end: the sandbox goes, and the command with it."""
        await self.sandbox.stop(grace)

    async def _in_sandbox(self, node: Any) -> int:
        kept = False
        door: RunDoor | None = None

        async def open_door(sandbox: Any) -> None:
            nonlocal door
            self.sandbox = sandbox
            door = await self._door(node)

        if self.request.policy.door.network.mode == "egress":
            from ringfence.cli.door import with_placeholders

            self.request = await with_placeholders(node, self.request)
            try:
                # What the template starts finds the door open.
                sandbox = await self._create(node, open_door)
            except BaseException:
                if door is not None:
                    await door.close()
                raise
        else:
            sandbox = await self._create(node)
        try:
            if self.files:
                from ringfence.cli.transfer import copy_in

                await copy_in(await sandbox.link(), self.files)
            result = await self._command()
            boundary = await self._boundary() if self.options.json else None
            changes = await self._changes() if self.options.changes else None
            copied = await self._copy_out() if self.outs else None
            kept = self.request.keep and not sandbox.ended.done()
        finally:
            if door is not None:
                await door.close(keep=kept)
            if not kept:
                await sandbox.destroy()
        return self._report(result, boundary, changes, copied, kept)

    async def _create(self, node: Any, *before: Any) -> Any:
        import asyncio

        waiting = None
        if not self.options.quiet and os.isatty(2):
            words = "still starting; the first start of a template or an interpreter takes longer than others"
            waiting = asyncio.get_running_loop().call_later(_SOON, note, words)
        try:
            self.sandbox = await node.create(self.request, *before)
        finally:
            if waiting is not None:
                waiting.cancel()
        return self.sandbox

    async def _door(self, node: Any) -> RunDoor | None:
        """The sandbox's door, opened; ``None`` if somebody else has it open."""
        from ringfence.cli.door import RunDoor

        return await RunDoor.open(node, self.sandbox, quiet=self.options.quiet or self.options.json)

    async def _command(self) -> Any:
        """Run the command; returns the node's result. The terminal is as it was afterwards."""
        from ringfence.cli.streams import Sink, Source
        from ringfence.cli.terminal import RawTerminal, window_size
        from ringfence.guest.processes import ProcessSpec
        from ringfence.model.errors import GuestRefused

        options = self.options
        rows, columns = window_size(0, 1, 2)
        if options.json and not options.stream:
            self.capture = {1: bytearray(), 2: bytearray()}
        else:
            # With --json our stdout is for the document; the command's output goes to stderr.
            self.sinks = {1: Sink(2 if options.json else 1), 2: Sink(2)}
        self.source = Source(0)
        spec = ProcessSpec(
            argv=self.argv,
            cwd=options.workdir,
            id=self.process_id,
            pty=options.interactive,
            stdin=True,
            rows=rows,
            columns=columns,
            env=_terminal_environment(self.request.env) if options.interactive else {},
        )
        try:
            if not options.interactive:
                return await self._run(spec)
            with RawTerminal(0) as self.raw:
                return await self._run(spec)
        except GuestRefused as error:
            from ringfence.cli.report import refusal

            raise refusal(error, self.argv, options.workdir, self.request.template) from error
        finally:
            self.raw = None

    async def _run(self, spec: Any) -> Any:
        import asyncio

        running = asyncio.ensure_future(
            self.sandbox.run(spec, on_output=self._output, stdin=self._input(), on_start=self._started)
        )
        ended = self.sandbox.ended
        try:
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                # Killed, while a reader of ours takes its time: it gets a little of it.
                await asyncio.wait({running}, timeout=LAST_WORDS)
                for sink in self.sinks.values():
                    sink.abandon()
            return await running
        finally:
            self.process = None
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def _started(self, process: Any) -> None:
        self.process = process
        if self.options.json:
            import asyncio

            # While the command runs: its own user and capabilities can be read now.
            self.measuring = asyncio.ensure_future(self.sandbox.boundary())
            self.measuring.add_done_callback(_seen)

    async def _boundary(self) -> Any:
        """The effective boundary; None if the wall came down before it could be looked at."""
        from ringfence.model.errors import WrongState

        try:
            return await (self.measuring or self.sandbox.boundary())
        except (WrongState, OSError):
            return None

    async def _input(self) -> AsyncIterator[bytes]:
        assert self.source is not None
        async for data in self.source:
            yield data

    async def _output(self, output: Any) -> None:
        if self.capture is not None:
            self.capture[output.stream] += output.data
            return
        sink = self.sinks[output.stream]
        before = sink.broken
        await sink.write(output.data)
        if sink.broken and not before and self.process is not None and not self.sandbox.ended.done():
            # As in a shell's pipeline: who writes to nobody gets SIGPIPE.
            self.errand(self.process.signal(signal.SIGPIPE, "group"))

    # -- what comes after the command ------------------------------------------------------------

    async def _changes(self) -> list[FileChange]:
        found: list[FileChange] = await self.sandbox.changes()
        return found

    async def _copy_out(self) -> list[dict[str, Any]]:
        from ringfence.cli.transfer import copy_out

        limit = self.request.policy.wall.resources.disk
        return [await copy_out(self.sandbox, destination, limit) for destination in self.outs]

    def _report(
        self,
        result: Any,
        boundary: Any,
        changes: list[FileChange] | None,
        copied: list[dict[str, Any]] | None,
        kept: bool,
    ) -> int:
        from ringfence.cli import report
        from ringfence.model.levels import Cause

        end, options = result.end, self.options
        code = report.exit_code(end)
        message = report.explain(end, self.request.policy)
        failed = [out for out in copied or () if "error" in out]
        if failed and code == 0:
            code = report.FAILED  # what was asked for is not there: that must not look like success
        if options.json:
            print_json(
                {
                    "id": self.sandbox.id,
                    "runtime": self.sandbox.handle.runtime,
                    "level": self.sandbox.runtime.level.value,
                    "boundary": boundary and boundary.as_dict(),
                    "cause": end.cause.value,
                    "message": message,
                    "exit_code": code,
                    "command_exit_code": report.command_exit_code(end),
                    "usage": result.usage,
                    **report.captured(self._captured(1), "stdout"),
                    **report.captured(self._captured(2), "stderr"),
                    "changes": changes,
                    "files_out": copied,
                    "owner": self.request.owner,
                    "labels": self.request.labels,
                    "policy_digest": self.request.policy.wall.digest(),
                    "kept": kept,
                    "warnings": self.warnings,
                }
            )
        else:
            if changes is not None and changes:
                print("\n".join(report.change_lines(changes)), file=sys.stderr, flush=True)
            for out in failed:
                print_error_object(out["error"])
        # That Ctrl-C, or the reader's leaving, ended it is no news to who did that.
        told = end.cause is Cause.KILLED and code != report.KILLED
        if message and not told and not options.quiet and not (options.json and not options.stream):
            note(message)
        if kept and not options.quiet:
            note(f"kept {self.sandbox.id}; end it with `ringfence stop {self.sandbox.id}`")
        return code

    def _captured(self, stream: int) -> bytes | None:
        return None if self.capture is None else bytes(self.capture[stream])

    def errand(self, coroutine: Any) -> None:
        """Do it beside the rest. That the command has ended meanwhile is no error."""
        import asyncio

        task = asyncio.ensure_future(_quietly(coroutine))
        self.errands.add(task)
        task.add_done_callback(self.errands.discard)


def _seen(task: asyncio.Task[Any]) -> None:
    """Whoever awaits the task gets its error; if nobody does, it is no news either."""
    if not task.cancelled():
        task.exception()


async def _quietly(coroutine: Any) -> None:
    from ringfence.model.errors import RingfenceError

    try:
        await coroutine
    except (RingfenceError, OSError) as error:
        if os.environ.get("RINGFENCE_DEBUG"):
            print_error(error, as_json=False)


def _terminal_environment(env: dict[str, str]) -> dict[str, str]:
    """What a program needs to draw on our terminal, unless the caller has set it."""
    names = ("TERM", "COLORTERM", "NO_COLOR")
    found = {name: os.environ[name] for name in names if name in os.environ and name not in env}
    if "TERM" not in env:
        found.setdefault("TERM", "xterm")
    return found
