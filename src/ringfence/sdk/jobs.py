"""Jobs: commands that run to completion in sandboxes of their own, with results that outlive them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ringfence.model.errors import DeadlineExceeded
from ringfence.sdk import service as services
from ringfence.sdk import wire
from ringfence.sdk.policy import Policy
from ringfence.sdk.service import AsyncService
from ringfence.sdk.transport import CHUNK, closing
from ringfence.sdk.volumes import AsyncVolume

FINAL = ("succeeded", "failed", "cancelled")


class AsyncJob:
    """One job. It goes on when this process ends; :meth:`get` finds it again.

    >>> job = await AsyncJob.run("echo 42 > answer", outputs=["answer"])
    >>> print((await job.wait())["state"], await job.output("answer"))
    succeeded b'42\\n'
    """

    def __init__(self, service: AsyncService | None, value: Mapping[str, Any]) -> None:
        self._service = service
        self._value = value

    @classmethod
    async def run(
        cls,
        command: wire.Command,
        *,
        template: str | None = None,
        policy: Policy | Mapping[str, Any] | str | None = None,
        size: str | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        volumes: Mapping[str, AsyncVolume | str] | Sequence[Mapping[str, Any]] | None = None,
        outputs: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        deadline: float | str | None = None,
        retries: int | None = None,
        backoff: float | None = None,
        priority: int | None = None,
        ttl: float | str | None = None,
        service: AsyncService | None = None,
        **more: Any,
    ) -> AsyncJob:
        """Queue a job; returns at once.

        Args:
            command: text for the shell inside, or a program and its arguments.
            template, policy, size, env, volumes: of the sandbox that each attempt gets.
            files: path inside → content.
            outputs: paths inside that are kept when it ends.
            deadline: seconds (or ``"2h"``) for all attempts together.
            retries: attempts after the first; ``backoff``: seconds before the second, doubled each time.
            priority: higher ones come first. ``ttl``: seconds that it is kept after its end.
            more: further fields of ``POST /v1/jobs``.
        """
        body = wire.filled(
            template=template, policy=wire.policy(policy), size=size, env=dict(env) if env else None,
            files=wire.contents(files) if files else None, volumes=wire.volumes(volumes),
            outputs=[*outputs] or None, labels=dict(labels) if labels else None, deadline=deadline,
            backoff=backoff, retries=retries, priority=priority, ttl=ttl, **more,
        )  # fmt: skip
        body |= wire.command(command, env=None, cwd=None, timeout=None, root=False)
        return cls(service, await services.ask(service, "POST", "/v1/jobs", json=body, key=str(uuid.uuid4())))

    @classmethod
    async def get(cls, id: str, *, service: AsyncService | None = None) -> AsyncJob:
        """One, by its id. Raises NotFound."""
        return cls(service, await services.ask(service, "GET", f"/v1/jobs/{wire.segment(id)}"))

    @classmethod
    async def list(cls, *, service: AsyncService | None = None) -> AsyncIterator[AsyncJob]:
        """Those of the project."""
        async with closing(services.items(service, "/v1/jobs")) as values:
            async for value in values:
                yield cls(service, value)

    @property
    def id(self) -> str:
        """Its id."""
        return str(self._value["id"])

    @property
    def state(self) -> str:
        """Its state as it was last seen."""
        return str(self._value.get("state", ""))

    @property
    def info(self) -> Mapping[str, Any]:
        """Its record as it was last seen."""
        return self._value

    async def refresh(self) -> Mapping[str, Any]:
        """Its record as it is now."""
        self._value = await services.ask(self._service, "GET", self._path)
        return self._value

    async def wait(self, timeout: float = 3600.0) -> Mapping[str, Any]:
        """Its record when it has ended.

        Raises:
            DeadlineExceeded: it has not, within ``timeout`` seconds. It goes on.
        """
        until, pause = time.monotonic() + timeout, 0.05
        while (await self.refresh()).get("state") not in FINAL:
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"job {self.id} has not ended within {timeout:g} s", hint="it goes on")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 2.0)
        return self._value

    async def logs(self) -> AsyncIterator[bytes]:
        """What it printed, piece by piece."""
        held = services.of(self._service)
        try:
            async with (await held.transport()).stream("GET", f"{self._path}/logs") as response:
                async for piece in response.aiter_raw(CHUNK):
                    yield piece
        finally:
            await held.release()

    async def output(self, name: str) -> bytes:
        """An output that was kept, by its path or digest; a folder comes as a tar. Hostile bytes."""
        data = bytearray()
        held = services.of(self._service)
        try:
            path = f"{self._path}/artifacts/{wire.segment(name, 'output')}"
            async with (await held.transport()).stream("GET", path) as response:
                async for piece in response.aiter_raw(CHUNK):
                    data += piece
        finally:
            await held.release()
        return bytes(data)

    async def delete(self) -> None:
        """Forget it, with all that it left; it must have ended."""
        await services.ask(self._service, "DELETE", self._path)

    async def cancel(self) -> Mapping[str, Any]:
        """End it. Idempotent."""
        self._value = await services.ask(self._service, "POST", f"{self._path}/cancel", safe=True)
        return self._value

    async def retry(self) -> Mapping[str, Any]:
        """Another attempt of one that has ended."""
        self._value = await services.ask(self._service, "POST", f"{self._path}/retry")
        return self._value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.state})"

    @property
    def _path(self) -> str:
        return f"/v1/jobs/{wire.segment(self.id)}"
