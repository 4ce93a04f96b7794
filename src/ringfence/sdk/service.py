"""One service: the connections to it, and what belongs to no single sandbox (keys, quotas, runtimes …)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote
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
    ...     _ = await sandbox.kill()

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

    # -- whose key this is, keys, quotas

    async def whoami(self) -> Mapping[str, Any]:
        """Organisation, project, user and scopes of the key in use."""
        return await self._got("/v1/me")

    async def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """What walls the service can put up: name, level, boundary, health, capabilities."""
        return [each async for each in (await self.transport()).pages("/v1/runtimes")]

    async def keys(self) -> Sequence[Mapping[str, Any]]:
        """The project's keys. Needs the scope admin, as all that follows."""
        return [each async for each in (await self.transport()).pages("/v1/keys")]

    async def create_key(
        self,
        name: str = "",
        *,
        scopes: Sequence[str] = ("run",),
        user: str = "",
        seconds: float | None = None,
        project: str | None = None,
    ) -> Mapping[str, Any]:
        """Make a key: ``secret`` in the answer is the only time that it is shown.

        Args:
            name, user: what it is for, and whose it is.
            scopes: of read, run, admin.
            seconds: after which it expires.
            project: another one, for operators.
        """
        body: dict[str, Any] = {"name": name, "user": user, "scopes": [*scopes]}
        body |= {"seconds": seconds} if seconds is not None else {}
        body |= {"project": project} if project is not None else {}
        made: Mapping[str, Any] = await self.call("POST", "/v1/keys", json=body)
        return made

    async def rotate_key(self, id: str, *, overlap: float = 0.0) -> Mapping[str, Any]:
        """Another key that may do the same; the old one is good for ``overlap`` seconds more."""
        made: Mapping[str, Any] = await self.call(
            "POST", f"/v1/keys/{quote(id, safe='')}/rotate", json={"overlap": overlap}
        )
        return made

    async def revoke_key(self, id: str) -> Mapping[str, Any]:
        """From now on the key is good for nothing. Idempotent."""
        gone: Mapping[str, Any] = await self.call("DELETE", f"/v1/keys/{quote(id, safe='')}")
        return gone

    async def quota(self, project: str | None = None) -> Mapping[str, Any]:
        """The project's limits, and what it has now."""
        return await self._got(
            "/v1/quota" if project is None else f"/v1/projects/{quote(project, safe='')}/quota"
        )

    async def set_quota(self, project: str, **limits: float | None) -> Mapping[str, Any]:
        """Change a project's limits (alive, cpus, memory, storage, creates, pool, requests, burst,
        connections, bandwidth, egress_requests, egress_bytes, egress_rate, egress_spend); ``None``: no limit.
        For operators.
        """
        path = f"/v1/projects/{quote(project, safe='')}/quota"
        changed: Mapping[str, Any] = await self.call("PATCH", path, json=limits, safe=True)
        return changed

    # -- the egress door: secrets of the project, questions of its sandboxes

    async def secrets(self) -> Sequence[Mapping[str, Any]]:
        """The project's secrets, as rules name them (``{{secret:NAME}}``), without their values."""
        return [each async for each in (await self.transport()).pages("/v1/secrets")]

    async def put_secret(self, name: str, value: str) -> Mapping[str, Any]:
        """Store a secret, or rotate it: open doors use the new value from then on. Needs the scope admin."""
        stored: Mapping[str, Any] = await self.call(
            "PUT", f"/v1/secrets/{quote(name, safe='')}", json={"value": value}, safe=True
        )
        return stored

    async def remove_secret(self, name: str) -> None:
        """Forget a secret. Needs the scope admin."""
        await self.call("DELETE", f"/v1/secrets/{quote(name, safe='')}")

    async def questions(self) -> Sequence[Mapping[str, Any]]:
        """Requests that are held until somebody answers (policy ``onUnknown: ask``)."""
        return [each async for each in (await self.transport()).pages("/v1/egress/questions")]

    async def answer(self, question: str, *, allow: bool, remember: bool = False) -> Mapping[str, Any]:
        """Let a held request pass, or refuse it; ``remember``: from now on too, as a rule of the sandbox."""
        said: Mapping[str, Any] = await self.call(
            "POST",
            f"/v1/egress/questions/{quote(question, safe='')}",
            json={"allow": allow, "remember": remember},
        )
        return said

    async def _got(self, path: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self.call("GET", path)
        return found


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


async def ask(service: AsyncService | None, method: str, path: str, **options: Any) -> Any:
    """One call to this service, else to the configured one; options as for ``Transport.call``."""
    held = of(service)
    try:
        return await (await held.transport()).call(method, path, **options)
    finally:
        await held.release()


async def items(
    service: AsyncService | None, path: str, params: Mapping[str, Any] | None = None
) -> AsyncIterator[Any]:
    """Everything in a list of the API."""
    held = of(service)
    try:
        transport = await held.transport()
        async for value in transport.pages(path, params):
            yield value
    finally:
        await held.release()
