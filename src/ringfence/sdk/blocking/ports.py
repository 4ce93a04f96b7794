"""``ringfence.sdk.ports`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from ringfence.model.errors import RingfenceError
from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade
from ringfence.sdk.ports import AsyncTunnel


class Tunnel(Facade):
    """A local TCP port whose connections lead to a port inside. Close it, or use ``with``.

    >>> with Sandbox.create() as sandbox:
    ...     server = sandbox.start("python3 -m http.server 8000")
    ...     with sandbox.tunnel(8000) as tunnel:
    ...         print(tunnel.host, tunnel.port > 0)
    127.0.0.1 True
    """

    _async: AsyncTunnel

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self._async.host

    @property
    def port(self) -> int:
        """The local port."""
        return self._async.port

    @property
    def failure(self) -> RingfenceError | None:
        """Why the last connection that could not be made was not; ``None`` if all could."""
        return self._async.failure

    def close(self) -> None:
        """End it and all of its connections. Idempotent."""
        BACKGROUND.run(self._async.close())

    def __enter__(self) -> Tunnel:
        BACKGROUND.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        BACKGROUND.run(self._async.__aexit__(*_))
