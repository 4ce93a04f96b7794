"""Making, listing, calling and ending the contexts of one sandbox."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import os
import re
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ringfence.guest.contexts.calls import Call
from ringfence.guest.contexts.languages import LANGUAGES, MOST_CODE, Language, language
from ringfence.guest.contexts.reading import Place
from ringfence.guest.contexts.results import Ran
from ringfence.guest.contexts.starting import copied, missing_program, until_ready
from ringfence.guest.fields import clean
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import FROM_NOW, GuestProcess, ProcessSpec
from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    GuestRefused,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unsupported,
)
from ringfence.model.ids import new_id
from ringfence.model.values import dataclass

RING: Final = 1024 * 1024  # bytes of output a context that may wait for a reader
MOST_CONTEXTS: Final = 32  # that run at once in a sandbox
START_TIME: Final = 60.0  # seconds for a kernel to say that it is ready: an emulated machine takes its time
ZYGOTE: Final = "zygote"
_PREFIX: Final = "ctx."
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")


@dataclass(frozen=True, slots=True)
class Context:
    """One context. ``cwd``: where it is now, if that can be seen (reported). ``running``: it lives."""

    id: str
    language: str
    cwd: str | None = None
    running: bool = True
    pid: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd, "running": self.running}


class Contexts:
    """The contexts of one sandbox, over a link that the caller owns.

    Nothing is kept here: any number of host processes may use the contexts of one sandbox, at once and after
    one another. Every call may also raise what :class:`GuestLink` raises.
    """

    def __init__(self, link: GuestLink) -> None:
        self._link = link
        # Asked before output is passed on: how many of so many bytes may be.
        self.admit: Callable[[int], Awaitable[int]] | None = None

    async def create(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
        timeout: float = START_TIME,  # noqa: ASYNC109
    ) -> Context:
        """Start a context; returns when it can be called.

        Args:
            language: ``python``, ``javascript`` or ``bash``.
            cwd: its working directory; default: the sandbox's.
            env: variables, over the sandbox's.
            id: 1 to 40 of ``[A-Za-z0-9_-]``; made up if ``None``.
            timeout: seconds until it must be ready.

        Raises:
            InvalidRequest: an unknown language or an impossible id.
            Conflict: there is a context with this id.
            Unsupported: the template has no program for this language.
            QuotaExceeded: too many contexts.
            DeadlineExceeded: it did not get ready.
        """
        kind = _language(language)
        number = new_id("c") if id is None else _check(id)
        running = [context for context in await self._all() if context.running]
        if any(context.id == number for context in running):
            raise Conflict(f"context {number} exists", hint="call it, restart it, or take another id")
        if len(running) >= MOST_CONTEXTS:
            raise QuotaExceeded(
                f"{len(running)} contexts run in this sandbox", hint="close some", most=MOST_CONTEXTS
            )
        await self._forget(number)
        return await self._start(kind, number, cwd, dict(env or {}), timeout)

    async def _start(
        self,
        kind: Language,
        number: str,
        cwd: str | None,
        env: dict[str, str],
        timeout: float,  # noqa: ASYNC109
    ) -> Context:
        refused: GuestRefused | None = None
        for program in kind.programs:
            spec = ProcessSpec(
                kind.argv(program),
                env,
                cwd,
                f"{_PREFIX}{kind.name}.{number}",
                stdin=True,
                ring=RING,
            )
            try:
                process = await copied(self._link, kind, spec) or await self._link.start(spec)
            except GuestRefused as error:
                if error.errno == errno.EEXIST:
                    raise Conflict(f"context {number} exists", hint="call it, or restart it") from None
                if error.errno != errno.ENOENT:
                    raise
                refused = error
                continue
            try:
                async with asyncio.timeout(timeout):
                    if not process.copied:
                        with contextlib.suppress(GuestRefused):  # it has ended: why comes next
                            await process.write(kind.source())
                    await until_ready(kind, process)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    await process.signal(signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        f"the {kind.name} context was not ready after {timeout:g} s"
                    ) from None
                raise
            finally:
                await process.close()
            return Context(number, kind.name, cwd, True, process.pid)
        if refused is not None and cwd is not None and await self._missing(cwd):
            raise InvalidRequest(f"there is no folder {cwd[:256]!r} in the sandbox")
        raise missing_program(kind)

    async def _missing(self, cwd: str) -> bool:
        try:
            return (await self._link.files.stat(cwd)).type != "directory"
        except GuestRefused:
            return True

    async def list(self) -> list[Context]:
        """The contexts that run, by id."""
        found = [context for context in await self._all() if context.running]
        return sorted(found, key=lambda context: context.id)

    async def get(self, id: str) -> Context:
        """One context that runs, and where it is.

        Raises:
            NotFound: there is none.
        """
        context = await self._get(_check(id))
        try:
            info = await self._link.files.stat(f"/proc/{context.pid}/cwd", follow=False)
        except GuestRefused:
            return context
        where = None if info.target is None else clean(os.fsencode(info.target), 4096)
        return Context(context.id, context.language, where, True, context.pid)

    async def execute(
        self,
        id: str,
        code: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        env: Mapping[str, str] | None = None,
        call: str | None = None,
        fresh: bool = False,
    ) -> Call:
        """Call a context. Calls of one context wait for one another, in the order they came.

        Args:
            id: the context.
            code: what to run.
            timeout: seconds, from when the code begins (calls before it are over), until it is interrupted;
                5 seconds later the context is ended.
            env: variables during this call.
            call: the call's own id; made up if ``None``.
            fresh: in a fork of the context (Python only): the code finds all that is there, imports too, and
                what it changes goes with it. Its random generators are seeded anew.

        Raises:
            NotFound: no such context.
            InvalidRequest: code that no context can take.
            Unsupported: ``fresh`` in another language.
        """
        if len(code.encode("utf-8", "surrogatepass")) > MOST_CODE:
            raise InvalidRequest(
                f"code of more than {MOST_CODE} bytes", hint="write it to a file and import it"
            )
        name = secrets.token_hex(12) if call is None else _check(call)
        kind, process = await self._attach(_check(id), FROM_NOW, FROM_NOW)
        try:
            if process.offsets[0] == 0:  # it was made a moment ago, and is still reading its kernel
                async with asyncio.timeout(START_TIME):
                    await until_ready(kind, process)
            made = Call(name, id, process, kind.reader(name, False), Place(*process.offsets), timeout)
            made.admit = self.admit
            if fresh and not kind.forks:
                raise Unsupported(
                    f"{kind.name} contexts can't fork",
                    hint="use a context of its own",
                    capability="contexts.fork",
                )
            await process.write(kind.request(name, code, env or {}, fresh))
        except GuestRefused as error:
            await process.close()
            if error.errno != errno.EPIPE:
                raise
            raise NotFound(f"context {id} has ended", hint="restart it") from None
        except TimeoutError:
            await process.close()
            raise DeadlineExceeded(f"context {id} does not get ready", hint="restart it") from None
        except BaseException:
            await process.close()
            raise
        return made

    async def once(
        self, code: str, language: str = "python", *, limit: int = 10 * 1024 * 1024, **options: Any
    ) -> Ran:
        """Run code that leaves nothing behind, with options as for :meth:`execute`.

        Python runs in a fork of the sandbox's *zygote*, a context (``zygote``) that is started with
        the first call and stays warm: :meth:`run` imports in it what all later calls are to find. Others run
        in a new context that ends with the call.
        """
        kind = _language(language)
        if not kind.forks:
            made = await self.create(kind.name)
            try:
                return await self.run(made.id, code, limit=limit, **options)
            finally:
                with contextlib.suppress(NotFound):
                    await self.close(made.id)
        for attempt in (1, 2):
            try:
                return await self.run(ZYGOTE, code, limit=limit, fresh=True, **options)
            except NotFound:
                if attempt == 2:
                    raise
                with contextlib.suppress(Conflict):  # somebody else was faster
                    await self.create(kind.name, id=ZYGOTE)
        raise AssertionError("unreachable")

    async def run(self, id: str, code: str, *, limit: int = 10 * 1024 * 1024, **options: Any) -> Ran:
        """Call a context and collect everything; options as for :meth:`execute`."""
        async with await self.execute(id, code, **options) as call:
            return await call.collect(limit)

    async def resume(
        self,
        id: str,
        call: str,
        place: Place | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Call:
        """Go on with a call that another link or process began, from :attr:`Call.place`.

        What has left the context's ring meanwhile (1 MiB) is missing.

        Raises:
            NotFound: no such context.
        """
        place = Place() if place is None else place
        kind, process = await self._attach(_check(id), place.stdout, place.stderr)
        made = Call(_check(call), id, process, kind.reader(call, place.begun), place, timeout)
        made.admit = self.admit
        return made

    async def interrupt(self, id: str) -> None:
        """Interrupt what runs in it, as Ctrl-C does; the context lives on.

        Raises:
            NotFound: no such context.
        """
        context = await self._get(_check(id))
        await self._link.signal(_process_id(context), signal.SIGINT)

    async def restart(
        self, id: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Context:
        """End what runs in it, and begin anew under the same id: variables are gone.

        Raises:
            NotFound: there never was such a context.
        """
        context = await self._get(_check(id), ended=True)
        await self._end(context)
        return await self._start(language_of(context), context.id, cwd, dict(env or {}), START_TIME)

    async def close(self, id: str) -> None:
        """End a context and forget it.

        Raises:
            NotFound: there never was such a context.
        """
        await self._end(await self._get(_check(id), ended=True))

    # -- the processes behind them

    async def _attach(self, id: str, stdout: int, stderr: int) -> tuple[Language, GuestProcess]:
        for kind in LANGUAGES.values():
            try:
                process = await self._link.attach(
                    f"{_PREFIX}{kind.name}.{id}", stdout, stderr, window=RING // 4
                )
            except GuestRefused as error:
                if error.errno != errno.ENOENT:
                    raise
            else:
                return kind, process
        raise NotFound(f"no context {id}", hint="create it first")

    async def _all(self) -> builtins.list[Context]:
        found = []
        for info in await self._link.processes():
            prefix, _, rest = info.id.partition(".")
            kind, _, number = rest.partition(".")
            if prefix + "." == _PREFIX and number and _ID.match(number):
                found.append(Context(number, kind, None, info.state == "running", info.pid))
        return found

    async def _get(self, id: str, *, ended: bool = False) -> Context:
        for context in await self._all():
            if context.id == id and (context.running or ended):
                return context
        raise NotFound(f"no context {id}", hint="create it first")

    async def _forget(self, id: str) -> None:
        """Make room for a new one: only what has ended, since somebody else may start one just now."""
        for context in await self._all():
            if context.id == id and not context.running:
                with contextlib.suppress(GuestRefused):
                    await self._link.remove(_process_id(context))

    async def _end(self, context: Context) -> None:
        number = _process_id(context)
        with contextlib.suppress(GuestRefused):
            async with await self._link.attach(number, output=False) as process:
                with contextlib.suppress(GuestRefused):
                    await process.signal(signal.SIGKILL)
                await process.wait()
        with contextlib.suppress(GuestRefused):
            await self._link.remove(number)


def language_of(context: Context) -> Language:
    """The language of a context that was found."""
    return _language(context.language)


def _language(name: str) -> Language:
    return language(name)


def _process_id(context: Context) -> str:
    return f"{_PREFIX}{context.language}.{context.id}"


def _check(id: str) -> str:
    if not _ID.match(id):
        raise InvalidRequest(f"context id {id[:64]!r} is not 1 to 40 of A-Z a-z 0-9 _ -")
    return id
