"""``ringfence sandbox exec``, ``shell`` and ``code`` at a service; streams and signals pass through."""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.output import note, print_json
from ringfence.cli.signals import Signals

if TYPE_CHECKING:
    from ringfence.cli.streams import Sink, Source
    from ringfence.cli.terminal import RawTerminal
    from ringfence.sdk.process import AsyncProcess
    from ringfence.sdk.results import CommandResult
    from ringfence.sdk.sandbox import AsyncSandbox
    from ringfence.sdk.service import AsyncService

_CODES = {"deadline": 124, "idle": 124}  # others that cut a command off: 137
_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR")


def execute(options: argparse.Namespace) -> int:
    """``ringfence sandbox exec``: the exit code is the command's."""
    from ringfence.cli import requesting

    if options.command[:1] == ["--"]:
        del options.command[0]
    # What only a new sandbox can be asked for.
    options.env_file, options.changes, options.template = [], False, None
    options.allow_dangerous_mount = options.mount = options.policy = options.preset = None
    argv = requesting.check_command(options)
    requesting.check_modes(options)
    return remote.with_service(lambda service: Exec(options, argv).main(service))


def shell(options: argparse.Namespace) -> int:
    """``ringfence sandbox shell``: bash if the sandbox has it, else sh, in a terminal."""
    options.interactive, options.stream, options.json = True, False, False
    start = "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
    return remote.with_service(lambda service: Exec(options, ("sh", "-c", start)).main(service))


class Exec:
    """One command in a sandbox: when it ends, or we do, the sandbox lives on.

    Has what ``Signals`` wants of a run: the command that signals go to, and what ends it.
    """

    def __init__(self, options: argparse.Namespace, argv: tuple[str, ...]) -> None:
        self.options = options
        self.argv = argv
        self.process: Any = None
        self.raw: RawTerminal | None = None
        self.source: Source | None = None
        self.task: asyncio.Task[Any] | None = None
        self.signals = Signals(self)  # type: ignore[arg-type]
        self._sinks: dict[str, Sink] = {}
        self._capture: dict[str, bytearray] | None = None
        self._errands: set[asyncio.Task[Any]] = set()

    async def main(self, service: AsyncService) -> int:
        """Everything, with the clean-up on every way out."""
        from ringfence.cli.report import Interrupted

        self.task = asyncio.current_task()
        self.signals.catch(asyncio.get_running_loop())
        try:
            sandbox = await remote.find(service, self.options.id)
            return self._told(sandbox.id, await self._command(sandbox))
        except asyncio.CancelledError:
            if not self.signals.ending:
                raise
            raise Interrupted(self.signals.ending, "the command was ended, the sandbox lives on") from None
        finally:
            for errand in list(self._errands):
                errand.cancel()
            await asyncio.gather(*self._errands, return_exceptions=True)
            for sink in self._sinks.values():
                sink.close()
            if self.source is not None:
                self.source.close()

    async def end(self, grace: float) -> None:
        """We are told to end: the command goes, the sandbox stays."""
        process = self.process
        if process is None:
            return
        if grace > 0:
            await process.signal(signal.SIGTERM)
            await asyncio.sleep(grace)
        await process.kill()

    def errand(self, coroutine: Any) -> None:
        """Do it beside the rest. That the command has ended meanwhile is no error."""
        task = asyncio.ensure_future(_quietly(coroutine))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _command(self, sandbox: AsyncSandbox) -> CommandResult:
        from ringfence.cli.streams import Sink, Source
        from ringfence.cli.terminal import RawTerminal, window_size
        from ringfence.model.errors import GuestRefused

        options = self.options
        if options.json and not options.stream:
            self._capture = {"stdout": bytearray(), "stderr": bytearray()}
        else:
            self._sinks = {"stdout": Sink(2 if options.json else 1), "stderr": Sink(2)}
        self.source = Source(0)
        rows, columns = window_size(0, 1, 2)
        try:
            process = await sandbox.start(
                self.argv, env=self._environment(), cwd=options.workdir, stdin=True, pty=options.interactive,
                rows=rows, columns=columns,
            )  # fmt: skip
        except GuestRefused as error:
            from ringfence.cli.report import refusal

            raise refusal(error, self.argv, options.workdir) from error
        try:
            self.process = _Signalled(process)
            if not options.interactive:
                return await self._follow(process)
            with RawTerminal(0) as self.raw:
                return await self._follow(process)
        finally:
            self.raw = self.process = None
            await process.close()

    def _environment(self) -> dict[str, str]:
        import os

        found = remote.environment(self.options.env)
        if self.options.interactive:
            found = {name: os.environ[name] for name in _TERMINAL if name in os.environ} | found
            found.setdefault("TERM", "xterm")
        return found

    async def _follow(self, process: AsyncProcess) -> CommandResult:
        from ringfence.model.errors import RingfenceError, WrongState

        async def feed() -> None:
            assert self.source is not None
            try:
                async for data in self.source:
                    await process.write(data)
                await process.close_stdin()
            except WrongState:
                return  # it has ended, or reads no more
            except RingfenceError as error:
                note(error.message)

        feeding = asyncio.ensure_future(feed())
        try:
            async for piece in process:
                await self._output(process, piece.stream, piece.data)
            return await process.wait()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _output(self, process: AsyncProcess, stream: str, data: bytes) -> None:
        if self._capture is not None:
            self._capture[stream] += data
            return
        sink = self._sinks[stream]
        before = sink.broken
        await sink.write(data)
        if sink.broken and not before:
            self.errand(process.signal(signal.SIGPIPE))  # as in a shell's pipeline

    def _told(self, sandbox: str, result: CommandResult) -> int:
        from ringfence.cli import report

        cut = result.cause not in ("exited", "signaled", "killed")
        code = _CODES.get(result.cause, 137) if cut or result.exit_code is None else result.exit_code
        message = f"{result.cause}: {result.detail}".strip(": ") if cut else ""
        if self.options.json:
            captured = self._capture or {}
            print_json(
                {
                    "id": sandbox, "process": result.id, "cause": result.cause, "message": message,
                    "exit_code": code, "command_exit_code": result.exit_code,
                    **report.captured(_bytes(captured.get("stdout")), "stdout"),
                    **report.captured(_bytes(captured.get("stderr")), "stderr"),
                }
            )  # fmt: skip
        elif message and not self.options.quiet:
            note(message)
        if result.lost and not self.options.quiet:
            note(f"{result.lost} bytes of output were lost: the connection was away for too long")
        return code


