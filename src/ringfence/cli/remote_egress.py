"""``ringfence egress`` at a service: what doors there did, their questions, its secrets and placeholders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ringfence.cli import remote

_LINES = 1000  # of a sandbox's log, the newest: as many as the API gives at once

_RECORDS = 10_000  # of a sandbox's requests, the newest: the same


def lines(sandbox: str) -> list[dict[str, Any]]:
    """What a sandbox asked for through its door, newest last. Raises NotFound: there is none."""

    async def ask(service: Any) -> Any:
        box = await remote.find(service, sandbox)
        return (await box.connections(_LINES))["items"]

    return [dict(line) for line in remote.with_service(ask)]


def records(sandbox: str) -> dict[str, Any]:
    """What was recorded of a sandbox, as HAR. Raises NotFound: there is none."""

    async def ask(service: Any) -> Any:
        return await (await remote.find(service, sandbox)).records(_RECORDS)

    return dict(remote.with_service(ask))


def questions() -> Sequence[Any]:
    """Requests of the project's sandboxes that wait for an answer."""
    return remote.with_service(lambda service: service.questions())


def answer(question: str, *, allow: bool, remember: bool) -> Any:
    """Answer one. Raises NotFound: none such is open."""
    return remote.with_service(lambda service: service.answer(question, allow=allow, remember=remember))


def secrets() -> Sequence[Any]:
    """The project's."""
    return remote.with_service(lambda service: service.secrets())


def put_secret(name: str, value: str) -> Any:
    """Store or rotate one."""
    return remote.with_service(lambda service: service.put_secret(name, value))


def remove_secret(name: str) -> None:
    """Forget one."""
    remote.with_service(lambda service: service.remove_secret(name))


def revoke(options: argparse.Namespace) -> int:
    """Take placeholders back."""
    info = remote.with_sandbox(options.name, lambda box: box.revoke_placeholders(*options.of))
    of = ", ".join(options.of) or "those that it was copied from"
    return remote.say(
        options, {"sandbox": info.id, "of": options.of}, f"{info.id}: placeholders of {of} are void"
    )
