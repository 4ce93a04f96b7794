"""``ringfence.wasm``: exported functions with typed values, host functions by grant, limits of a call."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit
from ringfence.model.errors import DeadlineExceeded, InvalidRequest, LinkLost
from ringfence.model.policy import Policy, Process, Wall
from ringfence.wasm import Module, OutOfFuel, Trap
from support.modules import FUNCTIONS, PLAIN, wasm


async def test_values(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "plain.wasm"
    path.write_bytes(wasm(PLAIN))
    async with await Module.open(path, node=kit.node) as module:
        assert {"add", "pair", "nothing"} <= set(module.exports)
        assert await module.call("add", 2, 40) == 42
        assert await module.call("wide", 2**63 - 1) == 2**63 - 1
        pair = await module.call("pair", math.inf, -0.5)
        assert pair == (math.inf, -0.5)
        assert math.isnan((await module.call("pair", math.nan, 0))[0])
        assert await module.call("nothing") is None
        assert [await module.call("count") for _ in range(3)] == [1, 2, 3]  # one instance
        for words in (("add", 1), ("add", 1.5, 1), ("add", 2**40, 1), ("none",), ("memory",)):
            with pytest.raises(Trap):
                await module.call(*words)
        assert await module.call("count") == 4  # a call that never began spoils nothing


async def test_traps_begin_anew(kit: Kit) -> None:
    async with await Module.open(wasm(PLAIN), node=kit.node) as module:
        assert await module.call("count") == 1
        for name in ("bad", "deep"):
            with pytest.raises(Trap):
                await module.call(name)
            assert await module.call("count") == 1


async def test_deadline_and_fuel(kit: Kit) -> None:
    async with await Module.open(wasm(PLAIN), node=kit.node, fuel=1_000_000) as module:
        with pytest.raises(OutOfFuel):
            await module.call("spin")
        assert await module.call("add", 1, 2) == 3
    async with await Module.open(wasm(PLAIN), node=kit.node) as module:
        with pytest.raises(DeadlineExceeded):
            await module.call("spin", deadline=0.05)
        assert await module.call("add", 1, 2) == 3


async def test_a_cancelled_call_is_ended(kit: Kit) -> None:
    async with await Module.open(wasm(PLAIN), node=kit.node) as module:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await module.call("spin")
        assert await module.call("add", 1, 2) == 3


async def test_host_functions_are_granted_by_name(kit: Kit) -> None:
    seen: list[int] = []

    async def twice(number: int) -> int:
        seen.append(number)
        return 2 * number

    granting = Policy(wall=Wall(process=Process(host_functions=("env.twice",))))
    async with await Module.open(
        wasm(FUNCTIONS), host={"env.twice": twice}, policy=granting, node=kit.node
    ) as module:
        assert await module.call("host", 21) == 42
        assert seen == [21]
    denying = replace(granting, wall=Wall())
    with pytest.raises(InvalidRequest, match=r"env\.twice"):
        await Module.open(wasm(FUNCTIONS), host={"env.twice": twice}, policy=denying, node=kit.node)
    # Granted and not given, or neither: the module does not even start.
    for policy in (granting, denying):
        with pytest.raises(Trap, match="twice"):
            await Module.open(wasm(FUNCTIONS), policy=policy, node=kit.node)
    assert seen == [21]


async def test_a_host_function_that_fails_is_a_trap(kit: Kit) -> None:
    def fails(number: int) -> int:
        raise ValueError("mine")

    async with await Module.open(wasm(FUNCTIONS), host={"env.twice": fails}, node=kit.node) as module:
        with pytest.raises(Trap, match="mine"):
            await module.call("host", 1)
        assert await module.call("add", 1, 1) == 2


async def test_memory_has_an_end(kit: Kit) -> None:
    small = Policy(wall=Wall(resources=replace(Wall().resources, memory=64 << 20, disk=16 << 20)))
    async with await Module.open(wasm(PLAIN), policy=small, node=kit.node) as module:
        assert await module.call("grow", 16) == 1
        assert await module.call("grow", 30_000) == -1


async def test_a_sandbox_that_is_gone(kit: Kit) -> None:
    async with await Module.open(wasm(PLAIN), node=kit.node) as module:
        await module.sandbox.stop(0)
        with pytest.raises(LinkLost):
            await module.call("add", 1, 2)


async def test_no_module(kit: Kit) -> None:
    with pytest.raises(InvalidRequest, match="no WebAssembly module"):
        await Module.open(b"\0asm garbage", node=kit.node)
    with pytest.raises(InvalidRequest, match="can't be read"):
        await Module.open("/no/such.wasm", node=kit.node)
