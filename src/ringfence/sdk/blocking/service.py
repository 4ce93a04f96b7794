"""``ringfence.sdk.service`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade
from ringfence.sdk.service import AsyncService
from ringfence.sdk.settings import Settings


class Service(Facade):
    """A Ringfence service. Without arguments the one that is configured (``RINGFENCE_URL`` and
    ``RINGFENCE_API_KEY``, or ``ringfence login``); with none configured, one is started for this process.

    >>> with Service() as service:
    ...     sandbox = Sandbox.create(service=service)
    ...     _ = sandbox.kill()

    Raises:
        InvalidRequest: what is configured can't be right.
    """

    _async: AsyncService

    def __init__(
        self, url: str | None = None, key: str | None = None, *, settings: Settings | None = None
    ) -> None:
        self._async = AsyncService(url, key, settings=settings)

    @property
    def url(self) -> str:
        """Its address; empty before a service of this process's own was started."""
        return self._async.url

    def close(self) -> None:
        """Close the connections; sandboxes live on. Idempotent."""
        BACKGROUND.run(self._async.close())

    def __enter__(self) -> Service:
        BACKGROUND.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        BACKGROUND.run(self._async.__aexit__(*_))

    def call(
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

        >>> with Service() as service:
        ...     found = service.call("GET", "/v1/runtimes")
        """
        return BACKGROUND.run(self._async.call(method, path, json=json, params=params, key=key, safe=safe))

    def whoami(self) -> Mapping[str, Any]:
        """Organisation, project, user and scopes of the key in use."""
        return BACKGROUND.run(self._async.whoami())

    def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """What walls the service can put up: name, level, boundary, health, capabilities."""
        return BACKGROUND.run(self._async.runtimes())

    def keys(self) -> Sequence[Mapping[str, Any]]:
        """The project's keys. Needs the scope admin, as all that follows."""
        return BACKGROUND.run(self._async.keys())

    def create_key(
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
        return BACKGROUND.run(
            self._async.create_key(name, scopes=scopes, user=user, seconds=seconds, project=project)
        )

    def rotate_key(self, id: str, *, overlap: float = 0.0) -> Mapping[str, Any]:
        """Another key that may do the same; the old one is good for ``overlap`` seconds more."""
        return BACKGROUND.run(self._async.rotate_key(id, overlap=overlap))

    def revoke_key(self, id: str) -> Mapping[str, Any]:
        """From now on the key is good for nothing. Idempotent."""
        return BACKGROUND.run(self._async.revoke_key(id))

    def quota(self, project: str | None = None) -> Mapping[str, Any]:
        """The project's limits, and what it has now."""
        return BACKGROUND.run(self._async.quota(project))

    def set_quota(self, project: str, **limits: float | None) -> Mapping[str, Any]:
        """Change a project's limits (alive, cpus, memory, storage, creates, pool, requests, burst,
        connections, bandwidth, egress_requests, egress_bytes, egress_rate, egress_spend); ``None``: no limit.
        For operators.
        """
        return BACKGROUND.run(self._async.set_quota(project, **limits))

    def secrets(self) -> Sequence[Mapping[str, Any]]:
        """The project's secrets, as rules name them (``{{secret:NAME}}``), without their values."""
        return BACKGROUND.run(self._async.secrets())

    def put_secret(self, name: str, value: str) -> Mapping[str, Any]:
        """Store a secret, or rotate it: open doors use the new value from then on. Needs the scope admin."""
        return BACKGROUND.run(self._async.put_secret(name, value))

    def remove_secret(self, name: str) -> None:
        """Forget a secret. Needs the scope admin."""
        BACKGROUND.run(self._async.remove_secret(name))

    def questions(self) -> Sequence[Mapping[str, Any]]:
        """Requests that are held until somebody answers (policy ``onUnknown: ask``)."""
        return BACKGROUND.run(self._async.questions())

    def answer(self, question: str, *, allow: bool, remember: bool = False) -> Mapping[str, Any]:
        """Let a held request pass, or refuse it; ``remember``: from now on too, as a rule of the sandbox."""
        return BACKGROUND.run(self._async.answer(question, allow=allow, remember=remember))
