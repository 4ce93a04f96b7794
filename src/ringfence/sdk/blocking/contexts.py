"""``ringfence.sdk.contexts`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from builtins import list as List
from collections.abc import Iterator, Mapping
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade
from ringfence.sdk.contexts import AsyncContext, AsyncContexts, RichSink, TextSink
from ringfence.sdk.results import CodeResult, ContextInfo


class Context(Facade):
    """One interpreter. Calls of one wait for one another; several run beside each other.

    >>> with Sandbox.create() as sandbox:
    ...     context = sandbox.contexts.create("python")
    ...     _ = context.run("import math")
    ...     print(context.run("math.sqrt(1764)").text)
    42.0
    """

    _async: AsyncContext

    @property
    def id(self) -> str:
        """Its id."""
        return self._async.id

    @property
    def language(self) -> str:
        """python, javascript or bash."""
        return self._async.language

    def run(
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
        return BACKGROUND.run(
            self._async.run(
                code,
                timeout=timeout,
                env=env,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                on_result=on_result,
                check=check,
            )
        )

    def stream(
        self, code: str, *, timeout: float | None = None, env: Mapping[str, str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Run code and yield what it does as it does it: ``{"type": "stdout" | "stderr", "text"}``,
        ``{"type": "result", …}``, ``{"type": "error", "name", "value", "traceback"}``, and at last
        ``{"type": "end", "status"}``. It is begun once, and followed over lost connections.
        """
        return BACKGROUND.iterate(self._async.stream(code, timeout=timeout, env=env))

    def interrupt(self) -> None:
        """Interrupt what runs in it, as Ctrl-C does; it lives on."""
        BACKGROUND.run(self._async.interrupt())

    def restart(self) -> None:
        """Begin anew under the same id: its variables are gone."""
        BACKGROUND.run(self._async.restart())

    def close(self) -> None:
        """End it. That it has ended is no error."""
        BACKGROUND.run(self._async.close())

    def __enter__(self) -> Context:
        BACKGROUND.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        BACKGROUND.run(self._async.__aexit__(*_))

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")

    @property
    def info(self) -> ContextInfo:
        """As it was last seen."""
        return self._async.info


class Contexts(Facade):
    """The interpreters of one sandbox."""

    _async: AsyncContexts

    def create(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> Context:
        """Start one; returns when it can be called.

        Raises:
            Unsupported: the template has no program for this language. Conflict: the id is taken.
        """
        return Context._of(BACKGROUND.run(self._async.create(language, cwd=cwd, env=env, id=id)))

    def default(self, language: str = "python") -> Context:
        """The one that ``Sandbox.run_code`` uses for this language; made with the first call."""
        return Context._of(BACKGROUND.run(self._async.default(language)))

    def get(self, id: str) -> Context:
        """One that runs, by its id. Raises NotFound."""
        return Context._of(BACKGROUND.run(self._async.get(id)))

    def list(self) -> List[ContextInfo]:
        """Those that run."""
        return BACKGROUND.run(self._async.list())
