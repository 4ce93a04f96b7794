"""One service: the connections to it, and what belongs to no single sandbox (keys, quotas, runtimes …)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ringfence.model.errors import InvalidRequest
from ringfence.sdk import settings as configured
from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.settings import Settings
from ringfence.sdk.transport import Transport

_Made = TypeVar("_Made")


class AsyncService:
    """A Ringfence service. Without arguments the one that is configured (``RINGFENCE_URL`` and
    ``RINGFENCE_API_KEY``, or ``ringfence login``); with none configured, one is started for this process.

    >>> async with AsyncService() as service:
    ...     sandbox = await AsyncSandbox.create(service=service)
    ...     await sandbox.kill()

    Raises:
        InvalidRequest: what is configured can't be right.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, *, settings: Settings | None = None
    ) -> None:
        self._settings = settings or configured.find(url, key)
        self._transport: Transport | None = None
        self._opening: asyncio.Lock | None = None
        self._holders = 0
        self._shared = False

    async def transport(self) -> Transport:
        """Its connections; started if this process has to serve itself."""
        if self._transport is not None:
            return self._transport
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._transport is None:
                if self._settings is None:
                    from ringfence.sdk import embedded

                    self._settings = await embedded.start()
                self._transport = Transport(self._settings)
        return self._transport

    @property
    def url(self) -> str:
        """Its address; empty before a service of this process's own was started."""
        return self._settings.url if self._settings else ""

    async def close(self) -> None:
        """Close the connections; sandboxes live on. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> AsyncService:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- shared ones close with the last of those that use them

    def hold(self) -> AsyncService:
        """One more uses it."""
        self._holders += 1
        return self

    async def release(self) -> None:
        """One less; a shared one without users is closed."""
        self._holders -= 1
        if self._holders <= 0 and self._shared:
            await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        key: str = "",
        safe: bool = False,
    ) -> Any:
        """Any call of the API, for what has no method here; the JSON of its answer.

        >>> async with AsyncService() as service:
        ...     found = await service.call("GET", "/v1/runtimes")
        """
        transport = await self.transport()
        return await transport.call(method, path, json=json, params=params, key=key, safe=safe)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncService] = WeakKeyDictionary()


def shared() -> AsyncService:
    """The configured service, one for each event loop."""
    loop = asyncio.get_running_loop()
    settings = configured.find()
    found = _shared.get(loop)
    if found is not None and (settings is None or found._settings is None or found._settings == settings):
        return found
    service = AsyncService(settings=settings)
    service._shared = True
    _shared[loop] = service
    if BACKGROUND.owns(loop):
        service.hold()  # the blocking SDK keeps its connections until the process ends
        BACKGROUND.at_end(service.close)
    return service


def of(service: AsyncService | None) -> AsyncService:
    """This one, else the configured one; held for the caller, who releases it."""
    if service is not None and not isinstance(service, AsyncService):
        raise InvalidRequest(
            f"service: {type(service).__name__} is no service", hint="pass a Service or AsyncService"
        )
    return (service or shared()).hold()


class Opening(Generic[_Made]):
    """Something that is awaited, or entered at once: ``await x`` and ``async with x as y`` both work."""

    def __init__(self, make: Callable[[], Awaitable[_Made]]) -> None:
        self._make = make
        self._made: Any = None

    def __await__(self) -> Generator[Any, None, _Made]:
        return self._make().__await__()

    async def __aenter__(self) -> _Made:
        self._made = await self._make()
        entered: _Made = await self._made.__aenter__()
        return entered

    async def __aexit__(self, *reason: object) -> None:
        await self._made.__aexit__(*reason)


async def items(
    service: AsyncService | None,
    path: str,
    make: Callable[[Any], _Made],
    params: Mapping[str, Any] | None = None,
) -> AsyncIterator[_Made]:
    """Everything in a list of the API, as values of the SDK."""
    held = of(service)
    try:
        transport = await held.transport()
        async for value in transport.pages(path, params):
            yield make(value)
    finally:
        await held.release()
