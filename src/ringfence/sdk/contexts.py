"""Interpreters in a sandbox whose variables live on between calls: Python, JavaScript, bash."""

from __future__ import annotations

import inspect
import uuid
from builtins import list as List
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ringfence.model.errors import Conflict, NotFound
from ringfence.sdk import sse, wire
from ringfence.sdk.results import CodeError, CodeResult, ContextInfo, Rich
from ringfence.sdk.transport import Transport, closing

TextSink = Callable[[str], Any]
RichSink = Callable[[Rich], Any]


class AsyncContext:
    """One interpreter. Calls of one wait for one another; several run beside each other.

    >>> async with AsyncSandbox.create() as sandbox:
    ...     context = await sandbox.contexts.create("python")
    ...     _ = await context.run("import math")
    ...     print((await context.run("math.sqrt(1764)")).text)
    42.0
    """

    def __init__(self, transport: Transport, path: str, info: ContextInfo) -> None:
        self.info = info  # what it was when it was last seen
        self._transport = transport
        self._path = f"{path}/{wire.segment(info.id, 'context')}"

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def language(self) -> str:
        """python, javascript or bash."""
        return self.info.language

    async def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        on_stdout: TextSink | None = None,
        on_stderr: TextSink | None = None,
        on_result: RichSink | None = None,
        check: bool = False,
    ) -> CodeResult:
        """Run code to its end.

        Args:
            code: what to run.
            timeout: seconds until it is interrupted; 5 seconds later the interpreter is ended.
            env: variables during this call.
            on_stdout, on_stderr, on_result: called with each piece as it comes.
            check: raise CommandFailed if it raises or does not come to its end.
        """
        texts: dict[str, List[str]] = {"stdout": [], "stderr": []}
        results: List[Rich] = []
        error: CodeError | None = None
        end: Mapping[str, Any] = {"status": "ended"}
        async with closing(self.stream(code, timeout=timeout, env=env)) as frames:
            async for frame in frames:
                kind = frame.get("type")
                if kind in ("stdout", "stderr"):
                    texts[kind].append(str(frame.get("text", "")))
                    await _tell(on_stdout if kind == "stdout" else on_stderr, texts[kind][-1])
                elif kind == "result":
                    results.append(wire.rich(frame))
                    await _tell(on_result, results[-1])
                elif kind == "error":
                    error = wire.code_error(frame)
                elif kind == "end":
                    end = frame
        result = CodeResult(
            "".join(texts["stdout"]), "".join(texts["stderr"]), tuple(results), error,
            str(end.get("status", "ok")), int(end.get("count") or 0), end.get("exit_code"),
        )  # fmt: skip
        return result.check() if check else result

    async def stream(
        self, code: str, *, timeout: float | None = None, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Run code and yield what it does as it does it: ``{"type": "stdout" | "stderr", "text"}``,
        ``{"type": "result", …}``, ``{"type": "error", "name", "value", "traceback"}``, and at last
        ``{"type": "end", "status"}``. It is begun once, and followed over lost connections.
        """
        body = wire.filled(code=code, timeout=timeout, env=dict(env) if env else None)

        def again(started: Any) -> str:
            return f"{self._path}/calls/{wire.segment(str(started['call']), 'call')}/stream"

        events = sse.events(self._transport, f"{self._path}/stream", post=body, again=again)
        async with closing(events) as frames:
            async for name, frame in frames:
                if name != "started":
                    yield frame

    async def interrupt(self) -> None:
        """Interrupt what runs in it, as Ctrl-C does; it lives on."""
        await self._transport.call("POST", f"{self._path}/interrupt", safe=True)

    async def restart(self) -> None:
        """Begin anew under the same id: its variables are gone."""
        self.info = wire.context(
            await self._transport.call("POST", f"{self._path}/restart", json={}, timeout=120)
        )

    async def close(self) -> None:
        """End it. That it has ended is no error."""
        try:
            await self._transport.call("DELETE", self._path)
        except NotFound:
            return

    async def __aenter__(self) -> AsyncContext:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.language})"


class AsyncContexts:
    """The interpreters of one sandbox."""

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/contexts"
        self._known: dict[str, AsyncContext] = {}

    async def create(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> AsyncContext:
        """Start one; returns when it can be called.

        Raises:
            Unsupported: the template has no program for this language. Conflict: the id is taken.
        """
        body = wire.filled(language=language, cwd=cwd, env=dict(env) if env else None, id=id)
        value = await self._transport.call("POST", self._path, json=body, key=str(uuid.uuid4()), timeout=120)
        return AsyncContext(self._transport, self._path, wire.context(value))

    async def default(self, language: str = "python") -> AsyncContext:
        """The one that ``Sandbox.run_code`` uses for this language; made with the first call."""
        known = self._known.get(language)
        if known is None:
            number = f"default-{language}"
            try:
                known = await self.create(language, id=number)
            except Conflict:
                known = await self.get(number)
            self._known[language] = known
        return known

    async def get(self, id: str) -> AsyncContext:
        """One that runs, by its id. Raises NotFound."""
        value = await self._transport.call("GET", f"{self._path}/{wire.segment(id, 'context')}")
        return AsyncContext(self._transport, self._path, wire.context(value))

    async def list(self) -> List[ContextInfo]:
        """Those that run."""
        return [wire.context(each) async for each in self._transport.pages(self._path)]


async def _tell(sink: Callable[[Any], Any] | None, value: Any) -> None:
    if sink is not None and inspect.isawaitable(answer := sink(value)):
        await answer
