"""Calls of exported functions, one after the other, over standard input and output; in a child of the worker.

Every message is a u32 length (little-endian) and JSON. From the host: ``{"call": name, "args": […],
"deadline": seconds?}``, or ``{"value": […]}``/``{"error": text}`` as the answer to a host function. To the
host: ``{"value": […]}``, ``{"error": text, "trap": code?}``, or ``{"host": "module.name", "args": […]}``,
which asks for a host function that the policy granted. The first message to the host lists the exports.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ringfence.runtimes.wasm.engine import Engine, EngineError, Instance, Number

MOST = 1 << 20  # bytes of a message
_LENGTH = struct.Struct("<I")


def packed(message: dict[str, Any]) -> bytes:
    """A message as bytes."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def _send(message: dict[str, Any]) -> None:
    data = packed(message)
    while data:
        data = data[os.write(1, data) :]


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            os._exit(0)  # the host has gone
        data += more
    return data


def _receive() -> dict[str, Any]:
    (size,) = _LENGTH.unpack(_exactly(_LENGTH.size))
    if size > MOST:
        raise EngineError("a message that is too long")
    message: dict[str, Any] = json.loads(_exactly(size))
    return message


def _host(name: str) -> Callable[..., Sequence[Number]]:
    def called(*arguments: Number) -> Sequence[Number]:
        _send({"host": name, "args": arguments})
        answer = _receive()
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        found: list[Number] = answer["value"]
        return found

    return called


def serve(
    engine: Engine,
    module: int,
    config: dict[str, Any],
    fuel: int | None,
    deadline: float | None,
    folders: list[tuple[str, str, bool]],
) -> None:
    """Answer calls until the host closes the stream."""
    granted = set(config["host_functions"])
    imports = engine.imports(module)

    def fresh() -> Instance:
        instance = Instance(engine, memory=config["memory"] or -1, fuel=fuel)
        # Its streams carry the calls: the module itself has none.
        instance.wasi([], [], folders, streams=False)
        for where, name, kind in imports:
            if f"{where}.{name}" in granted and kind:
                instance.define(where, name, kind, _host(f"{where}.{name}"))
        instance.instantiate(module)
        if instance.has("_initialize"):
            instance.call("_initialize")
        return instance

    try:
        instance = fresh()
    except EngineError as error:
        _send({"error": str(error), "trap": error.trap})
        return
    _send({"exports": engine.exports(module)})
    while True:
        message = _receive()
        limit = message.get("deadline", deadline)
        try:
            with _Watch(engine, instance, limit, fuel):
                value = instance.call(str(message["call"]), *message["args"])
            answer: dict[str, Any] = {"value": value}
        except EngineError as error:
            answer = {"error": str(error), "trap": error.trap, "exit": error.exit}
            if error.trap is not None or error.exit is not None:
                # What it left behind is no state to go on from.
                instance.close()
                instance = fresh()
        _send(answer)


class _Watch:
    """The deadline and the fuel of one call."""

    def __init__(self, engine: Engine, instance: Instance, seconds: float | None, fuel: int | None) -> None:
        self._engine = engine
        self._fuel = fuel
        self._instance = instance
        self._seconds = seconds

    def __enter__(self) -> None:
        self._instance.refuel(self._fuel)
        if self._seconds is not None:
            import _thread

            self._done = _thread.allocate_lock()
            self._done.acquire()
            _thread.start_new_thread(self._wait, (self._done, self._seconds))

    def _wait(self, done: Any, seconds: float) -> None:
        if not done.acquire(timeout=seconds):
            self._engine.increment_epoch()

    def __exit__(self, *_: object) -> None:
        if self._seconds is not None:
            self._done.release()
