"""What verbs that speak to a service have in common: which one, one event loop, one way to print."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.cli.output import print_json

if TYPE_CHECKING:
    from ringfence.sdk.sandbox import AsyncSandbox
    from ringfence.sdk.service import AsyncService

_PATIENCE = 3.0  # seconds for a service that is not there, or full: somebody looks at an idle terminal
_Result = TypeVar("_Result")
Work = Callable[[argparse.Namespace], int]


def configured() -> bool:
    """Whether a service is named (RINGFENCE_URL) or logged in to."""
    from ringfence.sdk import settings

    return settings.find() is not None


def only(module: str, name: str) -> Work:
    """The work of a verb that only a service can do; its module is imported when it is called."""

    def work(options: argparse.Namespace) -> int:
        need(f"`ringfence {options.subcommand_name}`" if hasattr(options, "subcommand_name") else "this")
        return _called(module, name, options)

    return work


def either(local: Work, module: str, name: str) -> Work:
    """The work of a verb: with a service by the service, else on this machine's own node."""

    def work(options: argparse.Namespace) -> int:
        return _called(module, name, options) if configured() else local(options)

    return work


def need(what: str = "this") -> None:
    """Fail clearly where no service is configured.

    Raises:
        InvalidRequest: none is.
    """
    if not configured():
        from ringfence.model.errors import InvalidRequest

        raise InvalidRequest(
            f"{what} needs a service, and none is configured",
            hint="`ringfence serve`, then `ringfence login URL`, or RINGFENCE_URL and RINGFENCE_API_KEY",
        )


def _called(module: str, name: str, options: argparse.Namespace) -> int:
    code: int = getattr(import_module(f"ringfence.cli.{module}"), name)(options)
    return code


def with_service(work: Callable[[AsyncService], Awaitable[_Result]]) -> _Result:
    """Do something with the configured service."""
    import asyncio
    from dataclasses import replace

    from ringfence.sdk import settings
    from ringfence.sdk.service import AsyncService

    found = settings.find()
    patient = found and replace(found, retry_for=_PATIENCE)

    async def do() -> _Result:
        async with AsyncService(settings=patient) as service:
            return await work(service)

    return asyncio.run(do())


def with_sandbox(name: str, work: Callable[[AsyncSandbox], Awaitable[_Result]]) -> _Result:
    """Do something with a sandbox of the configured service; it lives on."""

    async def do(service: AsyncService) -> _Result:
        return await work(await find(service, name))

    return with_service(do)


async def find(service: AsyncService, name: str) -> AsyncSandbox:
    """A sandbox by its id, or by its label ``name`` if it is the only living one that has it.

    Raises:
        NotFound: there is none. Conflict: there are several.
    """
    from ringfence.model.errors import Conflict, NotFound
    from ringfence.model.ids import SANDBOX_ID
    from ringfence.sdk.sandbox import AsyncSandbox

    if SANDBOX_ID.fullmatch(name):
        return await AsyncSandbox.connect(name, service=service)
    found = [
        info.id async for info in AsyncSandbox.list(labels={"name": name}, service=service) if not info.final
    ]
    if len(found) > 1:
        hint = "use an id: " + ", ".join(found[:5])
        raise Conflict(f"{len(found)} sandboxes have the name {name!r}", hint=hint)
    if not found:
        raise NotFound(f"there is no sandbox {name!r}", hint="`ringfence sandbox ls` shows those that live")
    return await AsyncSandbox.connect(found[0], service=service)


def say(options: argparse.Namespace, value: Any, text: str) -> int:
    """The answer: a document with ``--json``, else a line."""
    if options.json:
        print_json(value)
    elif text:
        print(text)
    return 0


def pairs(given: list[str], option: str) -> dict[str, str]:
    """``K=V`` options as a mapping.

    Raises:
        InvalidRequest: one has no ``=``.
    """
    from ringfence.model.errors import InvalidRequest

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidRequest(
                f"{option} {text!r} is no NAME=VALUE", hint=f"for example {option} team=blue"
            )
        found[name] = value
    return found


def environment(given: list[str]) -> dict[str, str]:
    """``--env`` options: ``K=V``, or ``K`` alone, taken from here."""
    import os

    from ringfence.model.errors import InvalidRequest

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            raise InvalidRequest(
                f"--env {text}: there is no such variable here", hint="write --env NAME=VALUE"
            )
        found[name] = value if equals else os.environ[name]
    return found
