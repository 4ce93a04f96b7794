"""Calling exported functions of a WebAssembly module, with typed values, in a sandbox of its own::

    async with await Module.open("tax.wasm") as module:
        total = await module.call("total", 1200, 0.19)

The module runs on the runtime ``wasm``: in a worker process, with the memory, fuel and deadline that it is
given, and with the host functions that the policy grants by name; nothing else of the host exists for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import struct
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import DeadlineExceeded, GuestError, InvalidRequest, LinkLost
from ringfence.model.levels import Level
from ringfence.model.policy import Isolation, Mount, Policy
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node

Number = int | float
Host = Callable[..., Number | tuple[Number, ...] | Awaitable[Any] | None]
INSIDE = "/module.wasm"
_FUEL = "RINGFENCE_WASM_FUEL"
_CALLER = "ringfence-call"
_INTERRUPT, _OUT_OF_FUEL = 10, 11
_MOST = 1 << 20  # bytes of a message
_LENGTH = struct.Struct("<I")


class Trap(GuestError):
    """The module did something that WebAssembly forbids; its instance was thrown away and made anew."""

    code = "wasm_trap"


class OutOfFuel(Trap):
    """The call used up the fuel that it was given."""

    code = "wasm_out_of_fuel"


class Module:
    """A module in a sandbox, ready to be called.

    Calls follow each other on one instance, whose state lives on until a trap. Open with :meth:`open`; a
    context manager.
    """

    def __init__(self) -> None:
        self.exports: tuple[str, ...] = ()
        self.sandbox: NodeSandbox
        self._node: Node
        self._own_node = False
        self._process: Any = None
        self._stdout: Any = None
        self._seen = bytearray()
        self._said = bytearray()
        self._host: Mapping[str, Host] = {}
        self._calling = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        source: bytes | str | os.PathLike[str],
        *,
        host: Mapping[str, Host] | None = None,
        policy: Policy | None = None,
        fuel: int | None = None,
        node: Node | None = None,
    ) -> Self:
        """Start a sandbox with the module in it.

        Args:
            source: WebAssembly bytes, or the path of a file.
            host: functions that the module may import, as ``{"module.name": callable}``. With a policy, each
                must be among its ``process.hostFunctions``; without one, giving it is granting it.
            policy: limits; its runtime is ``wasm`` whatever it says of the isolation.
            fuel: how much work a call may do, in Wasmtime's units (about one an instruction).
            node: where to start it; one of its own if ``None``.

        Raises:
            InvalidRequest: no module, or a host function that the policy does not grant.
            RuntimeUnavailable: Wasmtime is not installed.
            Trap: the module asks for an import that it does not get, or traps while it starts.
        """
        functions = dict(host or {})
        base = policy or Policy()
        granted = base.wall.process.host_functions if policy is not None else tuple(sorted(functions))
        denied = sorted(set(functions) - set(granted))
        if denied:
            raise InvalidRequest(
                f"the policy grants no host function {', '.join(denied)}",
                hint="add it to process.hostFunctions",
            )
        module = cls()
        module._host = functions
        code = source if isinstance(source, bytes) else await asyncio.to_thread(_read, source)
        with tempfile.TemporaryDirectory(prefix="ringfence-module-") as folder:
            path = Path(folder) / "module.wasm"
            path.write_bytes(code)
            path.chmod(0o644)
            wall = replace(
                base.wall,
                isolation=Isolation(minimum=Level.L1, runtime="wasm"),
                filesystem=replace(
                    base.wall.filesystem,
                    mounts=(*base.wall.filesystem.mounts, Mount(str(path), INSIDE, read_only=True)),
                ),
                # What is granted and not given would only fail later, in the middle of a call.
                process=replace(base.wall.process, host_functions=tuple(sorted(functions))),
            )
            env = {} if fuel is None else {_FUEL: str(fuel)}
            request = SandboxRequest(policy=replace(base, wall=wall), env=env)
            module._own_node = node is None
            module._node = node or await Node.open(adopt=False)
            try:
                module.sandbox = await module._node.create(request)
                await module._begin()
            except BaseException:
                await module.close()
                raise
        return module

    async def _begin(self) -> None:
        spec = ProcessSpec((_CALLER, INSIDE), stdin=True)
        self._process = await self.sandbox.start(spec)
        self._stdout = aiter(self._process)
        first = await self._receive()
        if "error" in first:
            raise _trap(first)
        self.exports = tuple(str(name) for name in first.get("exports", ()))

    async def call(self, name: str, *args: Number, deadline: float | None = None) -> Any:
        """Call an exported function.

        Args:
            name: of the function.
            args: ``int`` for i32 and i64, ``int`` or ``float`` for f32 and f64.
            deadline: seconds.

        Returns:
            The value; ``None`` where it has none, a tuple where it has several.

        Raises:
            Trap: it trapped; or there is no such function, or the arguments don't fit its type.
            OutOfFuel: it used up its fuel.
            DeadlineExceeded: it ran for too long.
            LinkLost: the sandbox has ended (out of memory, deadline of the policy).
        """
        async with self._calling:
            try:
                await self._send({"call": name, "args": list(args), "deadline": deadline})
                while "host" in (answer := await self._receive()):
                    await self._send(await self._serve(answer))
            except asyncio.CancelledError:
                await self._abandon()
                raise
        if "error" in answer:
            raise _trap(answer)
        value = answer["value"]
        return value[0] if len(value) == 1 else tuple(value) if value else None

    async def _serve(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A host function: the module is hostile, and gets what it was granted and nothing else."""
        function = self._host.get(str(asked["host"]))
        if function is None:
            return {"error": "this function is not granted"}
        try:
            value = function(*asked.get("args", ()))
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if value is None:
            return {"value": []}
        return {"value": list(value) if isinstance(value, tuple) else [value]}

    async def _abandon(self) -> None:
        """A call that nobody waits for: begin anew."""
        with contextlib.suppress(Exception):
            await self._process.signal(9)
            await self._process.close()
            self._seen.clear()
            await self._begin()

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            text = json.dumps(message).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"no number: {error}") from error
        if len(text) > _MOST:
            raise InvalidRequest("the arguments are too long")
        await self._process.write(_LENGTH.pack(len(text)) + text)

    async def _receive(self) -> dict[str, Any]:
        while True:
            if len(self._seen) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._seen)
                if size > _MOST:
                    raise Trap("the worker sent nonsense")
                if len(self._seen) >= _LENGTH.size + size:
                    text = bytes(self._seen[_LENGTH.size : _LENGTH.size + size])
                    del self._seen[: _LENGTH.size + size]
                    try:
                        message = json.loads(text)
                    except ValueError:
                        message = None
                    if not isinstance(message, dict):
                        raise Trap("the worker sent nonsense")
                    return message
            try:
                stream, _, data = await anext(self._stdout)
            except StopAsyncIteration:
                said = self._said.decode(errors="replace").strip()
                raise LinkLost(
                    f"the module's process has ended{': ' + said if said else ''}", hint="open it again"
                ) from None
            if stream == 1:
                self._seen += data
            else:
                self._said = (self._said + data)[-2000:]

    async def close(self) -> None:
        """End the sandbox. Idempotent."""
        sandbox = getattr(self, "sandbox", None)
        if sandbox is not None:
            await sandbox.destroy()
        if self._own_node:
            self._own_node = False
            await self._node.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def call(
    source: bytes | str | os.PathLike[str],
    name: str,
    *args: Number,
    deadline: float | None = None,
    **options: Any,
) -> Any:
    """One call, without asyncio: :meth:`Module.open` with ``options``, :meth:`Module.call`, and the end."""

    async def once() -> Any:
        async with await Module.open(source, **options) as module:
            return await module.call(name, *args, deadline=deadline)

    return asyncio.run(once())


def _trap(answer: dict[str, Any]) -> Exception:
    text = str(answer.get("error", ""))[:2000]
    if answer.get("trap") == _INTERRUPT:
        return DeadlineExceeded("the call ran for longer than its deadline", hint="raise deadline")
    if answer.get("trap") == _OUT_OF_FUEL:
        return OutOfFuel("the call used up its fuel", hint="raise fuel")
    if answer.get("exit") is not None:
        return Trap(f"the module exited with {answer['exit']}")
    return Trap(text)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the module {os.fspath(path)} can't be read: {error.strerror}") from error
