"""``inline``: a trusted coroutine or callable in our own process. Level 1, boundary ``none``.

There is no wall, no agent, no link and nothing that could be found again after a crash, so it is no driver of
the contract and not in the registry's list: to call it a wall would be a lie in every table.
The registry answers its name with a pointer to :func:`run`. What it keeps of a sandbox is the deadline, the
cancellation and the account of how it ended. It belongs into the SDK's process or an agent worker, never
into a service.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ringfence.model.errors import DeadlineExceeded, InvalidRequest, RuntimeUnavailable
from ringfence.model.levels import Boundary, Cause, Level
from ringfence.model.policy import Policy
from ringfence.model.sandbox import End, Usage

NAME, LEVEL, BOUNDARY = "inline", Level.L1, Boundary.NONE
GRACE = 1.0  # seconds that cancelled code has to end
Result = TypeVar("Result")
_token: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("inline", default=None)


class Outcome(NamedTuple, Generic[Result]):
    """What came of it. ``usage`` has only what can be told apart in a shared process: the time."""

    value: Result
    end: End
    usage: Usage


class Cancelled(BaseException):
    """Raised inside a plain callable whose deadline has passed or whose caller has gone."""


def cancelled() -> bool:
    """For a plain callable: whether it should end. Always false outside of one."""
    token = _token.get()
    return token is not None and token.is_set()


def check(policy: Policy) -> None:
    """Refuse what must not run without a wall.

    Raises:
        RuntimeUnavailable: the policy does not ask for ``inline`` by name, or does not say ``trusted``.
    """
    if policy.wall.isolation.runtime != NAME:
        raise RuntimeUnavailable(
            "inline code has no wall, so it must be asked for by name",
            hint="set isolation.runtime: inline, or let a sandbox run it",
        )
    if policy.trust != "trusted":
        raise RuntimeUnavailable(
            f"inline code has no wall, and the policy {policy.name!r} does not say that it is trusted",
            hint="use the preset trusted, or let a sandbox run it",
        )


async def run(
    call: Callable[..., Result] | Callable[..., Awaitable[Result]],
    *args: Any,
    policy: Policy,
    grace: float = GRACE,
    **kwargs: Any,
) -> Outcome[Result]:
    """Call it and wait for its end, for as long as the policy's ``limits.timeout`` allows.

    A coroutine function runs as a task and is cancelled as one. Any other callable runs in a thread; Python
    can't kill a thread, so :class:`Cancelled` is raised in it, at the next instruction of Python that it
    executes, and :func:`cancelled` tells it. Code that ignores both for ``grace`` seconds is left behind,
    and the error says so. Cancelling the caller does the same.

    Raises:
        RuntimeUnavailable: see :func:`check`.
        DeadlineExceeded: it ran for too long.
        Exception: whatever the call itself raises.
    """
    check(policy)
    if not callable(call):
        raise InvalidRequest(f"{call!r} can't be called", hint="give a function or a coroutine function")
    began = time.monotonic()
    work = _Work(call, args, kwargs)
    try:
        done = await work.wait(policy.door.limits.timeout)
    except asyncio.CancelledError:
        await work.stop(grace)
        raise
    if not done:
        ended = await work.stop(grace)
        left = "" if ended else "; it does not heed its cancellation and still runs in this process"
        raise DeadlineExceeded(
            f"{work.name} ran for more than {policy.door.limits.timeout:g} s{left}",
            hint="raise limits.timeout, or let a sandbox run it, where it can be killed",
            cause=Cause.DEADLINE.value,
        )
    value = work.future.result()
    spent = Usage(None, None, 0, time.monotonic() - began)
    return Outcome(value, End(Cause.EXITED, 0, reported=False), spent)


class _Work:
    """One call under way."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = getattr(call, "__qualname__", type(call).__name__)
        self._event = threading.Event()
        self._ending = threading.Lock()
        self._begun = self._ended = False
        self._thread: threading.Thread | None = None
        self.future: asyncio.Future[Any]
        # An object with `async def __call__` and a partial of a coroutine function count as well.
        inner = getattr(call, "func", call)
        if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
            self.future = asyncio.ensure_future(call(*args, **kwargs))
            return
        loop = asyncio.get_running_loop()
        self.future = loop.create_future()
        context = contextvars.copy_context()

        def told(failed: bool, result: Any) -> None:
            if not self.future.done():
                if failed:
                    self.future.set_exception(result)
                else:
                    self.future.set_result(result)

        def body() -> None:
            _token.set(self._event)
            outcome: tuple[bool, Any] = (True, DeadlineExceeded(f"{self.name} was cancelled"))
            try:
                try:
                    with self._ending:
                        self._begun = not self._event.is_set()
                    if self._begun:  # else it was to end before it began
                        outcome = (False, call(*args, **kwargs))
                except StopIteration as error:  # no future takes it
                    outcome = (True, RuntimeError(f"{self.name} raised {error!r}"))
                except Cancelled:
                    pass
                except BaseException as error:
                    outcome = (True, error)
                with self._ending:
                    self._ended = True
            except Cancelled:  # it came when the call had ended: nobody is left whom it could stop
                self._ended = True
            if not loop.is_closed():
                loop.call_soon_threadsafe(told, *outcome)

        self._thread = threading.Thread(
            target=context.run, args=(body,), name="ringfence-inline", daemon=True
        )
        self._thread.start()

    async def wait(self, seconds: float) -> bool:
        """Whether it has ended in time."""
        done, _ = await asyncio.wait({self.future}, timeout=seconds)
        return bool(done)

    async def stop(self, grace: float) -> bool:
        """Cancel it; whether it ended within the grace."""
        self._event.set()
        if self._thread is None:
            self.future.cancel()
        elif self._thread.ident is not None:
            with self._ending:  # before its beginning and from its end on the thread must not be hit
                if self._begun and not self._ended:
                    number = ctypes.c_ulong(self._thread.ident)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(Cancelled))
        done, _ = await asyncio.wait({self.future}, timeout=grace)
        if done and not self.future.cancelled():
            self.future.exception()  # seen
        return bool(done)