class _Signalled:
    """A process as ``Signals`` calls one."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process

    async def signal(self, number: int, scope: str = "group") -> None:
        await self._process.signal(int(number), scope=scope)

    async def resize(self, rows: int, columns: int) -> None:
        await self._process.resize(rows, columns)

    async def kill(self) -> None:
        await self._process.kill()


def _bytes(data: bytearray | None) -> bytes | None:
    return None if data is None else bytes(data)


async def _quietly(coroutine: Any) -> None:
    from ringfence.model.errors import RingfenceError

    try:
        await coroutine
    except (RingfenceError, OSError):
        return


# -- code


def code(options: argparse.Namespace) -> int:
    """``ringfence sandbox code``: 1 if the code raised something."""
    from ringfence.model.errors import InvalidRequest
    from ringfence.model.quantities import parse_duration

    if (options.code is None) == (options.file is None):
        raise InvalidRequest(
            "code, or --file", hint="ringfence sandbox code ID 'print(6 * 7)'; - reads the input"
        )
    text = options.code if options.code not in (None, "-") else _read(options.file)
    timeout = parse_duration(options.timeout) if options.timeout else None

    async def do(sandbox: AsyncSandbox) -> Any:
        import sys

        def show(stream: Any) -> Any:
            return None if options.json else lambda piece: print(piece, end="", file=stream, flush=True)

        return await sandbox.run_code(
            text, language=options.language, timeout=timeout,
            on_stdout=show(sys.stdout), on_stderr=show(sys.stderr),
        )  # fmt: skip

    result = remote.with_sandbox(options.id, do)
    if options.json:
        print_json(result)
        return 0 if result.ok else 1
    for index, rich in enumerate(result.results):
        if rich.text:
            print(rich.text)
        if options.save:
            _save(options.save, index, rich)
    if result.error is not None:
        import sys

        print(result.error.traceback or f"{result.error.name}: {result.error.value}", file=sys.stderr)
    elif not result.ok:
        note(f"the code did not end: {result.status}")
    return 0 if result.ok else 1


def _read(path: str | None) -> str:
    import sys

    from ringfence.model.errors import InvalidRequest

    try:
        if path in (None, "-"):
            return sys.stdin.read()
        with open(str(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--file {path}: {getattr(error, 'strerror', None) or error}") from None


def _save(folder: str, index: int, rich: Any) -> None:
    """Pictures and pages as files, so that they can be looked at."""
    import os

    os.makedirs(folder, exist_ok=True)
    for kind, data in (("png", rich.png), ("jpeg", rich.jpeg), ("svg", rich.svg), ("html", rich.html)):
        if data is None:
            continue
        place = os.path.join(folder, f"result-{index}.{kind}")
        with open(place, "wb") as file:
            file.write(data if isinstance(data, bytes) else str(data).encode())
        note(f"wrote {place}")
