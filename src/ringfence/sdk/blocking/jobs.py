"""``ringfence.sdk.jobs`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringfence.sdk import wire
from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _plain
from ringfence.sdk.blocking.service import Service
from ringfence.sdk.blocking.volumes import Volume
from ringfence.sdk.jobs import AsyncJob
from ringfence.sdk.policy import Policy


class Job(Facade):
    """One job. It goes on when this process ends; :meth:`get` finds it again.

    >>> job = Job.run("echo 42 > answer", outputs=["answer"])
    >>> print(job.wait()["state"], job.output("answer"))
    succeeded b'42\\n'
    """

    _async: AsyncJob

    @classmethod
    def run(
        cls,
        command: wire.Command,
        *,
        template: str | None = None,
        policy: Policy | Mapping[str, Any] | str | None = None,
        size: str | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        volumes: Mapping[str, Volume | str] | Sequence[Mapping[str, Any]] | None = None,
        outputs: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        deadline: float | str | None = None,
        retries: int | None = None,
        backoff: float | None = None,
        priority: int | None = None,
        ttl: float | str | None = None,
        service: Service | None = None,
        **more: Any,
    ) -> Job:
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
        return Job._of(
            BACKGROUND.run(
                AsyncJob.run(
                    command,
                    template=template,
                    policy=policy,
                    size=size,
                    env=env,
                    files=files,
                    volumes=_plain(volumes),
                    outputs=outputs,
                    labels=labels,
                    deadline=deadline,
                    retries=retries,
                    backoff=backoff,
                    priority=priority,
                    ttl=ttl,
                    service=_plain(service),
                    **more,
                )
            )
        )

    @classmethod
    def get(cls, id: str, *, service: Service | None = None) -> Job:
        """One, by its id. Raises NotFound."""
        return Job._of(BACKGROUND.run(AsyncJob.get(id, service=_plain(service))))

    @classmethod
    def list(cls, *, service: Service | None = None) -> Iterator[Job]:
        """Those of the project."""
        return (Job._of(each) for each in BACKGROUND.iterate(AsyncJob.list(service=_plain(service))))

    @property
    def id(self) -> str:
        """Its id."""
        return self._async.id

    @property
    def state(self) -> str:
        """Its state as it was last seen."""
        return self._async.state

    @property
    def info(self) -> Mapping[str, Any]:
        """Its record as it was last seen."""
        return self._async.info

    def refresh(self) -> Mapping[str, Any]:
        """Its record as it is now."""
        return BACKGROUND.run(self._async.refresh())

    def wait(self, timeout: float = 3600.0) -> Mapping[str, Any]:
        """Its record when it has ended.

        Raises:
            DeadlineExceeded: it has not, within ``timeout`` seconds. It goes on.
        """
        return BACKGROUND.run(self._async.wait(timeout))

    def logs(self) -> Iterator[bytes]:
        """What it printed, piece by piece."""
        return BACKGROUND.iterate(self._async.logs())

    def output(self, name: str) -> bytes:
        """An output that was kept, by its path or digest; a folder comes as a tar. Hostile bytes."""
        return BACKGROUND.run(self._async.output(name))

    def delete(self) -> None:
        """Forget it, with all that it left; it must have ended."""
        BACKGROUND.run(self._async.delete())

    def cancel(self) -> Mapping[str, Any]:
        """End it. Idempotent."""
        return BACKGROUND.run(self._async.cancel())

    def retry(self) -> Mapping[str, Any]:
        """Another attempt of one that has ended."""
        return BACKGROUND.run(self._async.retry())

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")
