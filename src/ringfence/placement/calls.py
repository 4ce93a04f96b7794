"""The calls of the placement contract as a node answers them: arguments looked at, results made JSON."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.ids import SANDBOX_ID
from ringfence.placement import templating
from ringfence.placement.values import placed_as_json, spec_from_json, texts

if TYPE_CHECKING:
    from ringfence.placement.hosting import Hosting
    from ringfence.placement.server import Input

Arguments = dict[str, Any]


class Calls:
    """What a node can be asked."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self.plain: dict[str, Callable[[Arguments], Awaitable[Any]]] = {
            name: getattr(self, "_" + name)
            for name in (
                "capacity", "runtimes", "start", "list", "get", "measure", "usage", "spent", "judge", "bind",
                "pause", "resume", "snapshot", "remove_snapshot", "reset", "bring_up", "changes", "destroy",
                "make_volume", "remove_volume", "volume_size", "templates", "add_template", "remove_template",
            )
        }  # fmt: skip
        self.sending: dict[str, Callable[[Arguments], AsyncGenerator[bytes, None]]] = {
            "export_volume": lambda given: hosting.volumes.export(_text(given, "id"))
        }
        self.receiving: dict[str, Callable[[Arguments, Input], Awaitable[Any]]] = {
            "import_volume": lambda given, tar: hosting.volumes.fill(_text(given, "id"), aiter(tar))
        }

    async def connect(self, given: Arguments) -> int:
        """A connected descriptor, the caller's to close."""
        sock = await self._hosting.connect(_id(given))
        return sock.detach()

    async def _capacity(self, given: Arguments) -> Any:
        return asdict(self._hosting.capacity())

    async def _runtimes(self, given: Arguments) -> Any:
        return await self._hosting.runtimes()

    async def _start(self, given: Arguments) -> Any:
        return placed_as_json(await self._hosting.start(spec_from_json(_mapping(given, "spec"))))

    async def _list(self, given: Arguments) -> Any:
        return [placed_as_json(each) for each in self._hosting.all()]

    async def _get(self, given: Arguments) -> Any:
        return placed_as_json(self._hosting.get(_id(given)))

    async def _measure(self, given: Arguments) -> Any:
        return await self._hosting.measure(_id(given))

    async def _usage(self, given: Arguments) -> Any:
        return await self._hosting.usage(_id(given))

    async def _spent(self, given: Arguments) -> Any:
        return self._hosting.spent(_id(given), _number(given, "output"))

    async def _judge(self, given: Arguments) -> Any:
        return await self._hosting.judge(_id(given), _number(given, "exit_code"), bool(given.get("sent")))

    async def _bind(self, given: Arguments) -> Any:
        env, labels, deadline = given.get("env"), given.get("labels"), given.get("deadline")
        if deadline is not None and not isinstance(deadline, int | float):
            raise InvalidRequest("deadline is no time")
        return placed_as_json(
            await self._hosting.bind(
                _id(given),
                env=None if env is None else texts(env, "env"),
                secrets=_secrets(given.get("secrets")),
                owner=None if given.get("owner") is None else _mapping(given, "owner"),
                labels=None if labels is None else texts(labels, "labels"),
                policy=None if given.get("policy") is None else _mapping(given, "policy"),
                deadline=deadline,
            )
        )

    async def _pause(self, given: Arguments) -> Any:
        await self._hosting.pause(_id(given))

    async def _resume(self, given: Arguments) -> Any:
        await self._hosting.resume(_id(given))

    async def _snapshot(self, given: Arguments) -> Any:
        kind = given.get("kind")
        return await self._hosting.snapshot(
            _id(given), _text(given, "name"), None if kind is None else _text(given, "kind")
        )

    async def _remove_snapshot(self, given: Arguments) -> Any:
        await self._hosting.remove_snapshot(_text(given, "name"))

    async def _reset(self, given: Arguments) -> Any:
        return placed_as_json(await self._hosting.reset(_id(given), hold=given.get("hold") is True))

    async def _bring_up(self, given: Arguments) -> Any:
        return placed_as_json(await self._hosting.bring_up(_id(given)))

    async def _changes(self, given: Arguments) -> Any:
        return await self._hosting.changes(_id(given))

    async def _destroy(self, given: Arguments) -> Any:
        grace = given.get("grace", 0.0)
        if not isinstance(grace, int | float) or not 0 <= grace <= 3600:
            raise InvalidRequest("grace is no number of seconds", hint="0 to 3600")
        return await self._hosting.destroy(_id(given), float(grace))

    async def _make_volume(self, given: Arguments) -> Any:
        await self._hosting.volumes.make(_text(given, "id"), _number(given, "quota"))

    async def _remove_volume(self, given: Arguments) -> Any:
        await self._hosting.volumes.remove(_text(given, "id"))

    async def _volume_size(self, given: Arguments) -> Any:
        return await self._hosting.volumes.size(_text(given, "id"))

    async def _templates(self, given: Arguments) -> Any:
        return await asyncio.to_thread(templating.listed, self._hosting.node)

    async def _add_template(self, given: Arguments) -> Any:
        return await templating.add(
            self._hosting.node, _text(given, "source"), _text(given, "name"), _mapping(given, "options")
        )

    async def _remove_template(self, given: Arguments) -> Any:
        await asyncio.to_thread(templating.remove, self._hosting.node, _text(given, "name"))


def _id(given: Arguments) -> str:
    name = _text(given, "id")
    if not SANDBOX_ID.fullmatch(name):
        raise InvalidRequest(f"{name!r} is no sandbox id")
    return name


def _text(given: Arguments, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or len(value) > 4096:
        raise InvalidRequest(f"{name} is no text")
    return value


def _number(given: Arguments, name: str) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 1 << 60:
        raise InvalidRequest(f"{name} is no whole number")
    return value


def _mapping(given: Arguments, name: str) -> dict[str, Any]:
    value = given.get(name)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is no mapping")
    return value


def _secrets(value: Any) -> Mapping[str, bytes] | None:
    if value is None:
        return None
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in texts(value, "secrets").items()}
    except (binascii.Error, ValueError):
        raise InvalidRequest("secrets are base 64") from None
